"""The memory that bulk data is written to: one writer, any number of readers.

Who owns what: the process that writes owns the memory and *all* of the bookkeeping, which
is private to it. There are no shared flags, so there is nothing to fence, and a reader that
dies cannot wedge anything. A block is leased to the channels that its frame goes to. Each
end gives its lease back with a frame when the last view of the block is gone; when a
channel ends, its leases end. A block without leases is free.

Order: a reader touches a block only between the frame that names it and the frame that
gives it back, and the kernel hands both over under a lock, so that all that was written
before a ``send`` is seen after the matching ``recv``, on any CPU.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Collection, Hashable, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy.typing as npt

from aexec.errors import ArenaFull
from aexec.transport.blocks import PAGE, Block, Blocks
from aexec.transport.frames import align
from aexec.transport.segments import Allocate, Segment, memory_file

__all__ = ("Arena", "ArenaStatistics", "HeldLease", "Lease", "NewSegment")

SEGMENT = 16 << 20  # bytes of a segment, unless more is asked for at once
LARGE_PAGE = 2 << 20


@dataclass(eq=False, slots=True)
class Lease:
    """A block that somebody may be reading.

    Attributes:
        number: As it stands in frames.
        block: Which.
        what: What lies there, for people.
        since: When it was leased, monotonic seconds.
        holders: Those who have not given it back.
    """

    number: int
    block: Block
    what: str
    since: float
    holders: set[Hashable] = field(default_factory=set[Hashable])


class HeldLease(NamedTuple):
    """A lease, for reports.

    Attributes:
        what: What lies there, as in ``ExecuteModel``.
        holders: Names of the channels whose other ends have not given it back.
        nbytes: Bytes.
        age: Seconds.
    """

    what: str
    holders: tuple[str, ...]
    nbytes: int
    age: float


class NewSegment(NamedTuple):
    """A segment that a reader does not know yet.

    Attributes:
        number: Of the segment.
        size: Bytes.
        fd: A descriptor of it, to be closed by whoever asked.
    """

    number: int
    size: int
    fd: int


class ArenaStatistics(NamedTuple):
    """Sizes in bytes.

    Attributes:
        limit: At most.
        reserved: Of all segments.
        used: Of all leased blocks.
        leases: Leased blocks.
        segments: Segments.
    """

    limit: int
    reserved: int
    used: int
    leases: int
    segments: int


class Arena:
    """Blocks of shared memory and who reads them; used from any thread.

    Args:
        limit: Bytes at most.
        setting: Where the limit comes from, for errors; empty: nobody can change it.
        allocate: Where memory comes from.
    """

    def __init__(self, limit: int, setting: str, *, allocate: Allocate = memory_file) -> None:
        self.limit, self.setting = limit, setting
        self.segments: dict[int, Segment] = {}
        self.epoch = 0  # changes with the set of segments
        self._allocate = allocate
        self._blocks = Blocks()
        self._leases: dict[int, Lease] = {}
        self._next = 0
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        facts = self.statistics()
        return f"<Arena: {facts.leases} leases, {facts.used} of {facts.limit} bytes used, {facts.reserved} reserved>"

    def lease(self, size: int, holders: Iterable[Hashable], what: str) -> Lease:
        """Take a block for ``holders``.

        Raises:
            ArenaFull: There is no room; says who holds it.
        """
        with self._lock:
            block = self._blocks.take(size) or self._grow(size)
            self._next += 1
            lease = self._leases[self._next] = Lease(self._next, block, what, time.monotonic(), set(holders))
            return lease

    def release(self, numbers: Iterable[int], holder: Hashable) -> None:
        """``holder`` does not read these any longer; numbers that it does not hold mean nothing."""
        with self._lock:
            for number in numbers:
                lease = self._leases.get(number)
                if lease is not None and holder in lease.holders:
                    lease.holders.remove(holder)
                    self._free(lease)

    def forget(self, holder: Hashable) -> None:
        """``holder`` is gone, and reads nothing any longer."""
        with self._lock:
            for lease in list(self._leases.values()):
                if holder in lease.holders:
                    lease.holders.remove(holder)
                    self._free(lease)

    def news(self, known: Collection[int]) -> tuple[list[NewSegment], list[int]]:
        """What a reader that knows some segments has to be told: new ones, and ones that are gone."""
        with self._lock:
            new = [
                NewSegment(number, segment.size, os.dup(segment.fd))
                for number, segment in self.segments.items()
                if number not in known
            ]
            return new, [number for number in known if number not in self.segments]

    def bytes_of(self, block: Block, length: int) -> npt.NDArray[Any]:
        """The memory, uint8 ``[length]``, for whoever leased it."""
        return self.segments[block.segment].bytes[block.offset : block.offset + length]

    def held(self, longer_than: float = 0.0) -> list[HeldLease]:
        """What is leased for longer than so many seconds, oldest first."""
        now = time.monotonic()
        with self._lock:
            leases = [lease for lease in self._leases.values() if now - lease.since >= longer_than]
        return [_report(lease, now) for lease in leases]

    def statistics(self) -> ArenaStatistics:
        """Its sizes."""
        with self._lock:
            blocks = self._blocks
            return ArenaStatistics(self.limit, blocks.total, blocks.used, len(self._leases), len(self.segments))

    def close(self) -> None:
        """Let go of all memory; peers that still hold some keep it."""
        with self._lock:
            for segment in self.segments.values():
                segment.close()
            self.segments.clear()
            self._leases.clear()
            self._blocks = Blocks()

    def _free(self, lease: Lease) -> None:
        if not lease.holders:
            del self._leases[lease.number]
            self._blocks.give(lease.block)

    def _grow(self, size: int) -> Block:
        """Add a segment; idle ones go first, should the limit ask for it."""
        need = align(size, PAGE)
        if self._room < need:
            self._drop_idle(need)
        if self._room < need:
            raise self._full(size, self._whose())
        wanted = max(SEGMENT, align(size, LARGE_PAGE))
        segment_bytes = wanted if self._room >= wanted else align(self._room - PAGE + 1, PAGE)
        try:
            segment = Segment(segment_bytes, self._allocate)
        except OSError as error:
            why = f"the system does not give it ({error.strerror or error}); make more memory available or send less"
            raise self._full(size, why) from error
        self.segments[self._blocks.add(segment_bytes)] = segment
        self.epoch += 1
        block = self._blocks.take(size)
        assert block is not None, "a new segment has room for what it was made for"
        return block

    @property
    def _room(self) -> int:
        return self.limit - self._blocks.total

    def _drop_idle(self, need: int) -> None:
        for number in self._blocks.idle():
            if self._room >= need:
                return
            self._blocks.drop(number)
            self.segments.pop(number).close()
            self.epoch += 1

    def too_large(self, need: int) -> ArenaFull:
        """The error for what would not fit if nothing else were there."""
        return ArenaFull(need, self.limit, self.limit, self.setting, f"send less at once{self._or_raise}")

    @property
    def _or_raise(self) -> str:
        return f", or raise {self.setting}" if self.setting else ""

    def _full(self, need: int, why: str) -> ArenaFull:
        return ArenaFull(need, self.limit - self._blocks.used, self.limit, self.setting, why)

    def _whose(self) -> str:
        if not self._leases:
            return f"send less at once{self._or_raise}"
        oldest = _report(next(iter(self._leases.values())), time.monotonic())
        return (
            f"{len(self._leases)} messages are still in use by those who received them, the oldest for "
            f"{oldest.age:.3g} s ({oldest.what}, {oldest.nbytes} bytes, held by {', '.join(oldest.holders)}); "
            f"drop arrays when you are done with them, copy what you keep{self._or_raise}"
        )


def _report(lease: Lease, now: float) -> HeldLease:
    names = tuple(sorted(str(getattr(holder, "name", holder)) for holder in tuple(lease.holders)))
    return HeldLease(lease.what, names, lease.block.size, now - lease.since)
