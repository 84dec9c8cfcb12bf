"""Which part of the arena is free: pure bookkeeping over segments, extents and blocks.

An extent is a stretch of free bytes. What was freed last is given out first, because its
pages are warm: the first touch of shared pages costs ten times a copy and more. Neighbours
are joined when they are freed, so that an idle arena is one extent per segment, whatever
sizes it has served.
"""

from __future__ import annotations

import mmap
from typing import NamedTuple

from aexec.transport.frames import align

__all__ = ("Block", "Blocks")

PAGE = mmap.PAGESIZE


class Block(NamedTuple):
    """A part of a segment.

    Attributes:
        segment: Which.
        offset: Bytes into it, a multiple of the page size.
        size: Bytes, a multiple of the page size.
    """

    segment: int
    offset: int
    size: int


class Blocks:
    """What is free of a growing and shrinking number of segments."""

    def __init__(self) -> None:
        self.segments: dict[int, int] = {}
        self.used = 0
        self._next = 0
        self._free: dict[tuple[int, int], int] = {}  # size by (segment, start), freed last is last
        self._ends: dict[tuple[int, int], int] = {}  # start by (segment, end)

    def __repr__(self) -> str:
        return f"<Blocks: {self.used} of {self.total} bytes used, {len(self._free)} free extents>"

    @property
    def total(self) -> int:
        """Bytes of all segments."""
        return sum(self.segments.values())

    def take(self, size: int) -> Block | None:
        """A block of ``size`` bytes or a little more; None: there is none, and a segment has to be added."""
        size = align(max(size, 1), PAGE)
        for (segment, start), room in reversed(self._free.items()):
            if room >= size:
                self._remove(segment, start)
                if room > size:
                    self._insert(segment, start + size, room - size)
                self.used += size
                return Block(segment, start, size)
        return None

    def give(self, block: Block) -> None:
        """Take a block back."""
        segment, start, size = block
        self.used -= size
        if (before := self._ends.get((segment, start))) is not None:
            size += self._remove(segment, before)
            start = before
        if (segment, start + size) in self._free:
            size += self._remove(segment, start + size)
        self._insert(segment, start, size)

    def add(self, size: int) -> int:
        """A new segment, whose number nothing had before."""
        self._next += 1
        self.segments[self._next] = size
        self._insert(self._next, 0, size)
        return self._next

    def idle(self) -> list[int]:
        """Segments of which nothing is in use."""
        return [segment for segment, size in self.segments.items() if self._free.get((segment, 0)) == size]

    def drop(self, segment: int) -> None:
        """Forget an idle segment."""
        self._remove(segment, 0)
        del self.segments[segment]

    def _insert(self, segment: int, start: int, size: int) -> None:
        self._free[segment, start] = size
        self._ends[segment, start + size] = start

    def _remove(self, segment: int, start: int) -> int:
        size = self._free.pop((segment, start))
        del self._ends[segment, start + size]
        return size
