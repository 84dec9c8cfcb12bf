"""The follower's side: it asks until the leader is there, and has one line to it."""

from __future__ import annotations

import asyncio
import errno
import socket
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from aexec.errors import LeaderNotFound, LinkRefused
from aexec.transport.curve.door import address_text
from aexec.transport.curve.end import CurveEnd
from aexec.transport.curve.key import NodeKey
from aexec.transport.curve.link import NodeLink
from aexec.transport.curve.news import News, explain
from aexec.transport.curve.pieces import ANSWER
from aexec.transport.curve.sockets import LINGER, WAITING, Room, Served, tune
from aexec.transport.writer import Writer

if TYPE_CHECKING:
    import zmq

__all__ = ("dial_leader",)

_PAUSE: Final = 0.05  # seconds before it is tried again, twice as long each time
_LONGEST_PAUSE: Final = 1.0
_PATIENCE: Final = 5.0  # seconds for a handshake
_ATTEMPT: Final = 10.0  # seconds for a connection, before another one is tried
_STRIKES: Final = 3  # handshakes in a row that the other end breaks off, after which it will not have us
_AT_ONCE: Final = 32  # messages in one turn of the loop,
_BYTES_AT_ONCE: Final = 2 << 20  # and bytes
_NEVER: Final = 10**8  # milliseconds; at -1, over IPv6, ZMQ drops what came before the end of a connection
_HANG_UP_AT_ONCE: Final = struct.pack("ii", 1, 0)  # a leader that has come meanwhile is not told of a connection


async def dial_leader(
    host: str,
    port: int,
    key: NodeKey,
    hello: bytes,
    *,
    timeout: float,
    node_timeout: float = 3.0,
    told: Callable[[str], None] | None = None,
    source: str | None = None,
    writer: Writer | None = None,
    name: str = "leader",
) -> tuple[bytes, NodeLink]:
    """Get a line to the leader; tries again while nobody is there.

    Args:
        host: Name or address of the leader.
        port: Its port.
        key: The nodes' key.
        hello: What this node says of itself, once CURVE has shown that both have the key.
        timeout: Seconds for all of it.
        node_timeout: Seconds without a sign of life after which the leader is lost.
        told: Told in words what is waited for, whenever that changes.
        source: The address of this node to come from; None: the system chooses.
        writer: Encodes what is sent; None: one of the line's own.
        name: Of the leader, for people.

    Returns:
        What the leader answers, and the line, which is not open yet. A leader that refuses says
        so in its answer, and hangs up.

    Raises:
        LeaderNotFound: It did not answer in time; says what came of trying.
        LinkRefused: It has another key, or does not allow this node's address.
        MissingExtra: pyzmq is not installed.
    """
    where = address_text(host, port)
    room = Room()
    dialling = _Dialling(room, where, key, hello, node_timeout, told or _say_nothing)
    try:
        async with asyncio.timeout(timeout):
            answer, end = await dialling.until_answered(host, port, source)
    except TimeoutError:
        room.close(0.0)
        raise LeaderNotFound(where, timeout, dialling.why) from None
    except BaseException:
        room.close(0.0)
        raise
    end.address = where
    return answer, NodeLink(end, writer or Writer(), name, room.closed)


class _NotThisTime(Exception):
    """This connection came to nothing.

    Attributes:
        was_absent: Nobody was there.
        is_final: It is of no use to try again.
    """

    def __init__(self, why: str, *, was_absent: bool = False, is_final: bool = False) -> None:
        super().__init__(why)
        self.was_absent, self.is_final = was_absent, is_final


@dataclass(slots=True)
class _Place:
    """Where one attempt goes."""

    family: int
    address: Any
    source: str | None

    @property
    def text(self) -> str:
        """As ZMQ wants it."""
        there = address_text(self.address[0], self.address[1])
        if self.source is None:
            return there
        return f"{address_text(self.source, 0)};{there.removeprefix('tcp://')}"


