"""Whether ranks make the same calls: the comparison itself, without a line."""

from __future__ import annotations

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aexec.errors import RanksDiverged
from aexec.executor.external.lockstep import MOST_AHEAD, Gathering, Lockstep, result_of
from aexec.messages.peers import Called


def said(what, step=None):
    return Called(str(what).encode(), f"{what}()", step)


def step(number):
    return said(f"step {number}", number)


def play(ranks, calls):
    """The lockstep after ``calls``: pairs of rank and what it calls."""
    lockstep = Lockstep(range(ranks))
    for rank, what in calls:
        lockstep.called(rank, what)
    return lockstep


def test_a_turn_is_through_when_the_last_rank_has_made_its_call():
    """Two of three are not enough."""
    lockstep = Lockstep(range(3))
    assert lockstep.called(2, said("a")) is None
    assert lockstep.called(0, said("a")) is None
    assert lockstep.agreed == 0
    assert lockstep.called(1, said("a")) == dict.fromkeys((2, 0, 1), said("a"))
    assert (lockstep.agreed, lockstep.num_open) == (1, 0)


@given(st.integers(1, 4), st.lists(st.integers(0, 2), max_size=12), st.randoms())
def test_equal_sequences_always_agree_in_order(ranks, calls, random):
    """Whatever the interleaving, each turn is through exactly once, in order, when its last rank has come."""
    lockstep = Lockstep(range(ranks))
    positions = dict.fromkeys(range(ranks), 0)
    while unfinished := [rank for rank in positions if positions[rank] < len(calls)]:
        rank = random.choice(unfinished)
        before = lockstep.agreed
        turn = lockstep.called(rank, said(calls[positions[rank]]))
        positions[rank] += 1
        assert lockstep.agreed == min(positions.values())
        assert (turn is not None) == (lockstep.agreed == before + 1)
    assert lockstep.agreed == len(calls)
    assert not lockstep.in_doubt


@given(st.integers(2, 4), st.lists(st.integers(0, 5), min_size=1, max_size=8), st.data())
def test_one_different_call_is_found_at_its_number(ranks, calls, data):
    """A rank that changes one call is found at that call, once all have come to it, and nothing after it agrees."""
    odd = data.draw(st.integers(0, ranks - 1))
    at = data.draw(st.integers(0, len(calls) - 1))
    lockstep = Lockstep(range(ranks))
    for number, what in enumerate(calls):
        for rank in range(ranks):
            lockstep.called(rank, said("other" if (rank, number) == (odd, at) else what))
    assert lockstep.agreed == at
    error = lockstep.verdict()
    assert error.call == at + 1
    assert error.rank == (odd if ranks > 2 else 1)
    assert set(error.asked) == set(range(ranks))


def test_another_argument_names_the_rank_and_what_each_asked_for():
    """G53: rank 1 sends another argument; the error says which rank, which call, and both sides."""
    error = play(3, [(0, said("add(1)")), (1, said("add(2)")), (2, said("add(1)"))]).verdict()
    assert (error.rank, error.call, error.step) == (1, 1, None)
    assert str(error) == (
        "rank 1 does not ask for what the others ask for (call 1): ranks 0, 2 asked for add(1)(); rank 1 asked for "
        "add(2)(); all ranks have to make the same calls with the same arguments in the same order"
    )
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


def test_a_skipped_step_names_rank_and_step():
    """G54: one rank skips step 7: the drift is an error that names the rank and the step."""
    calls = [(rank, step(6)) for rank in range(2)]
    error = play(2, [*calls, (0, step(7)), (1, step(8))]).verdict()
    assert (error.rank, error.call, error.step) == (1, 2, 7)
    assert "rank 1 is at step 8 where step 7 is due" in str(error)


def test_a_call_that_the_others_make_later_was_skipped_to():
    """A rank that leaves out a call asks for what the others ask for next."""
    error = play(2, [(0, said("a")), (0, said("b")), (1, said("b"))]).verdict()
    assert "rank 1 has skipped 1 call" in str(error)


def test_a_difference_is_in_doubt_until_all_have_come():
    """Of four, two that differ may be either; the other two decide who is the odd one."""
    lockstep = play(4, [(0, said("x")), (1, said("a"))])
    assert lockstep.in_doubt
    assert not lockstep.is_clear
    assert lockstep.verdict().asked[3] == "has not come to it"
    lockstep.called(2, said("a"))
    lockstep.called(3, said("a"))
    assert lockstep.is_clear
    assert lockstep.verdict().rank == 0


def test_a_rank_that_never_comes_is_named_when_others_are_too_far_ahead():
    """What is kept has a bound, and the slow rank is named when it is reached."""
    lockstep = Lockstep(range(2), most_ahead=3)
    for number in range(3):
        lockstep.called(0, said(number))
    with pytest.raises(RanksDiverged, match=r"rank 1 is 3 calls behind rank 0 \(call 1\)") as caught:
        lockstep.called(0, said(3))
    assert caught.value.asked == {0: "was last at call 3: 2()", 1: "has made no call yet"}
    assert MOST_AHEAD > 3


def test_where_a_rank_is_can_be_said():
    """For whoever waits for it in vain."""
    lockstep = play(2, [(0, said("a")), (0, said("b"))])
    assert (lockstep.position(0), lockstep.position(1)) == ("call 2: b()", "has made no call yet")
    assert repr(lockstep) == "<Lockstep: 0 agreed, 2 open, made {0: 2, 1: 0}>"


@given(st.integers(1, 4), st.integers(1, 5), st.randoms())
def test_what_ranks_bring_is_gathered_round_by_round(ranks, rounds, random):
    """Each round ends once with what every rank brought to it, in rank order."""
    gathering = Gathering(range(ranks))
    for number in range(1, rounds + 1):
        order = random.sample(range(ranks), ranks)
        whole = [gathering.bring(rank, (number, rank)) for rank in order]
        assert whole[:-1] == [None] * (ranks - 1)
        assert whole[-1] == [(number, rank) for rank in range(ranks)]
    assert (gathering.round, gathering.missing) == (rounds + 1, list(range(ranks)))


def test_nobody_comes_to_a_round_twice():
    """That would be two rounds in one."""
    gathering = Gathering(range(2))
    gathering.bring(1, "a")
    with pytest.raises(ValueError, match="rank 1 comes to round 1 for the second time"):
        gathering.bring(1, "b")


@given(st.lists(st.lists(st.sampled_from("abcdef"), unique=True), min_size=1, max_size=4))
def test_common_keys_are_those_of_all_in_the_order_of_the_first(keys):
    """Whatever the others' order; of each other key it is told who lacks it."""
    found, lacking = result_of(keys)
    assert set(found) == set.intersection(*map(set, keys))
    assert found == [key for key in keys[0] if key in set(found)]
    assert set(lacking) == set().union(*keys) - set(found)
    for key, ranks in lacking.items():
        assert ranks == [rank for rank, said in enumerate(keys) if key not in said]


def test_calls_that_read_the_same_are_said_to_differ():
    """A step of as many tokens, but of other ones, is no riddle."""
    error = play(2, [(0, Called(b"one", "step 5", 5)), (1, Called(b"other", "step 5", 5))]).verdict()
    assert error.asked == {0: "asked for step 5", 1: "asked for step 5 with something else in it"}
    assert "rank 1 asked for step 5 with something else in it" in str(error)
