"""KV blocks: who holds which, and which are free.

Block 0 is the null block: runners pad with it, nobody ever holds it. Every other block
is either free or in exactly one request's table, which :meth:`BlockPool.check_integrity`
proves. Pure: iteration order and results depend on the calls only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from aexec.errors import ConfigError, ProtocolError

__all__ = ("NULL_BLOCK", "BlockPool", "BlockStatistics")

NULL_BLOCK = 0
_NO_BLOCKS: list[int] = []


class BlockStatistics(NamedTuple):
    """The pool in numbers.

    Attributes:
        num_blocks: All blocks but the null block.
        num_free_blocks: Those that nobody holds.
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
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        if num_blocks < 2 or block_size < 1:  # the null block and one more
            raise ConfigError(
                f"the KV cache has {num_blocks} blocks of {block_size} tokens: expected at least 2 blocks "
                "(block 0 is the null block) of 1 token; give it more memory or more num_blocks"
            )
        self.num_blocks, self.block_size = num_blocks, block_size
        self._free = list(range(num_blocks - 1, 0, -1))  # a stack: the block freed last is warm, and goes first
        self._tables: dict[str, list[int]] = {}
        self._peak = 0

    @property
    def num_free(self) -> int:
        """Blocks that nobody holds."""
        return len(self._free)

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

    def grow(self, holder: str, num_tokens: int) -> list[int] | None:
        """Make ``holder``'s table reach over ``num_tokens`` positions.

        Returns:
            The blocks that were added, possibly none; None, and nothing changes, when
            there are too few free ones.
        """
        table = self._tables.get(holder, _NO_BLOCKS)
        missing = -(-num_tokens // self.block_size) - len(table)
        if missing <= 0:
            return _NO_BLOCKS.copy()
        if missing > len(self._free):
            return None
        taken = [self._free.pop() for _ in range(missing)]
        self._tables.setdefault(holder, []).extend(taken)
        self._peak = max(self._peak, self.num_blocks - 1 - len(self._free))
        return taken

    def release(self, holder: str) -> int:
        """Take back all of ``holder``'s blocks; returns how many."""
        table = self._tables.pop(holder, _NO_BLOCKS)
        self._free.extend(reversed(table))
        return len(table)

    def check_integrity(self) -> None:
        """Prove that every block but the null block is free or held, once.

        Raises:
            ProtocolError: A block is lost, lent twice, or is the null block.
        """
        seen = self._free + [block for table in self._tables.values() for block in table]
        if sorted(seen) != list(range(1, self.num_blocks)):
            lost = sorted(set(range(1, self.num_blocks)) - set(seen))
            double = sorted({block for block in seen if seen.count(block) > 1 or block == NULL_BLOCK})
            raise ProtocolError(f"the block pool is inconsistent: lost {lost}, lent twice or null {double}")

    def statistics(self) -> BlockStatistics:
        """The pool in numbers."""
        return BlockStatistics(self.num_blocks - 1, len(self._free), len(self._tables), self._peak)

    def __repr__(self) -> str:
        """As in ``<BlockPool: 3/64 blocks of 16 tokens used by 2 holder(s)>``."""
        used = self.num_blocks - 1 - len(self._free)
        return (
            f"<BlockPool: {used}/{self.num_blocks - 1} blocks of {self.block_size} tokens "
            f"used by {len(self._tables)} holder(s)>"
        )
