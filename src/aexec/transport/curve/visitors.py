"""Who stands at a listener's door: connections that ZMQ has accepted, until they are somebody's."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable
from typing import TYPE_CHECKING, Generic, TypeVar

from aexec.observe import get_logger
from aexec.transport.curve.news import explain

if TYPE_CHECKING:
    import zmq

__all__ = ("Visitors",)

P = TypeVar("P")


class _Visitor(Generic[P]):
    """A connection."""

    __slots__ = ("peer", "who")

    def __init__(self, who: str) -> None:
        self.who = who
        self.peer: P | None = None


class Visitors(Generic[P]):
    """Keeps book of connections by their descriptors, which is how ZMQ tells of them.

    Args:
        port: Where they come to.
        crowd_changed: Told how many have proved nothing yet, whenever that changes.

    Attributes:
        at_the_door: How many these are.
        turned_away: Those that were never anybody's, so far.
    """

    def __init__(self, port: int, crowd_changed: Callable[[int], None]) -> None:
        self.port = port
        self.at_the_door = self.turned_away = 0
        self._crowd_changed = crowd_changed
        self._visitors: dict[int, _Visitor[P]] = {}
        self._why = ""  # the last one was turned away

    def __repr__(self) -> str:
        return f"<Visitors: {self.at_the_door} at the door, {self.turned_away} turned away>"

    @staticmethod
    def events() -> int:
        """What has to be told here; failures to accept are left out, for ZMQ tries again without a pause."""
        from zmq import Event

        return int(
            Event.ACCEPTED
            | Event.DISCONNECTED
            | Event.HANDSHAKE_FAILED_NO_DETAIL
            | Event.HANDSHAKE_FAILED_PROTOCOL
            | Event.HANDSHAKE_FAILED_AUTH
        )

    def told(self, event: zmq.Event, value: int) -> P | None:
        """Something has happened; whose connection has ended, if it was somebody's."""
        from zmq import Event

        if event == Event.ACCEPTED:
            self._visitors[value] = _Visitor(_who(value, self.port))
            self._at_the_door(+1)
        elif event == Event.DISCONNECTED:
            return self._ended(value)
        elif not self._why:
            self._why = explain(event, value)
        return None

    def denied(self, address: str, why: str) -> None:
        """One that has the leader's key is not let in."""
        _ = address
        self._why = why

    def claim(self, fd: int, peer: P) -> P | None:
        """A connection is somebody's; who has it: another one, if it was his already, or nobody, if it has ended."""
        visitor = self._visitors.get(fd)
        if visitor is None:
            return None
        if visitor.peer is None:
            visitor.peer = peer
            self._at_the_door(-1)
        return visitor.peer

    def _ended(self, fd: int) -> P | None:
        visitor = self._visitors.pop(fd, None)
        why, self._why = self._why or "it does not speak as a node does", ""
        if visitor is None or visitor.peer is not None:
            return None if visitor is None else visitor.peer
        self._at_the_door(-1)
        self.turned_away += 1
        if self.turned_away == 1:
            get_logger("aexec.transport").warning(
                "a connection that is none of the nodes' was turned away; more of them are only counted",
                who=visitor.who,
                why=why,
            )
        return None

    def _at_the_door(self, change: int) -> None:
        self.at_the_door += change
        self._crowd_changed(self.at_the_door)


def _who(fd: int, our_port: int) -> str:
    """Where a connection of ZMQ's comes from; it may have ended by now, and its descriptor may be something else's."""
    with contextlib.suppress(OSError):
        copy = os.dup(fd)
        try:
            with socket.socket(fileno=copy) as sock:
                copy = -1
                if sock.getsockname()[1] == our_port:
                    host, port = sock.getpeername()[:2]
                    return f"{host} port {port}"
        finally:
            if copy >= 0:  # it is no socket any longer
                os.close(copy)
    return "one that has gone again"
