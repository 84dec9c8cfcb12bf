"""What ZMQ tells of the connections of a socket: made, proved, refused, lost."""

from __future__ import annotations

import errno
import os
import secrets
import struct
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from aexec.transport.curve.sockets import Room, Served

if TYPE_CHECKING:
    import zmq

__all__ = ("News", "explain")

_EVENT = struct.Struct("=HI")
_AT_ONCE: Final = 64  # events in one turn of the loop


class News:
    """The monitor of one socket, read on the loop.

    Args:
        room: Where the socket is.
        sock: The socket, before it is bound or connected.
        events: Which ones are wanted.
        told: Called with each, in order, and its value: a descriptor, or the reason of a failure.
    """

    def __init__(self, room: Room, sock: zmq.SyncSocket, events: int, told: Callable[[zmq.Event, int], None]) -> None:
        import zmq

        self._kind, self._again, self._now = zmq.Event, zmq.Again, zmq.NOBLOCK
        self._room, self._told, self._watched = room, told, sock
        address = f"inproc://news-{secrets.token_hex(8)}"
        sock.monitor(address, events)
        ear = room.context.socket(zmq.PAIR)
        ear.set(zmq.RCVHWM, 0)  # ZMQ's thread would wait for us to read them
        ear.connect(address)
        self._served: Served = room.serve(ear, self.read)

    def read(self) -> bool:
        """Tell what has happened up to now; True: there is more."""
        for _ in range(_AT_ONCE):
            if self._served.is_closed:
                return False
            try:
                what, *_ = self._served.sock.recv_multipart(self._now)
            except self._again:
                return False
            number, value = _EVENT.unpack(what)
            self._told(self._kind(number), value)
        return True

    def read_all(self) -> None:
        """Tell all that has happened up to now."""
        while self.read():
            pass

    def stop(self) -> None:
        """Hear of nothing any longer; before the socket is closed."""
        if not self._served.is_closed:
            self._watched.disable_monitor()
            self._room.drop(self._served)


def explain(event: zmq.Event, value: int) -> str:
    """Why a handshake has failed, as far as ZMQ knows."""
    import zmq

    if event == zmq.Event.HANDSHAKE_FAILED_AUTH:
        return f"it was refused (status {value})"
    if event == zmq.Event.HANDSHAKE_FAILED_PROTOCOL:
        reason = _PROTOCOL.get(value)
        return reason or f"it does not speak as a node does (ZMTP error {value:#x})"
    if value in _UP_TO_THE_LIMIT:
        return "it said nothing, or too little, in time"
    return f"it broke off ({os.strerror(value)})"


# What ZMQ's thread last met, for there is no error of its own: EINTR is what a process meets that was stopped, and goes on.
_UP_TO_THE_LIMIT: Final = (0, errno.EAGAIN, errno.EINTR)
_PROTOCOL: Final = {
    0x11000001: "it has another key",  # ZMQ_PROTOCOL_ERROR_ZMTP_CRYPTOGRAPHIC
    0x11000002: "it has no key: it asks for another security mechanism",  # ..._ZMTP_MECHANISM_MISMATCH
}
