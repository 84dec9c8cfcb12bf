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


# ---------------------------------------------------------------- shared blocks


def cached_pool(num_blocks=6, holders=("a",), *, released=()):
    """Each holder has two blocks of four tokens; the hash of each is its holder's name and its place."""
    pool = BlockPool(num_blocks, block_size=4)
    for holder in holders:
        for place, block in enumerate(pool.grow(holder, 8)):
            pool.set_hash(block, f"{holder}{place}".encode())
    for holder in released:
        pool.release(holder)
    pool.check_integrity()
    return pool


def test_blocks_are_found_by_what_they_hold_up_to_the_first_that_is_missing():
    """A gap ends a beginning."""
    pool = cached_pool(holders=("a", "b"))
    (a0, a1), (b0, _) = pool.table("a"), pool.table("b")
    assert pool.match([b"a0", b"a1", b"b0"]) == [a0, a1, b0]
    assert pool.match([b"a0", b"nothing", b"a1"]) == [a0]
    assert pool.match([]) == []


def test_a_block_is_free_once_the_last_holder_lets_go_and_is_found_still():
    """It counts as free, is lent after all others, and keeps its hash until then."""
    pool = cached_pool(num_blocks=4)
    shared = list(pool.table("a"))
    pool.share("b", shared)
    pool.release("a")
    assert (pool.num_free, pool.num_free_among(shared)) == (1, 0)
    pool.release("b")
    assert (pool.num_free, pool.num_free_among(shared), pool.num_cached) == (3, 2, 2)
    pool.check_integrity()
    pool.share("c", pool.match([b"a0"]))
    (other,) = pool.grow("d", 4)
    assert other not in shared
    assert repr(pool) == "<BlockPool: 2/3 blocks of 4 tokens used by 2 holder(s), 2 cached>"


def test_the_least_recently_used_block_is_given_away_first_and_of_one_request_the_last():
    """So that what most share stays longest."""
    pool = cached_pool(holders=("a", "b"), released=("b", "a"))
    (fifth,) = pool.grow("x", 4)
    assert fifth == 5  # the one that never was cached
    pool.share("y", pool.match([b"b0"]))
    pool.release("y")
    pool.reports_evictions = True
    pool.grow("z", 12)
    assert [block_hash for _, block_hash in pool.take_evicted()] == [b"b1", b"a1", b"a0"]
    assert pool.take_evicted() == []
    assert (pool.num_evictions, pool.match([b"b0"])) == (3, [3])
    pool.check_integrity()


def test_evictions_are_kept_only_if_somebody_asks_for_them():
    """Nothing grows without bound."""
    pool = cached_pool(num_blocks=3, released=("a",))
    pool.grow("b", 8)
    assert (pool.take_evicted(), pool.num_evictions, pool.num_cached) == ([], 2, 0)


def test_a_hash_belongs_to_one_block_and_a_block_has_one_hash():
    """Two requests that computed the same at once: the second one's block is like any other."""
    pool = cached_pool(holders=("a", "b"))
    again, free = pool.table("b")[0], pool.grow("c", 4)[0]
    pool.set_hash(free, b"a0")
    pool.set_hash(again, b"other")
    assert (pool.match([b"a0"]), pool.match([b"other"])) == ([pool.table("a")[0]], [])
    assert sorted(block_hash for _, block_hash in pool.cached_blocks()) == [b"a0", b"a1", b"b0", b"b1"]
    pool.check_integrity()


@pytest.mark.parametrize("released", [(), ("a",)])
def test_dropped_hashes_are_not_found_and_no_block_is_lost(released):
    """Held or free; all of them, or some."""
    pool = cached_pool(holders=("a", "b"), released=released)
    pool.drop_hashes(pool.match([b"a0"]))
    assert (pool.match([b"a0"]), pool.num_cached) == ([], 3)
    pool.drop_all_hashes()
    assert (pool.match([b"b0"]), pool.num_cached) == ([], 0)
    pool.release("b")
    pool.check_integrity()
    assert len(pool.grow("all", 20 - 4 * len(pool.table("a")))) == 5 - len(pool.table("a"))


def test_only_those_who_begin_can_share():
    """A table that has blocks has its beginning already."""
    pool = cached_pool(holders=("a", "b"))
    with pytest.raises(ProtocolError, match="b holds blocks already"):
        pool.share("b", pool.match([b"a0"]))
    pool.share("b", [])


@pytest.mark.parametrize(
    "damage",
    [
        lambda pool: pool._num_holders.__setitem__(pool.table("a")[0], 2),
        lambda pool: pool._hashes.clear(),
        lambda pool: pool._by_hash.clear(),
        lambda pool: pool._idle.__setitem__(pool._free.pop(), None),
        lambda pool: pool._tables["a"].append(pool._tables["a"][0]),
    ],
    ids=["count", "hashes", "index", "idle without a hash", "twice in a table"],
)
def test_the_integrity_check_finds_what_is_counted_or_named_wrongly(damage):
    """Each of them would be another request's KV, sooner or later."""
    pool = cached_pool()
    damage(pool)
    with pytest.raises(ProtocolError, match="the block pool is inconsistent"):
        pool.check_integrity()
