"""Where the blocks of one rank are kept outside of its cache; and the simplest such place, host memory.

A store holds blocks by key, as many as its bytes allow, and lets those go that were used
least recently. It says which ones it has let go; it never says that it has a block and then
gives other bytes than it was given.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable
from typing import Any, NamedTuple, Protocol

import numpy as np

from aexec.errors import ConfigError, OutOfMemory
from aexec.model.kv_access import Row
from aexec.model.memory import free_host_bytes

__all__ = ("BlockStore", "MemoryStore", "StoreStatistics")


class StoreStatistics(NamedTuple):
    """A store in numbers.

    Attributes:
        num_blocks: Blocks that it holds.
        num_bytes: Bytes that they take.
        limit_bytes: Bytes that they may take.
    """

    num_blocks: int
    num_bytes: int
    limit_bytes: int


class BlockStore(Protocol):
    """Blocks of one rank by key; its methods block and run on the compute thread."""

    def keys(self) -> Collection[bytes]:
        """Keys of all blocks that it holds, least recently used first."""
        ...

    @property
    def capacity(self) -> int:
        """Blocks that it can hold."""
        ...

    def touch(self, keys: Iterable[bytes]) -> None:
        """These are used now, and about to be fetched; nothing else counts as use."""
        ...

    def reserve(self, key: bytes) -> Row:
        """Room for a block; it is held once the room was filled and :meth:`commit` was called."""
        ...

    def commit(self, key: bytes) -> None:
        """The room that was reserved last is filled.

        Raises:
            OSError: It cannot be kept.
        """
        ...

    def fetch(self, key: bytes) -> Any:
        """A block's bytes, valid until the next call.

        Raises:
            KeyError: It is not held, or is damaged, and so not held any longer.
        """
        ...

    def take_dropped(self) -> set[bytes]:
        """Keys that were let go since the last call."""
        ...

    def statistics(self) -> StoreStatistics:
        """The store in numbers."""
        ...

    def close(self) -> None:
        """Give memory and files back; what is on a disk stays there."""
        ...


class MemoryStore:
    """Blocks in one piece of host memory, which the system hands out as it is written to.

    Args:
        limit_bytes: What all blocks together may take.
        block_bytes: Bytes of each.

    Raises:
        ConfigError: Not even one block fits.
        OutOfMemory: The system does not give so much.
    """

    def __init__(self, limit_bytes: int, block_bytes: int) -> None:
        self._num_slots = limit_bytes // block_bytes
        if self._num_slots < 1:
            raise ConfigError(
                f"Offload.bytes leaves {limit_bytes:,} bytes to this rank: expected at least {block_bytes:,}, "
                "which is one KV block"
            )
        self._limit_bytes, self._block_bytes = limit_bytes, block_bytes
        self._rows: Any = _rows(self._num_slots, block_bytes)
        self._slots: OrderedDict[bytes, int] = OrderedDict()  # least recently used first
        self._free: list[int] = []  # given back
        self._num_begun = 0  # slots that were ever used; there may be millions, most of them never
        self._reserved: tuple[bytes, int] | None = None
        self._dropped: set[bytes] = set()

    def __repr__(self) -> str:
        return f"<MemoryStore: {len(self._slots)}/{self._num_slots} blocks of {self._block_bytes:,} bytes>"

    def keys(self) -> Collection[bytes]:
        """Keys of all blocks that it holds, least recently used first."""
        return self._slots.keys()

    @property
    def capacity(self) -> int:
        """Blocks that it can hold."""
        return self._num_slots

    def touch(self, keys: Iterable[bytes]) -> None:
        """These were used just now."""
        for key in keys:
            if key in self._slots:
                self._slots.move_to_end(key)

    def reserve(self, key: bytes) -> Row:
        """Room for a block, that of another one if need be."""
        self._give_up_reserved()
        slot = self._slots.pop(key, None)
        if slot is None:
            slot = self._free.pop() if self._free else self._begin() if self._has_more else self._evict()
        self._reserved = key, slot
        row: Row = self._rows[slot]
        return row

    def commit(self, key: bytes) -> None:
        """The room is filled."""
        assert self._reserved is not None, "it was reserved"
        _, slot = self._reserved
        self._slots[key], self._reserved = slot, None
        self._dropped.discard(key)

    def fetch(self, key: bytes) -> Row:
        """A view of the block's bytes.

        Raises:
            KeyError: It is not held.
        """
        slot = self._slots[key]
        row: Row = self._rows[slot]
        return row

    def take_dropped(self) -> set[bytes]:
        """Keys that had to make room since the last call."""
        dropped, self._dropped = self._dropped, set()
        return dropped

    def statistics(self) -> StoreStatistics:
        """The store in numbers."""
        return StoreStatistics(len(self._slots), len(self._slots) * self._block_bytes, self._limit_bytes)

    def close(self) -> None:
        """Let go of all blocks."""
        self._slots.clear()
        self._free.clear()
        self._num_begun = 0
        self._rows = _rows(self._num_slots, self._block_bytes)

    @property
    def _has_more(self) -> bool:
        return self._num_begun < self._num_slots

    def _begin(self) -> int:
        self._num_begun += 1
        return self._num_begun - 1

    def _evict(self) -> int:
        key, slot = self._slots.popitem(last=False)
        self._dropped.add(key)
        return slot

    def _give_up_reserved(self) -> None:
        """Whoever reserved before could not fill it."""
        if self._reserved is not None:
            self._free.append(self._reserved[1])
            self._reserved = None


def _rows(count: int, size: int) -> Any:
    try:
        return np.empty((count, size), dtype=np.uint8)
    except MemoryError:
        raise OutOfMemory(
            "the host memory of Offload.bytes on this rank", count * size, free_host_bytes(), "lower it"
        ) from None