class _Dialling:
    """Tries until it works.

    Attributes:
        why: It has not, so far.
    """

    def __init__(
        self, room: Room, where: str, key: NodeKey, hello: bytes, node_timeout: float, told: Callable[[str], None]
    ) -> None:
        self._room, self._where, self._key, self._hello = room, where, key, hello
        self._node_timeout, self._tell = node_timeout, told
        self.why = "no answer: there is a firewall in between, or no such machine"
        self._told = ""

    async def until_answered(self, host: str, port: int, source: str | None) -> tuple[bytes, CurveEnd]:
        """Try, and try again."""
        pause, strikes = _PAUSE, 0
        while True:
            try:
                place = await _resolve(host, port, source)
                return await self._once(place)
            except _NotThisTime as failure:
                strikes = 0 if failure.was_absent else strikes + 1
                if failure.is_final or strikes >= _STRIKES:
                    raise LinkRefused(self._where, str(failure)) from None
                self._because(str(failure))
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)

    async def _once(self, place: _Place) -> tuple[bytes, CurveEnd]:
        attempt = _Attempt(self._room, place, self._key, self._hello, self._node_timeout, self._reached)
        try:
            return await attempt.answer
        except _NotThisTime as failure:
            attempt.drop()
            if failure.was_absent:
                raise _NotThisTime(await _why_absent(place) or str(failure), was_absent=True) from None
            raise
        except BaseException:
            attempt.drop()
            raise

    def _reached(self, how_far: str) -> None:
        self.why = how_far

    def _because(self, why: str) -> None:
        self.why = why
        if why != self._told:
            self._told = why
            self._tell(why)


class _Attempt:
    """One connection.

    Attributes:
        answer: What the leader says to our hello, and the end of the line.
    """

    def __init__(
        self,
        room: Room,
        place: _Place,
        key: NodeKey,
        hello: bytes,
        node_timeout: float,
        got_to: Callable[[str], None],
    ) -> None:
        import zmq

        self._again, self._zmq_error, self._now, self._event = zmq.Again, zmq.ZMQError, zmq.NOBLOCK, zmq.Event
        self._sndmore, self._rcvmore = zmq.SNDMORE, zmq.RCVMORE
        self._room, self._node_timeout, self._got_to = room, node_timeout, got_to
        loop = asyncio.get_running_loop()
        self.answer: asyncio.Future[tuple[bytes, CurveEnd]] = loop.create_future()
        self._end: CurveEnd | None = None
        self._why = ""
        self._reached = 0.0  # loop time at which somebody accepted the connection
        dealer = room.context.socket(zmq.DEALER)
        tune(dealer, node_timeout, _PATIENCE)
        dealer.set(zmq.RECONNECT_IVL, _NEVER)  # a line that is lost stays lost
        public, secret = key.curve_keys("follower")
        dealer.set(zmq.CURVE_SERVERKEY, key.curve_keys("leader")[0])
        dealer.set(zmq.CURVE_PUBLICKEY, public)
        dealer.set(zmq.CURVE_SECRETKEY, secret)
        self._news = News(room, dealer, int(zmq.EVENT_ALL), self._told)
        self._served: Served = room.serve(dealer, self._look)
        self._limit = loop.call_later(_ATTEMPT, self._too_late)
        dealer.connect(place.text)
        dealer.send(hello, self._now)

    def drop(self) -> None:
        """It came to nothing."""
        self._limit.cancel()
        self._news.stop()
        self._room.drop(self._served)

    # What comes.

    def _look(self) -> bool:
        self._receive(_AT_ONCE, _BYTES_AT_ONCE)
        if self._served.is_closed:
            return False
        there_is_more = self._served.is_readable()
        if self._end is not None and self._end.is_blocked:  # last: see CurveListener
            self._end.has_room()
        return there_is_more

    def _receive(self, most: int, most_bytes: int) -> None:
        while most and most_bytes > 0 and not self._served.is_closed:
            try:
                message = self._served.sock.recv(self._now, copy=False)
            except self._again:
                return
            most -= 1
            most_bytes -= len(message)
            is_urgent = False
            while self._served.sock.get(self._rcvmore):  # what is urgent has an empty part behind it
                self._served.sock.recv(self._now)
                is_urgent = True
            piece = message.buffer
            if self._end is None:
                self._answered(bytes(piece))
            elif len(piece):
                self._end.arrived(piece, is_urgent=is_urgent)
            else:
                self._end.lost("it hung up")

    def _answered(self, answer: bytes) -> None:
        self._limit.cancel()
        if not answer:
            self._failed(_NotThisTime("the leader asked for another connection", was_absent=True))
        elif not self.answer.done():
            self._end = CurveEnd(self._post, self._let_go, "")
            self.answer.set_result((answer.removeprefix(ANSWER), self._end))

    # What goes.

    def _post(self, piece: bytes | memoryview, is_urgent: bool) -> bool:  # noqa: FBT001
        if self._served.is_closed:
            raise BrokenPipeError(errno.EPIPE, "the line is closed")
        try:
            self._served.sock.send(piece, self._now | self._sndmore if is_urgent else self._now)
            if is_urgent:
                self._served.sock.send(b"", self._now)
        except self._again:
            return False
        except self._zmq_error as error:
            raise BrokenPipeError(errno.EPIPE, str(error)) from None
        if is_urgent:  # what it passes may wait on, and has to be told of room again
            self._served.soon()
        else:
            self._served.was_used()
        return True

    def _let_go(self, end: CurveEnd) -> None:
        self._news.read_all()
        self._news.stop()
        self._room.close(LINGER if end.error is None else 0.0)

    # What becomes of the connection.

    def _told(self, event: zmq.Event, value: int) -> None:
        kinds = self._event
        if event == kinds.CONNECTED:
            self._reached = asyncio.get_running_loop().time()
            self._got_to("somebody accepts connections there, and has not answered as a leader does")
        elif event == kinds.HANDSHAKE_SUCCEEDED:
            self._limit.cancel()
            self._got_to("the leader knows this node's key, and has not answered its hello yet")
        elif event in (kinds.HANDSHAKE_FAILED_AUTH, kinds.HANDSHAKE_FAILED_PROTOCOL):
            self._why = self._why or explain(event, value)
            if event == kinds.HANDSHAKE_FAILED_AUTH:
                self._failed(_NotThisTime(_NOT_ALLOWED, is_final=True))
        elif event in (kinds.CLOSED, kinds.CLOSE_FAILED, kinds.DISCONNECTED):
            self._disconnected()

    def _disconnected(self) -> None:
        if self._end is not None:
            self._receive(2 * WAITING, 1 << 40)  # what it said before it went
            self._end.lost(
                f"its connection was closed, or it gave no sign of life for {self._node_timeout:g} s (node_timeout)"
            )
        elif not self._reached:
            self._failed(_NotThisTime("it was not there a moment ago", was_absent=True))
        elif asyncio.get_running_loop().time() - self._reached > _PATIENCE / 2:
            self._failed(_NotThisTime("somebody accepts connections there, and says nothing", was_absent=True))
        else:
            self._failed(_NotThisTime(self._why or _OTHER_KEY))

    def _too_late(self) -> None:
        self._failed(_NotThisTime("no answer", was_absent=True))

    def _failed(self, failure: _NotThisTime) -> None:
        if not self.answer.done():
            self.answer.set_exception(failure)


