"""Both halves of a step as one message, at the worker: they are two all the same."""

from __future__ import annotations

import pytest

from aexec.errors import StepStateError
from aexec.messages.control import Ping, Shutdown
from aexec.messages.process import Ended
from aexec.messages.step import PairedStep, StepResult
from aexec.testing.workers import ProbeError
from aexec.worker.remote import rebuild


async def read_log_beside(worker):
    """What the main thread has done by now."""
    return worker.read_log()


def send(driver, step):
    """Both halves of a step: the calls of its launch and of its sampling."""
    driver.calls += 1
    sampling = driver.calls
    return driver.send(PairedStep(step, sampling)), sampling


def test_a_launch_is_not_answered_and_its_sampling_is(driver):
    """Under its own call, in order with what came before and behind."""
    before = driver.call("note", "before")
    step = driver.step()
    launch, sampling = send(driver, step)
    behind = driver.call("read_log")
    result = driver.value(sampling)
    assert isinstance(result, StepResult)
    assert (result.step, result.output[0]) == (step.step, step.step)
    log = [entry if isinstance(entry, str) else tuple(entry) for entry in driver.value(behind)]
    assert log == ["before", ("execute", step.step), ("executed", step.step), ("sample", step.step)]
    answered = [frame.call for frame in driver.heard["work"]]
    assert answered[-3:] == [before, sampling, behind]
    assert launch not in answered


def test_a_forward_pass_that_fails_is_the_samplings_error(driver):
    """As it is when they come one after the other."""
    _, sampling = send(driver, driver.step(fail="no good"))
    error = rebuild(driver.failure(sampling))
    assert isinstance(error, ProbeError)
    assert "no good" in str(error)
    _, sampling = send(driver, driver.step())
    assert driver.value(sampling).step == driver.steps


def test_a_step_that_is_refused_has_two_answers(driver):
    """One to each half, so that nobody waits for the other."""
    step = driver.step()
    driver.value(send(driver, step)[1])
    launch, sampling = send(driver, step)
    for call in (launch, sampling):
        failure = driver.failure(call)
        assert isinstance(failure, StepStateError)


def test_a_sampling_that_has_come_along_is_queued(driver):
    """While the forward pass runs, as one that waits on the line; and no longer."""
    step = driver.step(seconds=0.3)
    _, sampling = send(driver, step)
    pong = driver.reaches("execute_model")
    assert (pong.step, pong.queued) == (step.step, 1)
    driver.value(sampling)
    assert driver.ask(Ping()).queued == 0


def test_async_methods_wait_for_both_halves(start):
    """A step counts as two messages, however it came."""
    driver = start()
    _, sampling = send(driver, driver.step(seconds=0.2))
    waiting = driver.call(read_log_beside, line="control", after=2)
    log = [tuple(entry) for entry in driver.value(waiting, "control")]
    assert log[-3:] == [("execute", 1), ("executed", 1), ("sample", 1)]
    assert driver.value(sampling).step == 1


def test_a_shutdown_during_the_forward_pass_is_the_end_of_the_step(start):
    """What was queued behind the running work never runs, its sampling neither."""
    driver = start()
    _, sampling = send(driver, driver.step(seconds=0.3))
    driver.reaches("execute_model")
    assert driver.ask(Shutdown(10.0)) is True
    assert driver.ends() == 0
    assert sampling not in [frame.call for frame in driver.heard["work"]]


@pytest.mark.parametrize("code", [0, 3])
def test_an_exit_in_the_forward_pass_is_told_with_its_step(start, code):
    """And nothing of it is sampled."""
    driver = start()
    step = driver.step(exit=code)
    send(driver, step)
    ended = driver.event(Ended)
    assert (ended.exit_code, ended.phase, ended.step) == (code, "execute_model", step.step)
    assert driver.ends() == code
