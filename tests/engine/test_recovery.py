"""What a lost worker group means: pure decisions, without a group."""

from __future__ import annotations

import pickle

import pytest

from aexec.engine.recovery import Fate, Recovery, fate_of
from aexec.engine.suspects import STRIKES, Suspects
from aexec.errors import (
    EngineDraining,
    EngineRecovering,
    ExecutorPaused,
    ExecutorUnavailable,
    PeerLost,
    RequestFailed,
    StepStateError,
    WorkerDied,
)
from aexec.executor.lifecycle import ExecutorState

DEATH = WorkerDied(1, 4711, signal="SIGKILL", phase="sample_tokens", stderr_tail="so long")


@pytest.mark.parametrize(
    ("error", "state", "is_new", "fate"),
    [
        (DEATH, ExecutorState.DOWN, False, Fate.WAIT),
        (DEATH, ExecutorState.DOWN, True, Fate.WAIT),
        (DEATH, ExecutorState.STARTING, False, Fate.WAIT),
        (DEATH, ExecutorState.READY, True, Fate.REBUILT),
        (DEATH, ExecutorState.READY, False, Fate.OWN),
        (DEATH, ExecutorState.FAILED, False, Fate.ALL),
        (DEATH, ExecutorState.FAILED, True, Fate.ALL),
        (DEATH, ExecutorState.CLOSED, False, Fate.ALL),
        (None, ExecutorState.DOWN, False, Fate.WAIT),
        (None, ExecutorState.READY, True, Fate.REBUILT),
        (StepStateError(3, "is unknown"), ExecutorState.READY, False, Fate.OWN),
        (StepStateError(3, "is unknown"), ExecutorState.READY, True, Fate.REBUILT),
        (ExecutorUnavailable("restarted"), ExecutorState.READY, True, Fate.REBUILT),
        (ExecutorPaused("aborted"), ExecutorState.READY, False, Fate.AGAIN),
        (ExecutorPaused("aborted"), ExecutorState.DOWN, False, Fate.WAIT),
        (ValueError("nan"), ExecutorState.READY, False, Fate.OWN),
        (PeerLost(1, 0, "receive"), ExecutorState.READY, False, Fate.UNSURE),
        (PeerLost(1, 0, "receive"), ExecutorState.READY, True, Fate.REBUILT),
        (PeerLost(1, 0, "receive"), ExecutorState.DOWN, False, Fate.WAIT),
        (ValueError("nan"), ExecutorState.DRAINING, False, Fate.ALL),
    ],
)
def test_the_executors_state_decides_more_than_the_error(error, state, is_new, fate):
    """Whatever a step says that was in flight when the group was lost, the loss explains it."""
    assert fate_of(error, state, is_new_generation=is_new) is fate


def test_an_outage_is_measured_from_the_loss_to_the_new_group():
    """What was lost is counted once; the longest outage and the sum of all are kept."""
    recovery = Recovery(1, timeout=None)
    outage = recovery.lose("rank 1 died\nits last words", {7: {"a", "b"}, 8: {"c"}}, now=10.0)
    assert (outage.number, outage.reason, outage.lost_steps, outage.condemned) == (1, "rank 1 died", (7, 8), None)
    assert not recovery.is_up
    assert recovery.statistics().state == "down"
    assert recovery.restore(2, now=12.5) == 2.5
    assert recovery.is_up
    recovery.lose("again", {}, now=20.0)
    recovery.restore(3, now=21.0)
    recovery.recomputes(300)
    figures = recovery.statistics()
    assert (figures.num_outages, figures.num_lost_steps, figures.num_recomputed_tokens) == (2, 2, 300)
    assert (figures.seconds_down, figures.longest_outage, recovery.generation) == (3.5, 2.5, 3)


def test_who_may_not_wait_is_told_when_to_come_again():
    """The guess is what the last outage took, less what this one has taken, and a second at least."""
    recovery = Recovery(1, timeout=30.0)
    recovery.lose("rank 1 died", {}, now=0.0)
    assert recovery.refusal("the queue is full", now=1.0).retry_after == 4.0
    recovery.restore(2, now=12.0)
    recovery.lose("rank 1 died", {}, now=20.0)
    error = recovery.refusal("the queue is full", now=25.0)
    assert str(error) == "the engine recovers: rank 1 died; the queue is full; retry after 7 s"
    assert recovery.refusal("", now=100.0).retry_after == 1.0


@pytest.mark.parametrize("kind", [EngineRecovering, EngineDraining])
def test_what_may_be_tried_again_is_caught_by_one_name(kind):
    """A server answers 503 to ``ExecutorUnavailable``, with its ``retry_after``; it pickles."""
    error = pickle.loads(pickle.dumps(kind("rank 1 died", 2.0)))
    assert isinstance(error, ExecutorUnavailable)
    assert (error.reason, error.retry_after, type(error)) == ("rank 1 died", 2.0, kind)


def test_a_failure_is_for_good():
    """Nothing brings the workers back."""
    recovery = Recovery(1, timeout=None)
    recovery.lose("rank 1 died", {3: {"a"}}, now=0.0)
    recovery.fail(DEATH)
    assert (recovery.is_up, recovery.failure, recovery.statistics().state) == (False, DEATH, "failed")
    assert repr(recovery) == "<Recovery: failed, 1 outage>"


@pytest.mark.parametrize(("given", "lost"), [(True, True), (False, False)])
def test_weights_that_were_given_do_not_survive_a_restart(given, lost):
    """Those of the model's files do; whoever gives them again is believed."""
    recovery = Recovery(1, timeout=None)
    recovery.have_weights(1, given=given)
    recovery.lose("rank 1 died", {}, now=0.0)
    recovery.restore(2, now=1.0)
    assert recovery.weights_are_lost is lost
    recovery.have_weights(2, given=True)
    assert not recovery.weights_are_lost
    recovery.have_weights(1, given=given)  # of workers that are lost by now
    assert recovery.weights_are_lost is lost


def test_a_request_that_gets_on_is_innocent():
    """A strike for each crash in a row, and none after a token."""
    suspects = Suspects()
    for _ in range(5):
        assert suspects.accuse([{"a"}]) is None
        assert suspects.alone is None
        suspects.clear("a")
    assert not suspects


def test_the_request_that_does_it_is_found():
    """Two crashes make suspects of all that were there; the one that is alone in the third is condemned."""
    suspects = Suspects()
    for _ in range(STRIKES):
        assert suspects.accuse([["a", "poison"], ["b"]]) is None
    assert (len(suspects), suspects.alone) == (3, "a")
    suspects.clear("a")
    assert suspects.alone == "poison"
    assert suspects.accuse([["poison"]]) == "poison"
    assert (suspects.alone, suspects.num_condemned) == ("b", 1)
    suspects.clear("b")
    assert not suspects


def test_nobody_is_condemned_who_was_not_alone():
    """Company, or a step that nobody was in, proves nothing."""
    suspects = Suspects()
    for _ in range(STRIKES + 2):
        assert suspects.accuse([["a"], ["b"]]) is None
        assert suspects.accuse([]) is None
    assert suspects.alone == "a"


def test_a_sentence_says_what_was_seen():
    """The request's reader reads why it was his."""
    recovery = Recovery(1, timeout=None)
    recovery.lose("rank 1 died", {3: ["a"]}, now=0.0)
    error = recovery.sentence("a")
    assert isinstance(error, RequestFailed)
    assert "went down 3 times in a row" in str(error)
    assert "rank 1 died" in str(error)
