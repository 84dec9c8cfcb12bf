from __future__ import annotations

from aexec.executor.lines.work import RankWork
from aexec.messages.control import CallMethod, Ping
from aexec.messages.step import ExecuteModel, SampleTokens, StepId


def call(number, method="echo"):
    return number, CallMethod(call=number, method=method)


def test_the_oldest_that_has_not_ended_is_the_phase():
    """What a rank does is the first that it was told of what it has not answered."""
    work = RankWork()
    assert work.phase == "idle"
    work.sent(*call(1, "load_model"))
    work.sent(*call(2, len))
    assert work.phase == "load_model"
    work.ended(1)
    assert work.phase == "len"
    work.ended(2)
    assert work.phase == "idle"


def test_a_forward_pass_goes_on_after_it_was_launched():
    """It is not answered until it is sampled: a rank that dies in it dies in execute_model, of that step."""
    work = RankWork()
    work.sent(1, ExecuteModel(StepId(7)))
    assert (work.phase, work.step) == ("execute_model", 7)
    work.sent(2, SampleTokens(StepId(7)))
    assert work.phase == "sample_tokens"
    work.ended(2)
    assert (work.phase, work.step) == ("idle", 7)


def test_a_failed_step_has_ended():
    """Whichever half of it failed."""
    work = RankWork()
    work.sent(1, ExecuteModel(StepId(1)))
    work.ended(1)
    assert work.phase == "idle"


def test_async_methods_are_beside_other_work():
    """They are the phase only where there is nothing else; questions about life never are."""
    work = RankWork()
    work.sent(*call(1, "wait"), beside=True)
    work.sent(2, Ping(), beside=True)
    assert work.phase == "wait"
    work.sent(*call(3, "echo"))
    assert work.phase == "echo"
    work.ended(3)
    work.ended(1)
    assert work.phase == "idle"


def test_plain_calls_are_counted():
    """A step that takes another road is told how many came before it; what is beside comes at any time."""
    work = RankWork()
    work.sent(*call(1))
    work.sent(*call(2), beside=True)
    work.sent(3, Ping(), beside=True)
    work.sent(4, ExecuteModel(StepId(1)))
    work.sent(*call(5))
    work.ended(1)
    assert work.calls == 2
