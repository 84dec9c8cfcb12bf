from __future__ import annotations

import pytest

from aexec.errors import ExecutorClosed, ExecutorUnavailable, ProtocolError
from aexec.executor.lifecycle import TRANSITIONS, ExecutorEvent, ExecutorState, advance, refusal


def test_every_state_can_be_closed_but_those_that_are():
    """close() is possible at any time."""
    closable = {state for state, events in TRANSITIONS.items() if ExecutorEvent.CLOSE in events}
    assert closable == set(ExecutorState) - {ExecutorState.CLOSING, ExecutorState.CLOSED}


def test_every_state_can_be_reached():
    """The table has no dead rows."""
    reached = {ExecutorState.STARTING} | {after for events in TRANSITIONS.values() for after in events.values()}
    assert reached == set(ExecutorState)


def test_what_cannot_happen_is_a_fault_of_ours():
    """And says in which state what was told."""
    with pytest.raises(ProtocolError, match="an executor that is closed was told: all ranks are ready"):
        advance(ExecutorState.CLOSED, ExecutorEvent.STARTED)


def test_calls_are_refused_by_state():
    """While down it is worth a retry, once closed it is not."""
    assert refusal(ExecutorState.READY) is None
    down = refusal(ExecutorState.DOWN, "rank 1 died", 0.5)
    assert isinstance(down, ExecutorUnavailable)
    assert str(down) == "the executor is not available: rank 1 died; retry after 0.5 s"
    assert isinstance(refusal(ExecutorState.STARTING), ExecutorUnavailable)
    assert isinstance(refusal(ExecutorState.CLOSING), ExecutorClosed)
    assert isinstance(refusal(ExecutorState.CLOSED), ExecutorClosed)
