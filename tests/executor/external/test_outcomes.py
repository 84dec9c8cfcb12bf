"""What a rank may be told of its calls, and when."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aexec.executor.external.outcomes import MOST_HELD, Outcome, Outcomes, TooManyHeld


def test_a_reply_waits_until_all_have_made_its_call_alike():
    """Lockstep: nobody goes on with what another rank may not have asked for."""
    outcomes = Outcomes(check=True)
    outcomes.make((0, 1))
    reply = Outcome(1, 1, "one")
    assert outcomes.hear(reply) == []
    assert outcomes.num_held == 1
    assert outcomes.agree(1) == [reply]
    assert (outcomes.num_held, outcomes.num_open) == (0, 1)


def test_a_failure_waits_for_nobody_else():
    """G06: the first failure of any rank is told at once, whatever another rank is stuck in."""
    outcomes = Outcomes(check=True)
    outcomes.make((0, 1))
    failure = Outcome(1, 1, ValueError("no"), is_error=True)
    assert outcomes.hear(failure) == [failure]


@pytest.mark.parametrize("is_error", [False, True])
def test_nothing_is_told_of_a_call_that_this_rank_has_not_made(is_error):
    """It has no name for it yet."""
    outcomes = Outcomes(check=False)
    early = Outcome(1, 1, "early", is_error)
    assert outcomes.hear(early) == []
    assert outcomes.make((0, 1)) == [early]


def test_without_the_check_a_reply_is_told_at_once():
    """Others are not waited for."""
    outcomes = Outcomes(check=False)
    outcomes.make((0,))
    assert outcomes.hear(Outcome(1, 0, "mine")) == [Outcome(1, 0, "mine")]
    assert outcomes.num_open == 0


def test_too_many_early_answers_are_refused():
    """What is kept has a bound."""
    outcomes = Outcomes(check=False)
    for seq in range(1, MOST_HELD + 1):
        outcomes.hear(Outcome(seq, 1, None))
    with pytest.raises(TooManyHeld):
        outcomes.hear(Outcome(MOST_HELD + 1, 1, None))


def test_who_has_yet_to_answer_is_known():
    """For a rank that is through with them."""
    outcomes = Outcomes(check=False)
    outcomes.make((0, 1))
    outcomes.make((1,))
    outcomes.make(())
    outcomes.hear(Outcome(2, 1, None))
    assert (outcomes.waiting_for(1), outcomes.waiting_for(0)) == ([1], [1])


events = st.lists(st.tuples(st.sampled_from(["make", "agree", "reply", "fail"]), st.integers(1, 6), st.integers(0, 1)))


@given(st.booleans(), events)
def test_each_outcome_is_told_once_and_never_too_soon(check, order):
    """Whatever the order in which word of calls, agreement and outcomes comes (G05)."""
    outcomes, heard, told = Outcomes(check=check), [], []
    for what, seq, rank in order:
        if what == "make":
            now = outcomes.make((0, 1))
        elif what == "agree":
            now = outcomes.agree(min(seq, outcomes.made))
        else:
            heard.append(Outcome(seq, rank, len(heard), what == "fail"))
            now = outcomes.hear(heard[-1])
        for outcome in now:
            assert outcome.seq <= outcomes.made
            assert outcome.is_error or not check or outcome.seq <= outcomes.agreed
        told += now
    while outcomes.made < 6:
        told += outcomes.make((0, 1))
    told += outcomes.agree(6)
    assert sorted(outcome.value for outcome in told) == list(range(len(heard)))
    assert outcomes.num_held == 0
