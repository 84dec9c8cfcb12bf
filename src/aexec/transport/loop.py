"""The end of a channel that lives on an event loop (asyncio or uvloop)."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple

from aexec.errors import ChannelClosed, ChannelFull
from aexec.observe import get_logger
from aexec.transport.codec import Encoded, encode
from aexec.transport.frames import Frame, Kind, join
from aexec.transport.hot import HotWindow
from aexec.transport.inbox import Inbox
from aexec.transport.lines import link_of
from aexec.transport.links import OWN, Link, Parts
from aexec.transport.outbox import Outbox
from aexec.transport.statistics import ChannelStatistics
from aexec.transport.writer import Placed, Writer

__all__ = ("LoopChannel",)

QUEUE = 4096  # frames


class _Waiting(NamedTuple):
    """A frame that could not be sent yet."""

    parts: Parts
    fds: tuple[int, ...]
    copied: Future[None] | None
    num_bytes: int


class LoopChannel:
    """One end of a channel, served by the loop's ``add_reader``: no task and no thread of its own.

    Args:
        end: One end of ``seqpacket_pair()``, ``stream_pair()`` or ``memory_pair()``, or another
            ``Link``; the channel owns it.
        writer: This process's writer.
        on_frame: Called on the loop with each frame, in order.
        on_gone: Called on the loop once when the peer is gone or sent garbage, after the
            last frame; not after a ``close()`` of this end.
        name: For people, as in ``rank 0 work``.
        queue: Frames that may wait for a peer that does not read. All of them together may have
            as many bytes as a message of the writer's.
        hot: Polls for answers that are about to come; channels of one loop may share it.
    """

    copies_off_loop = True

    def __init__(
        self,
        end: socket.socket | Link,
        writer: Writer,
        on_frame: Callable[[Frame], None],
        on_gone: Callable[[ChannelClosed], None],
        *,
        name: str = "channel",
        queue: int = QUEUE,
        hot: HotWindow | None = None,
    ) -> None:
        self.name = name
        self._link: Link = link_of(end)
        self.shares_memory = self._link.shares_memory
        self._writer, self._on_frame, self._on_gone, self._hot = writer, on_frame, on_gone, hot
        self._inbox = Inbox(name, writer, self, self._released)
        self._mappings = self._inbox.mappings
        self._outbox = Outbox(writer, self._mappings)
        self._bound = queue
        self._queue: deque[_Waiting] = deque()
        self._queued_bytes = 0
        self._held = b""  # a frame that was sent, and may have the next one behind it
        self._blocked = self._receiving = self._returning = False
        self._closed: ChannelClosed | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._flushed: asyncio.Event | None = None

    def __repr__(self) -> str:
        state = "open" if self._closed is None else self._closed.reason
        return f"<LoopChannel {self.name}: {state}, {self.num_queued}/{self._bound} queued>"

    @property
    def is_open(self) -> bool:
        """True until either end has closed it."""
        return self._closed is None

    @property
    def num_queued(self) -> int:
        """Frames that wait for the peer to read, or for a copy."""
        return len(self._queue) + self._blocked

    def statistics(self) -> ChannelStatistics:
        """What went through it."""
        mappings = self._inbox.mappings
        return ChannelStatistics(
            self._outbox.sent, self._inbox.received, self.num_queued, mappings.num_leases, mappings.num_bytes
        )

    def open(self) -> None:
        """Begin to receive, on the running loop."""
        self._loop = asyncio.get_running_loop()
        self._link.watch(self._loop, self._readable)

    def send(self, kind: Kind, call: int, value: Any = None, fds: Sequence[int] = ()) -> None:
        """Send a frame; never blocks. ``fds`` stay the caller's, and may be closed on return.

        Arrays of more than 4 MB are copied on a thread: they have to stay as they are until
        there was an answer, or until the channel is ``flushed()``.

        Raises:
            ChannelClosed: Nothing can be sent any longer.
            ChannelFull: Too many frames wait for the peer.
            MessageNotPortable: The value cannot travel; the channel lives on.
            ArenaFull: The value does not fit into shared memory; the channel lives on.
        """
        self.send_encoded(kind, call, encode(value), fds)

    def send_encoded(self, kind: Kind, call: int, encoded: Encoded, fds: Sequence[int] = ()) -> None:
        """Send what ``Writer.encode`` gave; see :meth:`send`."""
        if self._closed is not None:
            raise self._again()
        if encoded.num_bytes:
            self._writer.send_encoded((self,), kind, call, encoded, fds)
        else:
            self.check_room()
            self.post(kind, call, encoded, None, fds)

    def check_room(self) -> None:
        """Raise ``ChannelFull`` if another frame may not wait."""
        if len(self._queue) >= self._bound or self._queued_bytes >= self._writer.arena.limit:
            raise ChannelFull(self.name, len(self._queue), self._queued_bytes)

    @property
    def is_free(self) -> bool:
        """Open, and a frame would be with the kernel at once; nothing has to go along with it."""
        return self._closed is None and not self._queue and not self._blocked and not self._mappings.released

    def put(self, kind: Kind, frame: bytes) -> None:
        """Send a whole frame, while the channel is free."""
        self._outbox.sent += 1
        if self._held:
            frame, self._held = join(self._held, frame), b""
        try:
            taken = self._link.send((frame,), ())
        except OSError as error:
            self._not_sent(error)
            return
        if not taken:
            self._hold()
        if self._hot is not None and kind is MESSAGE:
            self._hot.asked()

    def hold(self, frame: bytes) -> None:
        """Send a whole frame, while the channel is free, together with the next one.

        Whoever calls this sees to it that :meth:`let_go` is called before long.
        """
        if self._held:
            self.let_go()
        self._outbox.sent += 1
        self._held = frame

    @property
    def is_holding(self) -> bool:
        """What was last held has not gone yet."""
        return bool(self._held)

    def drop_held(self) -> None:
        """Something else is sent in its place."""
        self._held = b""
        self._outbox.sent -= 1

    def let_go(self) -> None:
        """Send what is held, if it has not gone along with another frame."""
        if self._held:
            held, self._held = self._held, b""
            self._put((held,), ())

    def post(self, kind: Kind, call: int, encoded: Encoded, placed: Placed | None, fds: Sequence[int] = ()) -> None:
        """Send a frame whose bulk is in its place, or comes there; see ``Writer.send``."""
        if placed is not None:
            for segment in self._outbox.segments():
                self._put(segment.parts, () if segment.fd is None else (segment.fd,))
                if segment.fd is not None:
                    os.close(segment.fd)
        self._put(self._outbox.frame(kind, call, encoded, placed), fds, placed.copied if placed else None)
        if self._hot is not None and kind is MESSAGE:
            self._hot.asked()

    async def flushed(self, timeout: float) -> None:
        """Wait until all that was sent is with the kernel.

        Raises:
            TimeoutError: It was not, within ``timeout`` seconds.
            ChannelClosed: The channel is closed.
        """
        self.let_go()
        async with asyncio.timeout(timeout):
            while self.num_queued and self._closed is None:
                self._flushed = self._flushed or asyncio.Event()
                await self._flushed.wait()
        if self._closed is not None:
            raise self._again()

    def close(self) -> None:
        """Say goodbye and close; what waits to be sent is dropped. Twice is once."""
        if self._closed is None:
            if not self.num_queued and self._loop is not None:
                self._put(self._outbox.frame(Kind.GOODBYE, 0, encode(None), None), ())
            self._end(ChannelClosed(self.name, "this end closed it", orderly=True))

    def _again(self) -> ChannelClosed:
        """The reason, as an error of its own for each who asks."""
        assert self._closed is not None
        return ChannelClosed(self._closed.channel, self._closed.reason, self._closed.orderly)

    def _end(self, error: ChannelClosed) -> None:
        self._closed = error
        self._held = b""
        self._link.close(self._loop)
        for waiting in self._queue:
            _close_all(waiting.fds)
        self._queue.clear()
        self._queued_bytes = 0
        self._blocked = False
        self._inbox.mappings.clear()
        self._writer.forget(self)
        self._all_flushed()

    def _all_flushed(self) -> None:
        if self._flushed is not None:
            self._flushed.set()
            self._flushed = None

    # Sending.

    def _put(self, parts: Parts, fds: Sequence[int], copied: Future[None] | None = None) -> None:
        if self._held:
            self.let_go()
        if copied is not None and not copied.done():
            copied.add_done_callback(self._copied)
        elif not self._queue and not self._blocked:
            self._send(parts, fds)
            return
        size = sum(map(len, parts))
        if len(parts) > 1 and size <= OWN:  # arrays of whoever sends, and he may change them from now on
            parts = (b"".join(parts),)
        self._queued_bytes += size
        self._queue.append(_Waiting(parts, tuple(os.dup(fd) for fd in fds), copied, size))

    def _send(self, parts: Parts, fds: Sequence[int]) -> None:
        try:
            taken = self._link.send(parts, fds)
        except OSError as error:
            self._not_sent(error)
            return
        if not taken:
            self._hold()

    def _hold(self) -> None:
        """Send no more until there is room."""
        self._blocked = True
        assert self._loop is not None, "a channel is opened before it is used"
        self._link.watch_writable(self._loop, self._writable)

    def _not_sent(self, error: OSError) -> None:
        """If the peer is gone, whoever receives learns of it, after its last frame; else a frame is lost: the end."""
        if error.errno not in _PEER_GONE and self._loop is not None:
            self._loop.call_soon(self._break, f"a frame could not be sent ({error.strerror or error})")

    def _break(self, reason: str) -> None:
        if self._closed is None:
            self._end(ChannelClosed(self.name, reason))
            self._on_gone(self._again())

    def _writable(self) -> None:
        assert self._loop is not None
        try:
            if not self._link.flush():
                return
        except OSError as error:
            self._not_sent(error)
        self._blocked = False
        self._link.watch_writable(self._loop, None)
        self._pump()

    def _pump(self) -> None:
        """Send what waits, up to a frame that has to wait on."""
        while self._queue and not self._blocked:
            waiting = self._queue[0]
            if waiting.copied is not None and not waiting.copied.done():
                return
            self._queue.popleft()
            self._queued_bytes -= waiting.num_bytes
            self._send(waiting.parts, waiting.fds)
            _close_all(waiting.fds)
        if not self.num_queued:
            self._all_flushed()

    def _copied(self, _: Future[None]) -> None:
        """On the thread that copies: go on sending."""
        with contextlib.suppress(RuntimeError):  # the loop is closed, and the channel with it
            if self._loop is not None:
                self._loop.call_soon_threadsafe(self._pump)

    # Receiving.

    def _readable(self) -> None:
        """Receive one datagram: if there are more the loop says so again, and others had their turn."""
        self._receiving = True
        inbox = self._inbox
        try:
            while True:
                frame = inbox.take(self._link)
                if frame is not None:
                    if self._hot is not None and (frame.kind is REPLY or frame.kind is FAILURE):
                        self._hot.answered()
                    try:
                        self._on_frame(frame)
                    except Exception as fault:  # noqa: BLE001 - see there
                        self._failed_on(frame, fault)
                del frame  # before what it held is looked for
                if inbox.rest is None or self._closed is not None:
                    break
        except ChannelClosed as error:
            self._end(error)
            self._on_gone(error)
            return
        finally:
            self._receiving = False
        if self._mappings.released and self._closed is None:
            self._give_back()

    def _failed_on(self, frame: Frame, fault: Exception) -> None:
        """Whoever waits for what it brought must not wait for ever."""
        get_logger().exception("a frame could not be dealt with", channel=self.name, frame=frame.kind.name)
        self._end(ChannelClosed(self.name, f"this end failed on a frame: {fault!r}"))
        self._on_gone(self._again())

    def _released(self) -> None:
        """On any thread, whenever the last view of something received has gone: say so, soon."""
        if self._receiving or self._returning or self._loop is None:
            return
        self._returning = True
        with contextlib.suppress(RuntimeError):  # the loop is closed, and the channel with it
            self._loop.call_soon_threadsafe(self._give_back)

    def _give_back(self) -> None:
        self._returning = False
        while self._inbox.mappings.released and self._closed is None:
            self._put(self._outbox.release_frame(), ())


MESSAGE, REPLY, FAILURE = Kind.MESSAGE, Kind.REPLY, Kind.FAILURE  # looked up once, and never hashed
_PEER_GONE = frozenset((errno.EPIPE, errno.ECONNRESET, errno.ENOTCONN, errno.ESHUTDOWN))


def _close_all(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)
