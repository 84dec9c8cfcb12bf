"""Stages on several machines find each other by the one address that all know: rank 0's.

Every stage but the first listens on a port that the kernel chose. Rank 0 listens at the
address of the rendezvous; each of the others tells it where it listens, and is told where
the stage after its own does. Then each calls the stage after, and the directory is over.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import time
from collections.abc import Generator

import tenacity

from aexec.errors import PeerLost
from aexec.parallel.door import admit, call, key_of, left, listen, receive
from aexec.parallel.layout import RankLayout
from aexec.transport.handshake import Stranger

__all__ = ("DirectoryMeeting",)

_PAUSE = tenacity.wait_exponential(multiplier=0.01, exp_base=1.2, max=0.25)  # seconds before it calls again
_ENTRY = struct.Struct("<H62s")  # port, address as text
Address = tuple[str, int]
NOWHERE: Address = ("", 0)  # of a stage that nobody calls


class DirectoryMeeting:
    """How one rank meets the stages beside it.

    Args:
        layout: Of all ranks that meet there, with more than one stage.
        rank: This rank, counted through all replicas.
        address: Where rank 0 listens, or can: it keeps that port for this.
        host: This rank's address for the others; empty: the one it reaches rank 0 from.
        secret: What the ranks prove to each other.
        timeout: Seconds that one rank waits for another.

    Raises:
        ConfigError: There is no secret.
        PeerLost: Rank 0 cannot listen there.
    """

    def __init__(
        self, layout: RankLayout, rank: int, address: Address, *, host: str, secret: bytes, timeout: float
    ) -> None:
        self._layout, self._rank, self._address, self._host = layout, rank, address, host
        self._key, self._timeout = key_of(secret), timeout
        self._before, self._after = layout.neighbour(rank, -1), layout.neighbour(rank, 1)
        self._directory: socket.socket | None = None
        self._listener: socket.socket | None = None
        if rank == 0:
            with self._told("listen where the ranks meet", None):
                self._directory = listen(*address)

    def __repr__(self) -> str:
        host, port = self._address
        return f"<DirectoryMeeting of rank {self._rank} at {host} port {port}>"

    def meet(self) -> tuple[socket.socket | None, socket.socket | None]:
        """Connections from the stage before and to the stage after; rank 0 listens by now.

        Raises:
            PeerLost: One of them does not come in time, or is not who it should be.
        """
        deadline = time.monotonic() + self._timeout
        with contextlib.ExitStack() as undo:
            undo.callback(self.close)
            after = self._serve(deadline) if self._directory is not None else self._enquire(deadline)
            before, to = None, None
            if self._after is not None:
                with self._told("connect to the stage after", self._after):
                    to = call(after, self._key, self._rank, deadline)
                undo.callback(to.close)
            if self._listener is not None and self._before is not None:
                with self._told("meet the stage before", self._before):
                    ((_, before),) = admit(self._listener, self._key, (self._before,), deadline)
            undo.pop_all()
        self.close()
        return before, to

    def close(self) -> None:
        """Nobody comes any longer."""
        for each in (self._directory, self._listener):
            if each is not None:
                each.close()

    def _serve(self, deadline: float) -> Address:
        """Rank 0's part; where the stage after it listens."""
        assert self._directory is not None
        entries: dict[int, Address] = {}
        others = set(range(1, self._layout.size))
        with contextlib.ExitStack() as asking:
            connections: dict[int, socket.socket] = {}
            try:
                for rank, connection in admit(self._directory, self._key, others, deadline):
                    connections[rank] = asking.enter_context(connection)
            except OSError as error:
                missing = sorted(others - connections.keys())
                whom = ", ".join(map(str, missing))
                raise PeerLost(self._rank, missing[0], f"meet rank {whom}", str(error)) from error
            for rank, connection in connections.items():
                with self._told("hear where it listens", rank):
                    entries[rank] = _unpack(receive(connection, _ENTRY.size, deadline))
            for rank, connection in connections.items():
                after = self._layout.neighbour(rank, 1)
                with self._told("tell where the stage after it listens", rank):
                    connection.settimeout(left(deadline))
                    connection.sendall(_pack(NOWHERE if after is None else entries[after]))
        return NOWHERE if self._after is None else entries[self._after]

    def _enquire(self, deadline: float) -> Address:
        """Everybody else's."""
        with self._told("meet the other ranks at rank 0", 0), contextlib.ExitStack() as stack:
            directory = stack.enter_context(self._call_rank_0(deadline))
            own = NOWHERE
            if self._before is not None:
                self._listener = listen(self._host or directory.getsockname()[0], 0)
                own = self._listener.getsockname()[:2]
            directory.sendall(_pack(own))
            return _unpack(receive(directory, _ENTRY.size, deadline))

    def _call_rank_0(self, deadline: float) -> socket.socket:
        """Ranks of another replica may come before it listens: each replica waits for its own ranks only."""
        attempts = tenacity.Retrying(
            retry=tenacity.retry_if_exception_type(ConnectionRefusedError),
            wait=_PAUSE,
            stop=tenacity.stop_before_delay(left(deadline))
            if self._layout.data > 1
            else tenacity.stop_after_attempt(1),
            reraise=True,
        )
        return attempts(call, self._address, self._key, self._rank, deadline)

    @contextlib.contextmanager
    def _told(self, doing: str, peer: int | None) -> Generator[None]:
        try:
            yield
        except (OSError, Stranger) as error:
            raise PeerLost(self._rank, peer, doing, str(error)) from error


def _pack(address: Address) -> bytes:
    host, port = address
    return _ENTRY.pack(port, host.encode())


def _unpack(entry: bytes) -> Address:
    port, host = _ENTRY.unpack(entry)
    return host.rstrip(b"\0").decode(errors="replace"), port
