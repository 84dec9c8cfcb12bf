"""Blocks are lent and come back; none is lost, none is lent twice."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from aexec.engine.blocks import NULL_BLOCK, BlockPool
from aexec.errors import ConfigError, ProtocolError

HOLDERS = st.sampled_from(["a", "b", "c", "d"])


class Lending(RuleBasedStateMachine):
    """Any sequence of growing and releasing."""

    def __init__(self):
        super().__init__()
        self.pool = BlockPool(num_blocks=9, block_size=4)
        self.lengths: dict[str, int] = {}

    @rule(holder=HOLDERS, num_tokens=st.integers(1, 40))
    def grow(self, holder: str, num_tokens: int):
        before = self.pool.num_free
        added = self.pool.grow(holder, num_tokens)
        if added is None:
            assert self.pool.num_free == before
        else:
            self.lengths[holder] = max(self.lengths.get(holder, 0), num_tokens)
            assert list(self.pool.table(holder))[len(self.pool.table(holder)) - len(added) :] == added

    @rule(holder=HOLDERS)
    def release(self, holder: str):
        held = len(self.pool.table(holder))
        assert self.pool.release(holder) == held
        self.lengths.pop(holder, None)

    @invariant()
    def nothing_is_lost(self):
        self.pool.check_integrity()
        for holder, length in self.lengths.items():
            table = self.pool.table(holder)
            assert len(table) == self.pool.num_blocks_for(length)
            assert NULL_BLOCK not in table


test_blocks_are_never_lost_nor_lent_twice = Lending.TestCase
test_blocks_are_never_lost_nor_lent_twice.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_growth_is_all_or_nothing():
    """A table that cannot reach far enough does not grow at all."""
    pool = BlockPool(num_blocks=4, block_size=4)
    assert pool.grow("a", 8) is not None
    assert pool.grow("b", 8) is None
    assert (pool.num_free, list(pool.table("b"))) == (1, [])


def test_the_integrity_check_finds_a_lost_and_a_doubly_lent_block():
    """The check names what is wrong."""
    pool = BlockPool(num_blocks=4, block_size=4)
    (block,) = pool.grow("a", 4)
    pool._tables["b"] = [block]
    pool._free.pop()
    with pytest.raises(ProtocolError, match=rf"lost \[\d\], lent twice or null \[{block}\]"):
        pool.check_integrity()


def test_a_pool_needs_a_block_beside_the_null_block():
    """A cache of one block is refused, with the remedy."""
    with pytest.raises(ConfigError, match="1 blocks of 16 tokens: expected at least 2"):
        BlockPool(num_blocks=1, block_size=16)


def test_a_pool_says_how_full_it_is():
    """The repr and the statistics tell the same facts."""
    pool = BlockPool(num_blocks=5, block_size=16)
    pool.grow("a", 40)
    pool.release("a")
    pool.grow("a", 17)
    assert repr(pool) == "<BlockPool: 2/4 blocks of 16 tokens used by 1 holder(s)>"
    assert pool.statistics() == (4, 2, 1, 3)
