"""The other side of an arena: a peer's memory, as this process sees it.

Segments are mapped privately: what the receiver of an array writes to it, it alone sees,
and neither the owner nor another reader can be harmed. Pages that were written to are
dropped before the block is given back, so that the next message in it is seen as it is.

A lease ends when the last view of its block has gone. Views are arrays, tensors and
memoryviews, and views of these; all of them keep alive the one array per buffer that is
made here, and that one is watched. (Releasing a memoryview tells nothing: it works while a
tensor over the same memory is in use.)
"""

from __future__ import annotations

import mmap
import weakref
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from aexec.transport.blocks import PAGE
from aexec.transport.frames import BadFrame, Bulk, align, unpack_table

__all__ = ("Mappings",)

Bytes = npt.NDArray[Any]  # uint8 [length]


class _Exporter(np.ndarray):  # pyright: ignore[reportMissingTypeArgument, reportUntypedBaseClass]
    """The array that is watched: not of numpy's own type, which views would look through."""


class _Held:
    """A lease of this process: its exporters, and where it lies."""

    __slots__ = ("bulk", "exporters")

    def __init__(self, bulk: Bulk) -> None:
        self.bulk = bulk
        self.exporters: dict[int, weakref.ref[Any]] = {}


class Mappings:
    """A peer's segments, and what of them is in use here.

    Args:
        on_release: Called from any thread, even from within the garbage collector, when a
            lease has ended.

    Attributes:
        released: Leases that have ended and were not yet given back.
    """

    def __init__(self, on_release: Callable[[], None]) -> None:
        self.released: deque[int] = deque()
        self._on_release = on_release
        self._segments: dict[int, mmap.mmap] = {}
        self._live: dict[int, _Held] = {}

    def __repr__(self) -> str:
        return f"<Mappings: {len(self._segments)} segments, {len(self._live)} leases>"

    @property
    def num_leases(self) -> int:
        """Messages that are in use."""
        return len(self._live)

    @property
    def num_bytes(self) -> int:
        """Bytes of the peer's that are in use."""
        return sum(held.bulk.length for held in tuple(self._live.values()))

    def attach(self, segment: int, fd: int, size: int) -> None:
        """Map a new segment; ``fd`` stays the caller's.

        Raises:
            OSError: It cannot be mapped.
        """
        flags = mmap.MAP_PRIVATE | getattr(mmap, "MAP_NORESERVE", 0)
        self._segments[segment] = mmap.mmap(fd, size, flags=flags, prot=mmap.PROT_READ | mmap.PROT_WRITE)

    def detach(self, segment: int) -> None:
        """The peer does not use it any longer."""
        self._segments.pop(segment, None)

    def buffers(self, lease: int, bulk: Bulk, num_buffers: int) -> list[Bytes]:
        """The buffers of a message, uint8 ``[length]`` each; the lease ends with the last of them.

        Raises:
            BadFrame: There is no such place.
        """
        memory = self._segments.get(bulk.segment)
        if memory is None or bulk.offset + bulk.length > len(memory):
            raise BadFrame(f"{bulk} is not in the memory that the peer has shown")
        whole = memoryview(memory)[bulk.offset : bulk.offset + bulk.length]
        held = self._live[lease] = _Held(bulk)
        found: list[Bytes] = []
        for offset, length in unpack_table(whole, num_buffers):
            exporter: Any = _Exporter.__new__(_Exporter, (length,), np.uint8, memory, bulk.offset + offset)
            held.exporters[offset] = weakref.ref(exporter, partial(self._gone, lease, offset))
            found.append(exporter)
        return found

    def clear(self) -> None:
        """Forget it all; what is in use stays valid."""
        self._segments.clear()
        self._live.clear()
        self.released.clear()

    def _gone(self, lease: int, offset: int, _: weakref.ref[Any]) -> None:
        held = self._live.get(lease)
        if held is None:
            return
        held.exporters.pop(offset, None)
        if held.exporters or self._live.pop(lease, None) is None:  # two threads may come here at once
            return
        memory = self._segments.get(held.bulk.segment)
        if memory is not None:
            memory.madvise(mmap.MADV_DONTNEED, held.bulk.offset, align(held.bulk.length, PAGE))
        self.released.append(lease)
        self._on_release()
