"""KV blocks: who holds which, which are free, and which of them still hold something known.

Block 0 is the null block: runners pad with it, nobody ever holds it. Every other block is
free, or in the tables of one or more requests. A full block may be cached: it can be found by
the hash of what it holds (see ``engine.prefix``), so that requests that begin alike share it,
and keeps that hash when the last of them lets go. Such a block is free, and is given away
after all others, the one that was used least recently first. :meth:`BlockPool.check_integrity` proves all of it. Pure: iteration
order and results depend on the calls only.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from aexec.engine.prefix import BlockHash
from aexec.errors import ConfigError, ProtocolError

__all__ = ("NULL_BLOCK", "BlockPool", "BlockStatistics")

NULL_BLOCK = 0
_NO_BLOCKS: list[int] = []


class BlockStatistics(NamedTuple):
    """The pool in numbers.

    Attributes:
        num_blocks: All blocks but the null block.
        num_free_blocks: Those that nobody holds; some of them may hold a known beginning.
        num_holders: Requests that hold at least one.
        peak_num_used_blocks: Most that were held at a time.
    """

    num_blocks: int
    num_free_blocks: int
    num_holders: int
    peak_num_used_blocks: int


class BlockPool:
    """Blocks ``1 .. num_blocks - 1``, lent to requests by id.

    Args:
        num_blocks: Blocks of the KV cache, the null block included.
        block_size: Token positions of a block.

    Attributes:
        reports_evictions: Cached blocks that are given away are told to :meth:`take_evicted`.
        num_evictions: Cached blocks that were given away.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        if num_blocks < 2 or block_size < 1:  # the null block and one more
            raise ConfigError(
                f"the KV cache has {num_blocks} blocks of {block_size} tokens: expected at least 2 blocks "
                "(block 0 is the null block) of 1 token; give it more memory or more num_blocks"
            )
        self.num_blocks, self.block_size = num_blocks, block_size
        self.reports_evictions, self.num_evictions = False, 0
        self._free = list(range(num_blocks - 1, 0, -1))  # a stack: the block freed last is warm, and goes first
        self._idle: OrderedDict[int, None] = OrderedDict()  # cached, held by nobody; least recently used first
        self._tables: dict[str, list[int]] = {}
        self._num_holders = [0] * num_blocks
        self._hashes: dict[int, BlockHash] = {}
        self._by_hash: dict[BlockHash, int] = {}
        self._evicted: list[tuple[int, BlockHash]] = []
        self._peak = 0

    @property
    def num_free(self) -> int:
        """Blocks that nobody holds."""
        return len(self._free) + len(self._idle)

    @property
    def num_cached(self) -> int:
        """Blocks that can be found by what they hold."""
        return len(self._hashes)

    @property
    def num_token_slots(self) -> int:
        """Token positions of the whole pool."""
        return (self.num_blocks - 1) * self.block_size

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks that ``num_tokens`` positions take."""
        return -(-num_tokens // self.block_size)

    def table(self, holder: str) -> Sequence[int]:
        """Blocks of ``holder``, in order of position."""
        return self._tables.get(holder, ())

    # ------------------------------------------------------------ lending

    def grow(self, holder: str, num_tokens: int) -> list[int] | None:
        """Make ``holder``'s table reach over ``num_tokens`` positions.

        Returns:
            The blocks that were added, possibly none; None, and nothing changes, when
            there are too few free ones.
        """
        table = self._tables.get(holder, _NO_BLOCKS)
        missing = -(-num_tokens // self.block_size) - len(table)
        if missing <= 0:
            return _NO_BLOCKS
        if missing > len(self._free) + len(self._idle):
            return None
        taken = [self._free.pop() if self._free else self._evict() for _ in range(missing)]
        for block in taken:
            self._num_holders[block] = 1
        self._tables.setdefault(holder, []).extend(taken)
        self._peak = max(self._peak, self.num_blocks - 1 - self.num_free)
        return taken

    def release(self, holder: str) -> int:
        """Take back all of ``holder``'s blocks; returns how many."""
        table = self._tables.pop(holder, _NO_BLOCKS)
        for block in reversed(table):  # whatever comes last is of use to the fewest, and goes first
            self._num_holders[block] -= 1
            if self._num_holders[block] == 0:
                if block in self._hashes:
                    self._idle[block] = None
                else:
                    self._free.append(block)
        return len(table)

    # ------------------------------------------------------------ sharing

    def match(self, hashes: Sequence[BlockHash]) -> list[int]:
        """The blocks that hold what ``hashes`` name, up to the first that none holds."""
        found: list[int] = []
        for block_hash in hashes:
            block = self._by_hash.get(block_hash)
            if block is None:
                break
            found.append(block)
        return found

    def num_free_among(self, block_ids: Sequence[int]) -> int:
        """How many of these blocks nobody holds."""
        return sum(1 for block in block_ids if not self._num_holders[block])

    def share(self, holder: str, block_ids: Sequence[int]) -> None:
        """Begin ``holder``'s table with blocks that :meth:`match` found."""
        if not block_ids:
            return
        if self._tables.get(holder):
            raise ProtocolError(f"{holder} holds blocks already: expected to share blocks with those who begin")
        for block in block_ids:
            if not self._num_holders[block]:
                del self._idle[block]
            self._num_holders[block] += 1
        self._tables[holder] = list(block_ids)
        self._peak = max(self._peak, self.num_blocks - 1 - self.num_free)

    def set_hash(self, block: int, block_hash: BlockHash) -> None:
        """Let a full block be found by what it holds; nothing happens when another one holds the same, or it has a hash."""
        if block_hash not in self._by_hash and block not in self._hashes:
            self._by_hash[block_hash] = block
            self._hashes[block] = block_hash

    def drop_hashes(self, block_ids: Iterable[int]) -> None:
        """Nobody new shall find these blocks: what they hold is wrong, or is not to be kept."""
        for block in block_ids:
            block_hash = self._hashes.pop(block, None)
            if block_hash is not None:
                del self._by_hash[block_hash]
                if not self._num_holders[block]:
                    del self._idle[block]
                    self._free.append(block)

    def forget(self, hashes: Iterable[BlockHash]) -> None:
        """Nobody new shall find what these name."""
        self.drop_hashes([block for each in hashes if (block := self._by_hash.get(each)) is not None])

    def drop_all_hashes(self) -> None:
        """Nobody new shall find any block; those who hold one keep it."""
        self.drop_hashes(list(self._hashes))
        self._evicted.clear()

    def cached_blocks(self) -> list[tuple[int, BlockHash]]:
        """All blocks that can be found by what they hold, with their hashes; least recently used first."""
        held = (block for block in self._hashes if self._num_holders[block])
        return [(block, self._hashes[block]) for block in (*self._idle, *held)]

    def take_evicted(self) -> list[tuple[int, BlockHash]]:
        """Blocks that were given away since the last call, with what they held, and hold until they are written to."""
        evicted, self._evicted = self._evicted, []
        return evicted

    def _evict(self) -> int:
        block, _ = self._idle.popitem(last=False)
        block_hash = self._hashes.pop(block)
        del self._by_hash[block_hash]
        self.num_evictions += 1
        if self.reports_evictions:
            self._evicted.append((block, block_hash))
        return block

    # ------------------------------------------------------------ looking at it

    def check_integrity(self) -> None:
        """Prove that every block but the null block is free, or held by as many as are counted, and has one hash.

        Raises:
            ProtocolError: A block is lost, lent and free at once, or is the null block, or a count or a hash is wrong.
        """
        holders = Counter(block for table in self._tables.values() for block in table)
        seen = Counter([*self._free, *self._idle, *holders])
        double = {block for block, count in seen.items() if count > 1 or block == NULL_BLOCK}
        double.update(block for block, count in enumerate(self._num_holders) if count != holders[block])
        double.update(block for table in self._tables.values() for block, n in Counter(table).items() if n > 1)
        lost = sorted(set(range(1, self.num_blocks)) - set(seen))
        if lost or double:
            raise ProtocolError(f"the block pool is inconsistent: lost {lost}, lent twice or null {sorted(double)}")
        cached = {block: block_hash for block_hash, block in self._by_hash.items()}
        if cached != self._hashes or not self._idle.keys() <= cached.keys() or not cached.keys().isdisjoint(self._free):
            raise ProtocolError(f"the block pool is inconsistent: hashes {self._hashes}, found {cached}")

    def statistics(self) -> BlockStatistics:
        """The pool in numbers."""
        return BlockStatistics(self.num_blocks - 1, self.num_free, len(self._tables), self._peak)

    def __repr__(self) -> str:
        """As in ``<BlockPool: 3/64 blocks of 16 tokens used by 2 holder(s), 2 cached>``."""
        cached = f", {len(self._hashes)} cached" if self._hashes else ""
        return (
            f"<BlockPool: {self.num_blocks - 1 - self.num_free}/{self.num_blocks - 1} blocks of {self.block_size} tokens "
            f"used by {len(self._tables)} holder(s){cached}>"
        )