_OTHER_KEY: Final = (
    "it broke off the handshake: it has another key than this node (compare the key files), or it is no leader of aexec"
)
_NOT_ALLOWED: Final = "it has the same key, and the address of this node is not on its allow-list (node_allow)"


async def _resolve(host: str, port: int, source: str | None) -> _Place:
    loop = asyncio.get_running_loop()
    try:
        (family, *_, address), *_ = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise _NotThisTime(f"its name cannot be resolved ({error.strerror or error})", was_absent=True) from None
    return _Place(family, address, source)


async def _why_absent(place: _Place) -> str:
    """ZMQ does not say why it could not connect, so it is tried once without it; empty: it is there."""
    loop = asyncio.get_running_loop()
    with socket.socket(place.family, socket.SOCK_STREAM) as sock:
        sock.setblocking(False)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _HANG_UP_AT_ONCE)
        try:
            if place.source is not None:
                sock.bind((place.source, 0))
            async with asyncio.timeout(1.0):
                await loop.sock_connect(sock, place.address)
        except ConnectionRefusedError:
            return "nobody listens there: the leader is not up yet, has another port, or does not share this network"
        except TimeoutError:
            return "no answer: there is a firewall in between, or no such machine"
        except OSError as error:
            return f"there is no way there ({error.strerror or error})"
    return ""


def _say_nothing(_: str) -> None:
    """Nobody wants to know."""
