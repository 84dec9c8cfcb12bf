"""ZMQ's sockets on an event loop: no task, no thread of ours, nothing that polls.

The descriptor of a ZMQ socket is not that of its connections. It becomes readable when ZMQ's own
thread has left word of anything; asking for ``EVENTS`` takes up all that it has left. So does each
``send`` and ``recv`` on the way, which may leave something to be received and a descriptor that
stays silent about it: after either, whoever serves the socket looks once more.

Source: libzmq 4.3, ``zmq_getsockopt(3)``, ZMQ_FD and ZMQ_EVENTS.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, TypeAlias

from aexec.transport.curve.library import check_installed
from aexec.transport.curve.pieces import PIECE

if TYPE_CHECKING:
    import zmq

    RawSocket: TypeAlias = zmq.SyncSocket

__all__ = ("LINGER", "WAITING", "Room", "Served", "tune")

LINGER: Final = 0.5  # seconds in which last words may get on their way
WAITING: Final = 16  # pieces that ZMQ keeps for a peer, and again that it keeps of it
_BUFFER: Final = 1 << 20  # bytes of the kernel's, in either direction
_SLACK: Final = 64 << 10  # bytes that encryption and handshakes may add to a message


class Room:
    """A context of ZMQ's, for one listener or one dialler: closed with it, so that nothing is left.

    Its two threads are ZMQ's own: one does all input and output, one ends sockets.
    """

    def __init__(self) -> None:
        check_installed()
        import zmq

        self.context: zmq.Context[RawSocket] = zmq.Context(io_threads=1)
        self._served: list[Served] = []
        self._is_over: asyncio.Future[None] | None = None

    def __repr__(self) -> str:
        return f"<Room: {len(self._served)} sockets{', closed' if self._is_over is not None else ''}>"

    def serve(self, sock: RawSocket, look: Callable[[], bool]) -> Served:
        """Have one of its sockets served, on the running loop."""
        served = Served(sock, look, asyncio.get_running_loop())
        self._served.append(served)
        return served

    def drop(self, served: Served) -> None:
        """End one socket; what it had to send is lost."""
        if served in self._served:
            self._served.remove(served)
            served.close(0.0)

    def close(self, linger: float = LINGER) -> None:
        """End all sockets, on the loop; twice is once.

        Args:
            linger: Seconds in which what they have to send may still go.
        """
        if self._is_over is not None:
            return
        loop = asyncio.get_running_loop()
        over = self._is_over = loop.create_future()
        for served in reversed(self._served):
            served.close(linger)
        self._served.clear()

        def end() -> None:
            self.context.term()  # waits for what lingers
            with contextlib.suppress(RuntimeError):  # the loop is closed, and nobody waits any longer
                loop.call_soon_threadsafe(_set, over)

        threading.Thread(target=end, name="aexec-link-end", daemon=True).start()

    async def closed(self) -> None:
        """Wait until nothing of it is left, once it is closed: a second at most."""
        if self._is_over is not None:
            await asyncio.shield(self._is_over)


class Served:
    """A socket on a loop.

    Args:
        sock: It.
        look: Called on the loop when there may be something to do, and does a bounded part of it;
            True: there is more.
        loop: Where.
    """

    def __init__(self, sock: RawSocket, look: Callable[[], bool], loop: asyncio.AbstractEventLoop) -> None:
        import zmq

        self.sock, self._look, self._loop = sock, look, loop
        self._events, self._pollin = zmq.EVENTS, int(zmq.POLLIN)
        self._is_due = self.is_closed = False
        self._fd = int(sock.get(zmq.FD))
        loop.add_reader(self._fd, self._turn)
        self.soon()

    def soon(self) -> None:
        """Look once more, when others have had their turn."""
        if not self._is_due and not self.is_closed:
            self._is_due = True
            self._loop.call_soon(self._turn)

    def is_readable(self) -> bool:
        """Something can be received; what ZMQ has left word of is taken up by asking."""
        return bool(int(self.sock.get(self._events)) & self._pollin)

    def was_used(self) -> None:
        """Something was sent from elsewhere than ``look``: see above."""
        if not self._is_due and self.is_readable():
            self.soon()

    def close(self, linger: float) -> None:
        """End it; twice is once."""
        if not self.is_closed:
            self.is_closed = True
            self._loop.remove_reader(self._fd)
            self.sock.close(int(linger * 1e3))

    def _turn(self) -> None:
        self._is_due = False
        if not self.is_closed and self._look():
            self.soon()


def tune(sock: RawSocket, node_timeout: float, patience: float) -> None:
    """What both ends of a link have in common.

    Args:
        sock: A ROUTER or DEALER, before it is bound or connected.
        node_timeout: Seconds without a sign of life after which the peer counts as lost.
        patience: Seconds for a handshake.
    """
    import zmq

    sock.set(zmq.IPV6, 1)
    sock.set(zmq.LINGER, int(LINGER * 1e3))
    sock.set(zmq.SNDHWM, WAITING)
    sock.set(zmq.RCVHWM, WAITING)
    sock.set(zmq.SNDBUF, _BUFFER)
    sock.set(zmq.RCVBUF, _BUFFER)
    sock.set(zmq.MAXMSGSIZE, PIECE + _SLACK)
    sock.set(zmq.HANDSHAKE_IVL, int(patience * 1e3))
    sock.set(zmq.HEARTBEAT_IVL, max(int(node_timeout * 250), 1))  # asked four times within the limit,
    sock.set(zmq.HEARTBEAT_TIMEOUT, max(int(node_timeout * 650), 1))  # and silence is noticed before it is over


def _set(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
