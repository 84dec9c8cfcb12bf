"""The leader's side: one port, and a line to each follower that has proved that it is one."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from aexec.observe import get_logger
from aexec.transport.curve.door import Door, address_text
from aexec.transport.curve.end import CurveEnd
from aexec.transport.curve.gate import DOMAIN, Gate, networks_of
from aexec.transport.curve.key import NodeKey
from aexec.transport.curve.link import NodeLink
from aexec.transport.curve.news import News
from aexec.transport.curve.pieces import ANSWER, HANG_UP
from aexec.transport.curve.sockets import LINGER, WAITING, Room, Served, tune
from aexec.transport.curve.visitors import Visitors
from aexec.transport.writer import Writer

if TYPE_CHECKING:
    import zmq

__all__ = ("CurveListener", "ListenerStatistics", "lost_text")

PATIENCE: Final = 5.0  # seconds in which a connection has to prove itself
MOST_AT_THE_DOOR: Final = 64  # connections that have proved nothing, before no more are let in
_AT_ONCE: Final = 32  # messages in one turn of the loop,
_BYTES_AT_ONCE: Final = 2 << 20  # and bytes
_ALL: Final = 1 << 40
_RETRY: Final = 0.02  # seconds, while several peers do not take what is sent

OnHello = Callable[[str, bytes], tuple[bool, bytes]]
OnLink = Callable[[NodeLink, bytes], None]


@dataclass(frozen=True, slots=True)
class ListenerStatistics:
    """What has happened at a listener.

    Attributes:
        links: Lines that there are.
        accepted: Nodes whose hello was accepted, so far.
        refused: Nodes that have the key, and whose hello was not accepted.
        at_the_door: Connections that have proved nothing yet.
        turned_away: Connections that never did.
    """

    links: int
    accepted: int
    refused: int
    at_the_door: int
    turned_away: int


@dataclass(slots=True, eq=False)
class _Peer:
    """A follower that has said hello.

    Attributes:
        routing: How ZMQ names its connection.
        end: Of its line; None: it was refused, or its line is closed.
        link: Its line.
        is_leaving: It has yet to be told that its line is closed.
    """

    routing: bytes
    end: CurveEnd | None = None
    link: NodeLink | None = None
    is_leaving: bool = False


class CurveListener:
    """Listens on one address for followers.

    Args:
        host: An address of this node, on which nothing else is listened to.
        port: The port; 0: one that the kernel chooses, see ``address``.
        key: The nodes' key.
        on_hello: Asked with a follower's address and hello; whether it is accepted, and what it is
            answered. It has the key by then, and what it says is of no other use yet.
        on_link: Given the line of one that was accepted, and its hello; on the loop.
        allow: Addresses and networks that followers may have; empty: any.
        node_timeout: Seconds without a sign of life after which a follower is lost.
        writer: Encodes what is sent; None: one of the listener's own.
        patience: Seconds in which a connection has to prove itself.
        silent: Seconds for which the kernel keeps a connection that says nothing; None: an hour.

    Raises:
        ValueError: ``host`` or ``allow`` is not what it should be.
        MissingExtra: pyzmq is not installed; from :meth:`open`.
    """

    def __init__(
        self,
        host: str,
        port: int,
        key: NodeKey,
        on_hello: OnHello,
        on_link: OnLink,
        *,
        allow: Sequence[str] = (),
        node_timeout: float = 3.0,
        writer: Writer | None = None,
        patience: float = PATIENCE,
        silent: int | None = None,
    ) -> None:
        self.address = (host, port)
        self._key, self._on_hello, self._on_link = key, on_hello, on_link
        self._networks = networks_of(allow)
        self._node_timeout, self._patience, self._silent = node_timeout, patience, silent
        self._own_writer = Writer() if writer is None else None
        self._writer = writer or self._own_writer or Writer()
        self._peers: dict[bytes, _Peer] = {}
        self._blocked: set[bytes] = set()  # peers for which there was no room
        self._retry: asyncio.TimerHandle | None = None
        self._visitors: Visitors[_Peer] = Visitors(port, self._crowd_changed)
        self._accepted = self._refused = 0
        self._door: Door | None = None
        self._room: Room | None = None
        self._router: Served
        self._news: News

    def __repr__(self) -> str:
        facts = self.statistics()
        state = "open" if self._door is not None else "not open"
        return f"<CurveListener at {address_text(*self.address)}: {state}, {facts}>"

    def statistics(self) -> ListenerStatistics:
        """What has happened so far."""
        links = sum(peer.end is not None for peer in self._peers.values())
        visitors = self._visitors
        return ListenerStatistics(links, self._accepted, self._refused, visitors.at_the_door, visitors.turned_away)

    def open(self) -> None:
        """Begin to listen, on the running loop.

        Raises:
            OSError: The address is none of this node's, or the port is taken.
            MissingExtra: pyzmq is not installed.
        """
        room = Room()
        try:
            door = self._door = (
                Door(*self.address) if self._silent is None else Door(*self.address, silent=self._silent)
            )
            self.address = door.address
            self._visitors.port = door.address[1]
            self._room = room
            self._listen(room, door)
        except BaseException:
            room.close(0.0)
            raise

    def _listen(self, room: Room, door: Door) -> None:
        import zmq

        self._again, self._zmq_error, self._rcvmore = zmq.Again, zmq.ZMQError, zmq.RCVMORE
        self._now, self._more = zmq.NOBLOCK, zmq.NOBLOCK | zmq.SNDMORE
        followers, _ = self._key.curve_keys("follower")
        public, secret = self._key.curve_keys("leader")
        self._gate = Gate(room, followers, self._networks, self._visitors.denied)
        router = room.context.socket(zmq.ROUTER)
        tune(router, self._node_timeout, self._patience)
        router.set(zmq.ROUTER_MANDATORY, 1)
        router.set(zmq.CURVE_SERVER, 1)
        router.set(zmq.CURVE_PUBLICKEY, public)
        router.set(zmq.CURVE_SECRETKEY, secret)
        router.set(zmq.ZAP_DOMAIN, DOMAIN)
        self._news = News(room, router, self._visitors.events(), self._told)
        self._router = room.serve(router, self._look)
        router.set(zmq.USE_FD, door.hand_out())
        router.bind(address_text(*self.address))

    def close(self, linger: float = LINGER) -> None:
        """Listen no longer, and end all lines with a goodbye; twice is once."""
        if self._room is None or self._door is None:
            return
        for peer in list(self._peers.values()):
            if peer.link is not None:
                peer.link.close()
        if self._retry is not None:
            self._retry.cancel()
        self._news.stop()
        self._room.close(linger)
        self._door.close()
        self._door = None
        if self._own_writer is not None:
            self._own_writer.close()

    async def aclose(self) -> None:
        """Close, and wait until nothing is left: a second or two at most."""
        self.close()
        if self._room is not None:
            await self._room.closed()

    # What comes.

    def _look(self) -> bool:
        self._receive(_AT_ONCE, _BYTES_AT_ONCE)
        if self._router.is_closed:
            return False
        there_is_more = self._router.is_readable()
        for routing in list(self._blocked):  # last: what frees one of them must not be taken up after it was tried
            peer = self._peers.get(routing)
            if peer is None:
                self._blocked.discard(routing)
            elif peer.is_leaving:
                self._hang_up(peer)
            elif peer.end is not None:
                end = peer.end
                end.has_room()
                if not end.is_blocked:
                    self._blocked.discard(routing)
        if len(self._blocked) > 1 and self._retry is None:  # ... but by the one after it, it may have been
            self._retry = asyncio.get_running_loop().call_later(_RETRY, self._try_again)
        return there_is_more

    def _try_again(self) -> None:
        self._retry = None
        self._router.soon()

    def _receive(self, most: int, most_bytes: int) -> None:
        sock = self._router.sock
        while most and most_bytes > 0 and not self._router.is_closed:
            try:
                routing = sock.recv(self._now)
            except self._again:
                return
            message = sock.recv(self._now, copy=False)
            most -= 1
            most_bytes -= len(message)
            is_urgent = False
            while sock.get(self._rcvmore):  # a piece is one part, what is urgent has an empty one behind it
                sock.recv(self._now)
                is_urgent = True
            peer = self._peers.get(routing)
            if peer is None:
                self._hello(routing, message)
            elif peer.end is not None:
                piece = message.buffer
                if len(piece):
                    peer.end.arrived(piece, is_urgent=is_urgent)
                else:
                    peer.end.lost("it hung up")

    def _hello(self, routing: bytes, message: zmq.Frame) -> None:
        self._news.read_all()  # what was before
        peer, address = _Peer(routing), str(message.get("Peer-Address"))
        fd = int(message.get("__fd"))
        before = self._visitors.claim(fd, peer)
        if before is peer:
            self._peers[routing] = peer
            self._welcome(peer, address, message.bytes)
        elif before is not None:  # two of them had the same descriptor, and only one is there
            get_logger("aexec.transport").info("a node has to say hello again", address=address)
            for each in (before, peer):
                self._post(each.routing, HANG_UP)
            if before.end is not None:
                before.end.lost("another connection took its place before it was heard")

    def _welcome(self, peer: _Peer, address: str, hello: bytes) -> None:
        try:
            is_accepted, answer = self._on_hello(address, hello)
        except Exception:  # noqa: BLE001 - the node is refused, and the listener lives on
            get_logger("aexec.transport").exception("a hello could not be answered", address=address)
            is_accepted, answer = False, b""
        self._post(peer.routing, ANSWER + answer)
        if not is_accepted:
            self._refused += 1
            peer.is_leaving = True
            self._hang_up(peer)
            return
        self._accepted += 1
        end = peer.end = CurveEnd(functools.partial(self._post, peer.routing), self._let_go, address)
        peer.link = NodeLink(end, self._writer, f"node at {address}", _nothing)
        self._on_link(peer.link, hello)

    # What goes.

    def _post(self, routing: bytes, piece: bytes | memoryview, is_urgent: bool = False) -> bool:  # noqa: FBT001, FBT002
        router = self._router
        if router.is_closed:
            raise BrokenPipeError(errno.EPIPE, "the listener is closed")
        try:
            router.sock.send(routing, self._more)
            router.sock.send(piece, self._more if is_urgent else self._now)
            if is_urgent:
                router.sock.send(b"", self._now)
        except self._again:
            self._blocked.add(routing)
            return False
        except self._zmq_error as error:
            self._blocked.discard(routing)
            raise BrokenPipeError(errno.EPIPE, str(error)) from None
        if not is_urgent:  # what it passes may wait on
            self._blocked.discard(routing)
        if self._blocked:
            router.soon()
        else:
            router.was_used()
        return True

    def _let_go(self, end: CurveEnd) -> None:
        for peer in self._peers.values():
            if peer.end is end:
                peer.end = peer.link = None
                peer.is_leaving = True
                self._hang_up(peer)

    def _hang_up(self, peer: _Peer) -> None:
        """Have the other end close the connection, which ZMQ does not do from here."""
        with contextlib.suppress(BrokenPipeError):
            if not self._post(peer.routing, HANG_UP):
                return
        peer.is_leaving = False

    # What becomes of connections.

    def _told(self, event: zmq.Event, value: int) -> None:
        peer = self._visitors.told(event, value)
        if peer is not None:
            self._receive(len(self._peers) * 2 * WAITING, _ALL)  # what it said before it went
            self._router.soon()
            self._peers.pop(peer.routing, None)
            if peer.end is not None:
                peer.end.lost(lost_text(self._node_timeout))

    def _crowd_changed(self, at_the_door: int) -> None:
        if self._door is not None:
            if at_the_door >= MOST_AT_THE_DOOR:
                self._door.shut()
            elif at_the_door <= MOST_AT_THE_DOOR // 2:
                self._door.open()


def lost_text(node_timeout: float) -> str:
    """What is known of a connection that has ended."""
    return f"its connection was closed, or it gave no sign of life for {node_timeout:g} s (node_timeout)"


async def _nothing() -> None:
    """A line of a listener is gone when the listener is."""
