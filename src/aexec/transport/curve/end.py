"""One end of a line between two nodes, as a ``LoopChannel`` uses it."""

from __future__ import annotations

import errno
from asyncio import AbstractEventLoop
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from aexec.transport.curve.pieces import Assembly, cut
from aexec.transport.frames import BadFrame, Data
from aexec.transport.links import OWN, Parts

__all__ = ("CurveEnd",)

_AT_ONCE: Final = 2 << 20  # bytes that are given to ZMQ, which copies them, in one turn of the loop
_MOST_UNHEARD: Final = 4096  # frames that may come before anybody hears them

_MOST_URGENT: Final = 1024  # frames that may wait for room, past all others

Post = Callable[[bytes | memoryview, bool], bool]
"""Gives a piece to ZMQ, which copies it, or a frame that is urgent. False: there is no room now. Raises ``OSError``:
the peer is gone."""


class CurveEnd:
    """A ``Link`` without shared memory; what it is made of is the listener's or the dialler's.

    Args:
        post: How pieces are sent.
        let_go: Told once that nobody uses it any longer.
        address: Of the peer, for people.

    Attributes:
        error: What will be told after the last frame; None: the peer is there.
    """

    shares_memory = False

    def __init__(self, post: Post, let_go: Callable[[CurveEnd], None], address: str) -> None:
        self.address = address
        self.is_closed = False
        self._post, self._let_go = post, let_go
        self._assembly = Assembly()
        self._frames: deque[Data] = deque()
        self._first: deque[Data] = deque()  # are taken before those
        self.error: BadFrame | OSError | None = None
        self._urgent: deque[bytes] = deque()
        self._rest: Iterator[bytes | memoryview] = iter(())
        self._piece: bytes | memoryview | None = None
        self._loop: AbstractEventLoop | None = None
        self._readable: Callable[[], object] | None = None
        self._writable: Callable[[], object] | None = None
        self._is_telling = self._is_due = False
        self._then: Callable[[], object] | None = None

    def __repr__(self) -> str:
        state = "closed" if self.is_closed else self.error or "open"
        return f"<CurveEnd to {self.address}: {state}, {len(self._frames)} frames to be taken>"

    @property
    def is_blocked(self) -> bool:
        """It waits for room to send."""
        return self._writable is not None or bool(self._urgent)

    # What the channel does.

    def send(self, parts: Parts, fds: Sequence[int]) -> bool:
        """As it says in ``Link``."""
        if fds:
            raise ValueError("descriptors cannot go to another node")
        self._rest = cut(parts)
        if self.flush():
            return True
        if self._piece is not None and sum(map(len, parts)) <= OWN:  # the sender may change it from now on
            self._piece, self._rest = bytes(self._piece), iter([bytes(piece) for piece in self._rest])
        return False

    def send_urgent(self, frame: bytes) -> bool:
        """Send a whole frame past all that waits, between the pieces of a longer one; False: too many such wait."""
        if len(self._urgent) >= _MOST_URGENT:
            return False
        self._urgent.append(frame)
        self._flush_urgent()
        return True

    def _flush_urgent(self) -> bool:
        try:
            while self._urgent:
                if not self._post(self._urgent[0], True):
                    return False
                self._urgent.popleft()
        except BrokenPipeError:  # whoever receives learns of it
            self._urgent.clear()
        return True

    def flush(self) -> bool:
        """As it says in ``Link``."""
        if not self._flush_urgent():
            return False
        sent = 0
        while True:
            piece = self._piece
            if piece is None:
                piece = next(self._rest, None)
                if piece is None:
                    return True
            if sent + len(piece) > _AT_ONCE:
                self._piece = piece
                self._room_soon()
                return False
            if not self._post(piece, False):
                self._piece = piece
                return False
            self._piece = None
            sent += len(piece)

    def receive(self) -> tuple[Data, tuple[int, ...]]:
        """As it says in ``Link``."""
        frames = self._first or self._frames
        if frames:
            return frames.popleft(), ()
        if self.error is not None:
            raise self.error
        raise BlockingIOError

    def watch(self, loop: AbstractEventLoop, readable: Callable[[], object]) -> None:
        """As it says in ``Link``."""
        self._loop, self._readable = loop, readable
        self._tell_soon()

    def watch_writable(self, loop: AbstractEventLoop, writable: Callable[[], object] | None) -> None:
        """As it says in ``Link``."""
        self._loop, self._writable = loop, writable

    def close(self, loop: AbstractEventLoop | None) -> None:
        """As it says in ``Link``."""
        del loop
        if self.is_closed:
            return
        self.is_closed = True
        self._readable = self._writable = None
        self._frames.clear()
        self._first.clear()
        self._urgent.clear()
        self._rest, self._piece = iter(()), None
        self._let_go(self)
        if self._then is not None:
            self._then()

    def when_closed(self, then: Callable[[], object]) -> None:
        """Have something called once nobody uses it any longer."""
        self._then = then

    # What the listener or the dialler does.

    def arrived(self, piece: memoryview, *, is_urgent: bool = False) -> None:
        """A piece has come, or a frame that passes those that have come before it."""
        if self.error is not None or self.is_closed:
            return
        if is_urgent:
            self._first.append(bytes(piece))
            if self._readable is None and len(self._first) > _MOST_UNHEARD:
                self.lost(BadFrame("too many frames have come before anybody heard them"))
            elif not self._is_due:
                self._tell()
            return
        try:
            frame = self._assembly.add(piece)
        except BadFrame as error:
            self.lost(error)
            return
        if frame is not None:
            self._frames.append(frame)
            if self._readable is None and len(self._frames) > _MOST_UNHEARD:
                self.lost(BadFrame("too many frames have come before anybody heard them"))
            else:
                self._tell()

    def lost(self, why: str | BadFrame) -> None:
        """Nothing can come any longer; it is told after the last frame."""
        if self.error is None and not self.is_closed:
            self.error = OSError(errno.ECONNRESET, why) if isinstance(why, str) else why
            self._tell()

    def has_room(self) -> None:
        """It may be worth it to send again."""
        if self._urgent and self._writable is None:
            self._flush_urgent()
        if self._writable is not None:
            self._writable()

    # To the channel.

    def _room_soon(self) -> None:
        if self._loop is not None:
            self._loop.call_soon(self.has_room)

    def _tell(self) -> None:
        """Have one frame taken; the others when everything else has had its turn."""
        self._is_due = False
        if self._readable is None or self._is_telling:
            return
        self._is_telling = True
        try:
            self._readable()
        finally:
            self._is_telling = False
        if self._readable is not None and (self._first or self._frames or self.error is not None):
            self._tell_soon()

    def _tell_soon(self) -> None:
        if not self._is_due and self._loop is not None:
            self._is_due = True
            self._loop.call_soon(self._tell)
