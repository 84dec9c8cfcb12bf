"""Block hashes name a beginning, and the same one everywhere."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from aexec.engine.prefix import PrefixStatistics, extend_hashes, root_hash

TOKENS = st.lists(st.integers(0, 2**31 - 1), max_size=40)


def hashes_of(tokens, size=4, salt=""):
    hashes = []
    extend_hashes(hashes, root_hash(salt), tokens, size)
    return hashes


def test_hashes_are_the_same_in_every_process_and_on_every_platform():
    """What is kept elsewhere is found again after a restart: these bytes must never change."""
    assert [each.hex()[:16] for each in hashes_of(range(9))] == ["eb574cd9ba49b27f", "6a6c7f4526288f58"]
    assert root_hash("salt").hex()[:16] == "931ee5f8e40b24f2"


@given(tokens=TOKENS, others=TOKENS, size=st.integers(1, 8))
def test_equal_hashes_mean_equal_beginnings(tokens, others, size):
    """Two lists share exactly the hashes of the full blocks that they both begin with."""
    mine, theirs = hashes_of(tokens, size), hashes_of(others, size)
    assert len(mine) == len(tokens) // size
    for place, (one, other) in enumerate(zip(mine, theirs, strict=False), 1):
        assert (one == other) == (tokens[: place * size] == others[: place * size])


@given(tokens=TOKENS, cuts=st.lists(st.integers(0, 40), max_size=4))
def test_hashes_may_be_asked_for_bit_by_bit(tokens, cuts):
    """A request that grows has the hashes of one that came whole."""
    hashes = []
    for cut in [*sorted(cuts), len(tokens)]:
        extend_hashes(hashes, root_hash(), tokens[:cut], 4)
    assert hashes == hashes_of(tokens)


def test_another_salt_is_another_chain():
    """No block of one is a block of the other."""
    assert not {*hashes_of(range(40))} & {*hashes_of(range(40), salt="x")}


def test_the_hit_rate_counts_what_had_not_to_be_computed():
    """Also what a connector brings; nothing asked for is no hit."""
    assert PrefixStatistics().hit_rate == 0.0
    assert PrefixStatistics(num_queried_tokens=100, num_hit_tokens=20, num_loaded_tokens=5).hit_rate == 0.25
