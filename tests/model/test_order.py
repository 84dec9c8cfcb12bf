from __future__ import annotations

import pytest

from aexec.errors import StepStateError
from aexec.messages.step import ExecuteModel
from aexec.model.order import Sampling, StepBook


@pytest.fixture
def book():
    return StepBook()


def launch(book, step):
    """A step whose forward pass is through."""
    forward = book.execute(ExecuteModel(step), samples=True)
    book.forward_ended(step, None)
    return forward


def ask(book, step):
    ready = book.ask(Sampling(step, None, f"reply {step}", book.spend(step)))
    return [sampling.step for sampling in ready]


def test_samplings_run_in_step_order(book):
    """One that is asked for early waits for those of older steps."""
    for step in (1, 2, 3):
        launch(book, step)
    assert ask(book, 3) == []
    assert repr(book).endswith("1 samplings wait>")
    assert ask(book, 1) == [1]
    assert ask(book, 2) == [2, 3]


def test_a_failed_forward_pass_holds_up_nothing(book):
    """Its error is its sampling's; the step is dropped."""
    failed = launch(book, 1)
    launch(book, 2)
    assert ask(book, 2) == []
    failed.error = ValueError("no memory")
    book.forward_ended(1, failed.error)
    assert [sampling.step for sampling in book.take_ready()] == [2]
    assert book.spend(1) is failed
    with pytest.raises(StepStateError, match="was dropped: its execute_model raised ValueError"):
        book.spend(1)


@pytest.mark.parametrize(("tokens", "samples"), [(0, True), (None, False)])
def test_a_step_without_sampling_runs_whole(book, tokens, samples):
    """It has no tokens, or a runner that does not sample."""
    assert book.execute(ExecuteModel(1, None, tokens), samples=samples) is None
    assert book.ended(1, None, None) == "execute_model"


def test_an_error_of_a_sampling_is_told_to_whoever_asks_again(book):
    """By the phase that it was in."""
    forward = launch(book, 1)
    ask(book, 1)
    assert book.ended(1, forward, ValueError()) == "sample_tokens"
    with pytest.raises(StepStateError, match="its sample_tokens raised ValueError"):
        book.spend(1)


def test_dropped_steps_hold_up_nothing(book):
    """What was asked for may run; what was not is told why."""
    launch(book, 1)
    launch(book, 2)
    ask(book, 2)
    book.drop_all("the worker was shut down")
    assert [sampling.step for sampling in book.take_ready()] == [2]
    with pytest.raises(StepStateError, match="was dropped: the worker was shut down"):
        book.spend(1)


def test_steps_are_counted(book):
    """Accepted, ended and failed; those that wait."""
    for step in (1, 2, 3):
        forward = launch(book, step)
    ask(book, 1)
    book.ended(1, forward, None)
    assert tuple(book.statistics()) == (2, 3, 1, 0)
