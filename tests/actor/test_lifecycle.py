from __future__ import annotations

import pickle

import pytest

from aexec.actor.lifecycle import ALIVE, OVER, TRANSITIONS, Exit, LifecycleEvent, LifecycleState
from aexec.errors import ActorDied, ActorStopped


def test_every_state_has_a_row():
    """The table says of each state what can follow."""
    assert set(TRANSITIONS) == set(LifecycleState)


def test_every_life_comes_to_an_end():
    """From each state that is not final, a final one is reached."""
    for start in LifecycleState:
        reached, seen = {start}, set()
        while reached:
            seen |= reached
            reached = {after for state in reached for after in TRANSITIONS[state].values()} - seen
        assert seen & OVER


def test_an_end_is_final():
    """No event leads out of stopped or dead, and neither is alive."""
    assert {LifecycleState.STOPPED, LifecycleState.DEAD} == OVER
    assert not ALIVE & OVER


def test_a_failure_cannot_be_turned_into_a_stop():
    """Once it fails, an actor ends as dead, whoever stops it meanwhile."""
    assert LifecycleEvent.STOP not in TRANSITIONS[LifecycleState.FAILING]
    assert TRANSITIONS[LifecycleState.STOPPING][LifecycleEvent.FAIL] is LifecycleState.FAILING


@pytest.mark.parametrize(("kind", "error"), [("stopped", ActorStopped), ("failed", ActorDied), ("killed", ActorDied)])
def test_an_exit_makes_the_error_of_its_kind(kind, error):
    """Waiters of a stopped actor get ActorStopped, all others ActorDied; both pickle and name their cause."""
    cause = ValueError("no")
    raised = Exit(kind, "because", cause).as_error("worker-3")
    assert type(raised) is error
    assert raised.__cause__ is cause
    assert str(pickle.loads(pickle.dumps(raised))) == "actor worker-3 is dead: because"
