from __future__ import annotations

import pickle

import pytest

from aexec.errors import StepStateError
from aexec.messages.step import StepState
from aexec.model.steps import StepTable


@pytest.fixture
def table() -> StepTable:
    return StepTable()


def test_a_step_goes_from_new_to_sampled(table):
    """The straight way through the table."""
    states = [table.state(1)]
    table.execute(1)
    states.append(table.state(1))
    table.forward_done(1)
    states.append(table.state(1))
    table.sample(1)
    states.append(table.state(1))
    assert states == [StepState.NEW, StepState.EXECUTING, StepState.EXECUTED, StepState.SAMPLED]


def test_a_step_may_be_sampled_while_its_forward_pass_runs(table):
    """SampleTokens need not wait for the device."""
    table.execute(1)
    table.sample(1)
    table.forward_done(1)
    assert table.state(1) is StepState.SAMPLED


def test_a_whole_step_has_nothing_to_sample(table):
    """Its result was its first reply, so that sampling it is sampling it twice."""
    table.execute(1, whole=True)
    with pytest.raises(StepStateError, match="step 1 was sampled already"):
        table.sample(1)


@pytest.mark.parametrize("ended", [False, True])
def test_a_step_id_is_used_once(table, ended):
    """A duplicate is refused, while the first is open and when it has ended."""
    table.execute(3)
    if ended:
        table.sample(3)
    with pytest.raises(StepStateError, match="step 3 was sent twice"):
        table.execute(3)


def test_step_ids_increase(table):
    """An id below the last one is refused, and the error names both."""
    table.execute(5)
    with pytest.raises(StepStateError, match=r"step 4 comes after step 5.*pending: 5"):
        table.execute(4)


def test_an_unknown_step_cannot_be_sampled(table):
    """The error names the steps that could be."""
    table.execute(7)
    table.execute(8)
    with pytest.raises(StepStateError, match=r"step 9 was never executed \(pending: 7, 8\)") as caught:
        table.sample(9)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_a_step_is_sampled_once(table):
    """The second time is refused."""
    table.execute(1)
    table.sample(1)
    with pytest.raises(StepStateError, match=r"step 1 was sampled already \(pending: none\)"):
        table.sample(1)


def test_a_dropped_step_tells_why(table):
    """Later messages for it are refused with the reason it was dropped for."""
    table.execute(1)
    table.drop(1, "its request was aborted")
    assert table.state(1) is StepState.DROPPED
    with pytest.raises(StepStateError, match="step 1 was dropped: its request was aborted"):
        table.sample(1)


def test_dropping_what_has_ended_changes_nothing(table):
    """An abort that comes too late is no error."""
    table.execute(1)
    table.sample(1)
    table.drop(1, "late")
    assert table.state(1) is StepState.SAMPLED


def test_pending_steps_keep_their_order(table):
    """A step whose forward pass has ended stays where it is in line."""
    for step in (1, 2, 3):
        table.execute(step)
    table.forward_done(1)
    assert table.pending == (1, 2, 3)
    assert repr(table) == "<StepTable: last 3, 1 executed, 2 executing, 3 executing>"


def test_ended_steps_are_forgotten_in_the_end(table):
    """The table is bounded, and a step from long ago is still refused."""
    for step in range(3000):
        table.execute(step)
        table.sample(step)
    with pytest.raises(StepStateError, match="step 5 ended long ago"):
        table.sample(5)
    with pytest.raises(StepStateError, match="step 5 comes after step 2999"):
        table.execute(5)
