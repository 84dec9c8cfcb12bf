"""The end of a channel for a thread that has nothing else to wait for, as a worker's main thread."""

from __future__ import annotations

import contextlib
import math
import os
import select
import socket
import threading
import time
from collections.abc import Sequence
from typing import Any

from aexec.errors import ChannelClosed
from aexec.transport.codec import Encoded, encode
from aexec.transport.frames import Frame, Kind, pack
from aexec.transport.inbox import Inbox
from aexec.transport.lines import socket_link_of
from aexec.transport.links import PacketLink, Parts, Receiver
from aexec.transport.outbox import Outbox
from aexec.transport.spin import SpinPolicy
from aexec.transport.statistics import ChannelStatistics
from aexec.transport.writer import Placed, Writer

__all__ = ("BlockingChannel",)


DOZE = 0.02  # seconds after a frame in which the next one is waited for in its own system call, and no bell is heard


class BlockingChannel:
    """One end of a channel: one thread receives, any thread sends.

    Args:
        sock: One end of ``seqpacket_pair()`` or ``stream_pair()``; the channel owns it.
        writer: This process's writer.
        name: For people, as in ``driver work``.
        spin: Seconds that ``receive`` polls before it sleeps, when recent waits were short; 0: never.
    """

    copies_off_loop = False

    def __init__(self, sock: socket.socket, writer: Writer, *, name: str = "channel", spin: float = 0.0) -> None:
        self.name = name
        self._link = socket_link_of(sock)
        self.shares_memory = self._link.shares_memory
        self._writer = writer
        self._inbox = Inbox(name, writer, self, self._released)
        self._mappings = self._inbox.mappings
        self._outbox = Outbox(writer, self._mappings)
        self._spin = SpinPolicy(spin)
        self._closed: ChannelClosed | None = None
        self._sending = threading.Lock()
        self._woken = self._waiting = self._is_busy = False
        self._dozing = self._link.patient_receiver(DOZE) if isinstance(self._link, PacketLink) else None
        self._ear, self._bell = os.pipe()
        os.set_blocking(self._ear, False)
        os.set_blocking(self._bell, False)
        self._poll = select.poll()
        self._poll.register(self._ear, select.POLLIN)
        self._poll.register(self._link.fileno(), select.POLLIN)

    def __repr__(self) -> str:
        state = "open" if self._closed is None else self._closed.reason
        return f"<BlockingChannel {self.name}: {state}, {self._inbox.received} received>"

    @property
    def is_open(self) -> bool:
        """True until either end has closed it."""
        return self._closed is None

    @property
    def has_more(self) -> bool:
        """More frames came with the last one; from any thread."""
        return self._inbox.rest is not None

    def statistics(self) -> ChannelStatistics:
        """What went through it."""
        mappings = self._inbox.mappings
        return ChannelStatistics(self._outbox.sent, self._inbox.received, 0, mappings.num_leases, mappings.num_bytes)

    def receive(self, timeout: float | None = None) -> Frame | None:
        """Wait for the next frame; None: the time was up, or :meth:`wake` was called.

        Args:
            timeout: Seconds; None: no limit.

        Raises:
            ChannelClosed: The peer is gone, and all that it sent was received.
        """
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        began, has_polled = time.perf_counter(), False
        while True:
            if self._closed is not None:
                raise self._again()
            if self._mappings.released:
                self._give_back()
            if self._inbox.rest is not None:
                frame = self._take(self._link)
            else:
                frame = None if has_polled else self._polled(began, deadline)
            if frame is not None:
                return frame
            has_polled = True
            if self._dozing is not None and self._is_busy and timeout is None and not self._woken:
                frame = self._take(self._dozing)
                self._is_busy = frame is not None
            elif self._wait(deadline):
                frame = self._take(self._link)
                self._is_busy = True
            else:
                self._spin.waited(time.perf_counter() - began)
                return None
            if frame is not None:
                self._spin.waited(time.perf_counter() - began)
                return frame

    def send(self, kind: Kind, call: int, value: Any = None, fds: Sequence[int] = ()) -> None:
        """Send a frame, from any thread; waits while the peer does not read.

        Raises:
            ChannelClosed: Nothing can be sent any longer.
            MessageNotPortable: The value cannot travel; the channel lives on.
            ArenaFull: The value does not fit into shared memory; the channel lives on.
        """
        encoded = encode(value)
        if fds or encoded.lengths or self._closed is not None or self._mappings.released:
            self.send_encoded(kind, call, encoded, fds)
        else:
            self.put(kind, pack(kind, call, encoded.codec, encoded.body))

    @property
    def is_free(self) -> bool:
        """Open, and nothing has to go along with a frame; sending waits if it has to."""
        return self._closed is None and not self._mappings.released

    def put(self, kind: Kind, frame: bytes) -> None:  # noqa: ARG002 - loops want to know it
        """Send a whole frame, while the channel is free."""
        with self._sending:
            self._outbox.sent += 1
            try:
                if self._link.send((frame,), ()):
                    return
            except (OSError, ValueError) as error:  # as in _send
                raise ChannelClosed(self.name, f"the peer is gone ({error})") from error
            self._flush()

    def send_encoded(self, kind: Kind, call: int, encoded: Encoded, fds: Sequence[int] = ()) -> None:
        """Send what ``Writer.encode`` gave; see :meth:`send`."""
        if self._closed is not None:
            raise self._again()
        if encoded.num_bytes:
            self._writer.send_encoded((self,), kind, call, encoded, fds)
        else:
            self.post(kind, call, encoded, None, fds)

    def check_room(self) -> None:
        """There is always room: sending waits for it."""

    def post(self, kind: Kind, call: int, encoded: Encoded, placed: Placed | None, fds: Sequence[int] = ()) -> None:
        """Send a frame whose bulk is in its place; see ``Writer.send``."""
        with self._sending:
            if placed is not None:
                for segment in self._outbox.segments():
                    try:
                        self._send(segment.parts, () if segment.fd is None else (segment.fd,))
                    finally:
                        if segment.fd is not None:
                            os.close(segment.fd)
            self._send(self._outbox.frame(kind, call, encoded, placed), fds)

    def spin_for(self, seconds: float) -> None:
        """Poll for so long from now on; see ``spin``."""
        self._spin = SpinPolicy(seconds)

    def wake(self) -> None:
        """Make a :meth:`receive` that waits, or the next one, return None; from any thread.

        One without a limit may be asleep where only a frame wakes it, for ``DOZE`` seconds at
        most: who wants to be woken at once gives it a limit, however long.
        """
        self._woken = True
        self._ring()

    def close(self) -> None:
        """Say goodbye and close; by the thread that receives. Twice is once.

        What was received and is large must not be used any longer: copy what you keep.
        """
        if self._bell < 0:
            return
        if self._closed is None:
            with contextlib.suppress(ChannelClosed), self._sending:
                self._send(self._outbox.frame(Kind.GOODBYE, 0, encode(None), None), (), wait=False)
            self._closed = ChannelClosed(self.name, "this end closed it", orderly=True)
        self._end()
        bell, self._bell = self._bell, -1
        os.close(bell)
        os.close(self._ear)

    def _again(self) -> ChannelClosed:
        """The reason, as an error of its own for each who asks."""
        assert self._closed is not None
        return ChannelClosed(self._closed.channel, self._closed.reason, self._closed.orderly)

    def _end(self) -> None:
        with contextlib.suppress(KeyError, ValueError):
            self._poll.unregister(self._link.fileno())
        self._link.close(None)
        self._inbox.mappings.clear()
        self._writer.forget(self)

    # Sending.

    def _send(self, parts: Parts, fds: Sequence[int], *, wait: bool = True) -> None:
        try:
            sent = self._link.send(parts, fds)
        except (OSError, ValueError) as error:  # ValueError: closed meanwhile, by the thread that receives
            raise ChannelClosed(self.name, f"the peer is gone ({error})") from error
        if not sent and wait:
            self._flush()

    def _flush(self) -> None:
        try:
            while True:
                _until_writable(self._link.fileno())
                if self._link.flush():
                    return
        except (OSError, ValueError) as error:  # as in _send
            raise ChannelClosed(self.name, f"the peer is gone ({error})") from error

    def _give_back(self) -> None:
        with contextlib.suppress(ChannelClosed), self._sending:  # if it is closed, receiving will tell
            while self._inbox.mappings.released:
                self._send(self._outbox.release_frame(), ())

    # Receiving.

    def _polled(self, began: float, deadline: float) -> Frame | None:
        """Poll for as long as seems worth it, within the limit; ``began``: when the wait did."""
        budget = self._spin.budget()
        if deadline != math.inf:
            budget = min(budget, deadline - time.monotonic())
        if budget <= 0:
            return None
        now = time.perf_counter()
        until = now + budget
        while now < until:
            frame = self._take(self._link)
            if frame is not None:
                self._spin.waited(time.perf_counter() - began)
                return frame
            if self._woken or self._mappings.released:
                return None
            now = self._spin.give_way(now)
        return None

    def _wait(self, deadline: float) -> bool:
        """Sleep until there is something to receive; False: time is up, or ``wake`` was called."""
        limit = None if deadline == math.inf else max(math.ceil((deadline - time.monotonic()) * 1e3), 0)
        self._waiting = True
        try:
            ready = self._poll.poll(0 if self._mappings.released else limit)
        finally:
            self._waiting = False
        if len(ready) == 1 and ready[0][0] != self._ear:
            return True
        if not ready:
            return bool(self._mappings.released)
        return not self._listen()

    def _take(self, receiver: Receiver) -> Frame | None:
        """Receive what is there; None: nothing that concerns others."""
        try:
            return self._inbox.take(receiver)
        except ChannelClosed as error:
            self._closed = error
            self._end()
            raise

    def _released(self) -> None:
        """On any thread, whenever the last view of something received has gone: say so, soon."""
        if self._waiting:
            self._ring()

    def _ring(self) -> None:
        with contextlib.suppress(BlockingIOError, OSError):  # it has been rung already; or it is closed
            os.write(self._bell, b"\0")

    def _listen(self) -> bool:
        """Hear the bell; True: ``wake`` rang it."""
        with contextlib.suppress(BlockingIOError):
            os.read(self._ear, 4096)
        woken, self._woken = self._woken, False
        return woken


def _until_writable(fd: int) -> None:
    """Wait; unlike ``select`` it takes descriptors of any number."""
    poll = select.poll()
    poll.register(fd, select.POLLOUT)
    poll.poll()
