"""Hidden states without tensors: a word for each step, over Unix sockets. Needs no torch.

It carries the pipeline of the dummy model. Stages find each other by a name that follows
from the inode of the file at which the ranks meet, in the kernel's abstract namespace:
unique while that file lives, nothing to choose, nothing to clean up. The stage after binds
when it is made, and the stage before connects once all are made, so nobody has to try again.

Anybody on the machine may know such a name, so both ends ask the kernel whose process the
other one is, and have nothing to do with those of other users.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import sys
import time
from pathlib import Path

from aexec.errors import ConfigError, PeerLost, ProtocolError
from aexec.parallel.layout import RankLayout
from aexec.parallel.link import LinkStatistics

__all__ = ("SocketLink",)

_MESSAGE = struct.Struct("<qQ?")  # step, word, failed
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid
_BACKLOG = 16  # connections that wait: room for strangers beside the one that is meant


class SocketLink:
    """A ``StageLink`` of 64-bit words.

    Args:
        layout: Of one executor, with more than one stage.
        rank: This rank.
        init_method: ``file:///path``, where the ranks meet.
        timeout: Seconds that one rank waits for another.

    Raises:
        ConfigError: They do not meet at a file of this machine.
        PeerLost: Somebody else has this rank's place there.
    """

    def __init__(self, layout: RankLayout, rank: int, *, init_method: str, timeout: float) -> None:
        self._rank, self._timeout = rank, timeout
        self._before, self._after = layout.neighbour(rank, -1), layout.neighbour(rank, 1)
        self._meeting = _meeting(init_method)
        self._listener = self._bound() if self._before is not None else None
        self._from: socket.socket | None = None
        self._to: socket.socket | None = None
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
        if self._after is not None:
            self._to = self._connected(self._after)
        if self._listener is not None:
            self._from = self._accepted(self._listener)

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
        for each in (self._listener, self._from, self._to):
            if each is not None:
                each.close()

    def _next(self, doing: str) -> tuple[int, int, bool]:
        assert self._from is not None
        begun = time.monotonic()
        try:
            message = self._from.recv(_MESSAGE.size)
        except OSError as error:
            raise PeerLost(self._rank, self._before, doing, _why(error)) from error
        finally:
            self._waited += time.monotonic() - begun
        if not message:
            raise PeerLost(self._rank, self._before, doing, "it closed the connection")
        self._received += 1
        sent_for, word, failed = _MESSAGE.unpack(message)
        return sent_for, word, failed

    def _send(self, step: int, word: int, *, failed: bool) -> None:
        assert self._to is not None
        try:
            self._to.send(_MESSAGE.pack(step, word, failed))
        except OSError as error:
            doing = f"send the hidden states of step {step}"
            raise PeerLost(self._rank, self._after, doing, _why(error)) from error
        self._sent += 1

    def _bound(self) -> socket.socket:
        listener = _socket(self._timeout)
        try:
            listener.bind(self._address(self._rank))
            listener.listen(_BACKLOG)
        except OSError as error:
            listener.close()
            raise PeerLost(self._rank, self._before, "wait for the stage before", str(error)) from error
        return listener

    def _connected(self, peer: int) -> socket.socket:
        connection = _socket(self._timeout)
        try:
            connection.connect(self._address(peer))
            _check_user(connection)
        except OSError as error:
            connection.close()
            raise PeerLost(self._rank, peer, "connect to the stage after", str(error)) from error
        return _patient(connection, self._timeout)

    def _accepted(self, listener: socket.socket) -> socket.socket:
        """The stage before; strangers that come first are turned away."""
        deadline = time.monotonic() + self._timeout
        with listener:
            while True:
                listener.settimeout(max(deadline - time.monotonic(), 0.001))
                try:
                    connection, _ = listener.accept()
                except OSError as error:
                    raise PeerLost(self._rank, self._before, "meet the stage before", str(error)) from error
                with contextlib.suppress(PermissionError):
                    _check_user(connection)
                    return _patient(connection, self._timeout)
                connection.close()

    def _address(self, rank: int) -> str:
        return f"\0aexec-stage-{self._meeting}-{rank}"


def _socket(timeout: float) -> socket.socket:
    made = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    made.settimeout(timeout)
    return made


def _patient(connection: socket.socket, timeout: float) -> socket.socket:
    """The kernel keeps the time-out: no poll before each call, which stages would stand still for."""
    connection.settimeout(None)
    whole = int(timeout)
    limit = struct.pack("@ll", whole, max(int((timeout - whole) * 1e6), int(not whole)))  # none at all is no limit
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
    return connection


def _why(error: OSError) -> str:
    return "timed out" if isinstance(error, BlockingIOError) else str(error)


def _user_of(connection: socket.socket) -> int:
    """Of the process at the other end, as it was when the two met."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, user, _ = _CREDENTIALS.unpack(raw)
    return int(user)


def _check_user(connection: socket.socket) -> None:
    user = _user_of(connection)
    if user != os.getuid():
        raise PermissionError(f"a process of another user ({user}) is there instead")


def _meeting(init_method: str) -> str:
    scheme, _, path = init_method.partition("://")
    if scheme != "file" or sys.platform != "linux":
        raise ConfigError(
            f"the pipeline of the dummy model cannot meet at {init_method!r}: expected file:///path on Linux, "
            "as the backend 'mp' gives to workers on one node"
        )
    found = Path(path).stat()
    return f"{found.st_dev:x}-{found.st_ino:x}"
