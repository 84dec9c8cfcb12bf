"""Hidden states without tensors: a word for each step, over sockets. Needs no torch.

It carries the pipeline of the dummy model. On one machine stages find each other by name
(:mod:`aexec.parallel.abstract`), on several by the port of their rendezvous
(:mod:`aexec.parallel.directory`).
"""

from __future__ import annotations

import socket
import struct
import sys
import time
from typing import Protocol

from aexec.errors import ConfigError, PeerLost, ProtocolError
from aexec.parallel.abstract import NamedMeeting
from aexec.parallel.directory import DirectoryMeeting
from aexec.parallel.layout import RankLayout
from aexec.parallel.link import LinkStatistics
from aexec.parallel.rendezvous import tcp_address

__all__ = ("SocketLink",)

_MESSAGE = struct.Struct("<qQ?")  # step, word, failed


class _Meeting(Protocol):
    """How a rank gets its connections."""

    def meet(self) -> tuple[socket.socket | None, socket.socket | None]:
        """From the stage before, and to the stage after; None past the ends of the pipeline."""
        ...

    def close(self) -> None:
        """Nobody comes any longer."""
        ...


class SocketLink:
    """A ``StageLink`` of 64-bit words.

    Args:
        layout: Of all ranks that meet there, with more than one stage.
        rank: This rank, counted through all replicas; errors name the ranks of its own one.
        init_method: Where the ranks meet: ``file:///path`` on one machine, ``tcp://host:port``
            on several, where rank 0's process can listen.
        timeout: Seconds that one rank waits for another.
        host: Over TCP, this rank's address for the others; empty: the one it reaches rank 0 from.
        secret: Over TCP, what the ranks prove to each other.

    Raises:
        ConfigError: There is no such place, or no secret where one is needed.
        PeerLost: Somebody else has this rank's place there.
    """

    def __init__(
        self, layout: RankLayout, rank: int, *, init_method: str, timeout: float, host: str = "", secret: bytes = b""
    ) -> None:
        self._rank, self._timeout, replica = rank % layout.replica_size, timeout, layout.one_replica
        self._before, self._after = replica.neighbour(self._rank, -1), replica.neighbour(self._rank, 1)
        self._meeting = _meeting(layout, rank, init_method, timeout, host, secret)
        self._from: socket.socket | None = None
        self._to: socket.socket | None = None
        self._partial = b""
        self._received = self._sent = 0
        self._waited = 0.0

    def __repr__(self) -> str:
        return f"<SocketLink of rank {self._rank}: {self._before} to {self._after}, {self._sent} sent>"

    def statistics(self) -> LinkStatistics:
        """The figures so far; the kernel does not say what has arrived."""
        return LinkStatistics(self._received, self._sent, 0, self._waited)

    def open(self) -> None:
        """Connect to the stages beside; all ranks are made by now.

        Raises:
            PeerLost: One of them is not there.
        """
        self._from, self._to = self._meeting.meet()
        for connection in (self._from, self._to):
            if connection is not None:
                _be_patient(connection, self._timeout)

    def receive(self, step: int, _into: object, /) -> int:
        """Wait for the word of a step; see ``StageLink``."""
        doing = f"receive the hidden states of step {step}"
        sent_for, word, failed = self._next(doing)
        while sent_for < step:  # too late: its time-out was its end
            sent_for, word, failed = self._next(doing)
        if sent_for != step:
            raise ProtocolError(f"rank {self._rank} is at step {step}, and rank {self._before} sent step {sent_for}")
        if failed:
            raise PeerLost(self._rank, self._before, doing, "it failed at this step")
        return int(word)

    def send(self, step: int, hidden: int, /) -> None:
        """Hand a word on; see ``StageLink``."""
        self._send(step, hidden, failed=False)

    def send_failure(self, step: int, blank: int, /) -> None:
        """Tell the stage after that there will be nothing for this step."""
        self._send(step, blank, failed=True)

    def close(self) -> None:
        """Close all sockets; the stages beside see it."""
        self._meeting.close()
        for each in (self._from, self._to):
            if each is not None:
                each.close()

    def _next(self, doing: str) -> tuple[int, int, bool]:
        begun = time.monotonic()
        try:
            message = self._read()
        except OSError as error:
            raise PeerLost(self._rank, self._before, doing, _why(error)) from error
        finally:
            self._waited += time.monotonic() - begun
        if not message:
            raise PeerLost(self._rank, self._before, doing, "it closed the connection")
        self._received += 1
        sent_for, word, failed = _MESSAGE.unpack(message)
        return sent_for, word, failed

    def _read(self) -> bytes:
        """A whole message; a part that TCP has brought by the time-out is kept for the next time."""
        assert self._from is not None
        while len(self._partial) < _MESSAGE.size:
            more = self._from.recv(_MESSAGE.size - len(self._partial))
            if not more:
                return b""
            self._partial += more
        message, self._partial = self._partial, b""
        return message

    def _send(self, step: int, word: int, *, failed: bool) -> None:
        assert self._to is not None
        try:
            self._write(self._to, _MESSAGE.pack(step, word, failed))
        except OSError as error:
            doing = f"send the hidden states of step {step}"
            raise PeerLost(self._rank, self._after, doing, _why(error)) from error
        self._sent += 1

    def _write(self, to: socket.socket, message: bytes) -> None:
        if to.send(message) != len(message):  # TCP, and a window that is full to the last bytes
            to.close()  # what follows could not be told from the rest of this
            raise ConnectionError("it took a part of a step only, and then no more")


def _be_patient(connection: socket.socket, timeout: float) -> None:
    """The kernel keeps the time-out: no poll before each call, which stages would stand still for."""
    connection.settimeout(None)
    whole = int(timeout)
    limit = struct.pack("@ll", whole, max(int((timeout - whole) * 1e6), int(not whole)))  # none at all is no limit
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)


def _why(error: OSError) -> str:
    return "timed out" if isinstance(error, BlockingIOError) else str(error)


def _meeting(layout: RankLayout, rank: int, init_method: str, timeout: float, host: str, secret: bytes) -> _Meeting:
    scheme, _, path = init_method.partition("://")
    if scheme == "file" and sys.platform == "linux":
        return NamedMeeting(layout, rank, path=path, timeout=timeout)
    address = tcp_address(init_method)
    if address is None:
        raise ConfigError(
            f"the pipeline of the dummy model cannot meet at {init_method!r}: expected file:///path on Linux, "
            "as the backend 'mp' gives to workers on one node, or tcp://host:port, as 'ray' does"
        )
    return DirectoryMeeting(layout, rank, address, host=host, secret=secret, timeout=timeout)
