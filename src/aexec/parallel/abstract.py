"""Stages of one machine find each other by name: Unix sockets in the kernel's abstract namespace.

A name follows from the inode of the file at which the ranks meet: unique while that file
lives, nothing to choose, nothing to clean up. The stage after binds when it is made, and the
stage before connects once all are made, so nobody has to try again.

Anybody on the machine may know such a name, so both ends ask the kernel whose process the
other one is, and have nothing to do with those of other users.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import time
from pathlib import Path

from aexec.errors import PeerLost
from aexec.parallel.layout import RankLayout

__all__ = ("NamedMeeting",)

_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid
_BACKLOG = 16  # connections that wait: room for strangers beside the one that is meant


class NamedMeeting:
    """How one rank meets the stages beside it on its machine.

    Args:
        layout: Of one executor, with more than one stage.
        rank: This rank.
        path: Of the file at which the ranks meet.
        timeout: Seconds that one rank waits for another.

    Raises:
        PeerLost: Somebody else has this rank's place there.
    """

    def __init__(self, layout: RankLayout, rank: int, *, path: str, timeout: float) -> None:
        self._rank, self._timeout = rank, timeout
        self._before, self._after = layout.neighbour(rank, -1), layout.neighbour(rank, 1)
        found = Path(path).stat()
        self._name = f"{found.st_dev:x}-{found.st_ino:x}"
        self._listener = self._bound() if self._before is not None else None

    def __repr__(self) -> str:
        return f"<NamedMeeting of rank {self._rank} at {self.address(self._rank)[1:]!r}>"

    def meet(self) -> tuple[socket.socket | None, socket.socket | None]:
        """Connections from the stage before and to the stage after; all ranks are made by now.

        Raises:
            PeerLost: One of them is not there.
        """
        to = self._connected(self._after) if self._after is not None else None
        try:
            return self._accepted(self._listener) if self._listener is not None else None, to
        except BaseException:
            if to is not None:
                to.close()
            raise

    def close(self) -> None:
        """Nobody comes any longer."""
        if self._listener is not None:
            self._listener.close()

    def address(self, rank: int) -> str:
        """Where a rank waits for the stage before it."""
        return f"\0aexec-stage-{self._name}-{rank}"

    def _bound(self) -> socket.socket:
        listener = _socket(self._timeout)
        try:
            listener.bind(self.address(self._rank))
            listener.listen(_BACKLOG)
        except OSError as error:
            listener.close()
            raise PeerLost(self._rank, self._before, "wait for the stage before", str(error)) from error
        return listener

    def _connected(self, peer: int) -> socket.socket:
        connection = _socket(self._timeout)
        try:
            connection.connect(self.address(peer))
            _check_user(connection)
        except OSError as error:
            connection.close()
            raise PeerLost(self._rank, peer, "connect to the stage after", str(error)) from error
        return connection

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
                    return connection
                connection.close()


def _socket(timeout: float) -> socket.socket:
    made = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    made.settimeout(timeout)
    return made


def _user_of(connection: socket.socket) -> int:
    """Of the process at the other end, as it was when the two met."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, user, _ = _CREDENTIALS.unpack(raw)
    return int(user)


def _check_user(connection: socket.socket) -> None:
    user = _user_of(connection)
    if user != os.getuid():
        raise PermissionError(f"a process of another user ({user}) is there instead")
