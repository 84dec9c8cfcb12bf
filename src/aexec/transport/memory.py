"""A line within one loop: for tests, and for two parts of one process that may be parted later."""

from __future__ import annotations

import os
from asyncio import AbstractEventLoop
from collections import deque
from collections.abc import Callable, Sequence

from aexec.transport.links import Parts

__all__ = ("MemoryEnd", "memory_pair")

CAPACITY = 256  # frames under way in one direction


class _Pipe:
    """One direction: frames under way, and who waits for what."""

    def __init__(self) -> None:
        self.frames: deque[tuple[bytes, tuple[int, ...]]] = deque()
        self.closed = False  # by either end
        self.loop: AbstractEventLoop | None = None
        self.readable: Callable[[], object] | None = None
        self.writable: Callable[[], object] | None = None

    def changed(self) -> None:
        """Tell those who wait, as a poll would: soon, and as long as it holds."""
        if self.loop is not None:
            self.loop.call_soon(self._tell)

    def _tell(self) -> None:
        if self.writable is not None and (self.closed or len(self.frames) < CAPACITY):
            self.writable()
        if self.readable is not None and (self.closed or self.frames):
            self.readable()
            if self.frames:
                self.changed()


class MemoryEnd:
    """One end; a ``Link``. What is sent is copied, as by any other.

    Args:
        incoming: What comes to it.
        outgoing: What it sends.
    """

    shares_memory = False

    def __init__(self, incoming: _Pipe, outgoing: _Pipe) -> None:
        self._incoming, self._outgoing = incoming, outgoing
        self._rest: list[tuple[bytes, tuple[int, ...]]] = []

    def __repr__(self) -> str:
        return f"<MemoryEnd: {len(self._incoming.frames)}/{CAPACITY} arrived>"

    def send(self, parts: Parts, fds: Sequence[int]) -> bool:
        """As it says in ``Link``."""
        self._rest.append((b"".join(parts), tuple(os.dup(fd) for fd in fds)))
        return self.flush()

    def flush(self) -> bool:
        """As it says in ``Link``."""
        if self._outgoing.closed:
            self._drop(self._rest)
            raise BrokenPipeError
        while self._rest and len(self._outgoing.frames) < CAPACITY:
            self._outgoing.frames.append(self._rest.pop(0))
            self._outgoing.changed()
        return not self._rest

    def receive(self) -> tuple[bytearray, tuple[int, ...]]:
        """As it says in ``Link``."""
        if not self._incoming.frames:
            if self._incoming.closed:
                return bytearray(), ()
            raise BlockingIOError
        data, fds = self._incoming.frames.popleft()
        self._incoming.changed()
        return bytearray(data), fds

    def watch(self, loop: AbstractEventLoop, readable: Callable[[], object]) -> None:
        """As it says in ``Link``."""
        self._incoming.loop, self._incoming.readable = loop, readable
        self._incoming.changed()

    def watch_writable(self, loop: AbstractEventLoop, writable: Callable[[], object] | None) -> None:
        """As it says in ``Link``."""
        self._outgoing.loop, self._outgoing.writable = self._outgoing.loop or loop, writable
        self._outgoing.changed()

    def close(self, loop: AbstractEventLoop | None) -> None:
        """As it says in ``Link``."""
        del loop  # both ends are on one
        self._incoming.readable = self._outgoing.writable = None
        self._drop(self._rest)
        self._drop(self._incoming.frames)
        for pipe in (self._incoming, self._outgoing):
            pipe.closed = True
            pipe.changed()

    @staticmethod
    def _drop(frames: list[tuple[bytes, tuple[int, ...]]] | deque[tuple[bytes, tuple[int, ...]]]) -> None:
        for _, fds in frames:
            for fd in fds:
                os.close(fd)
        frames.clear()


def memory_pair() -> tuple[MemoryEnd, MemoryEnd]:
    """Two ends of a line within one loop."""
    there, back = _Pipe(), _Pipe()
    return MemoryEnd(back, there), MemoryEnd(there, back)
