from __future__ import annotations

import math

import pytest

from aexec.errors import ConfigError
from aexec.executor.gate import Held, StepGate, check_pause_mode, default_limit
from aexec.messages.step import ExecuteModel


class Nobody:
    def resolve(self, value):
        raise AssertionError(value)

    def fail(self, error):
        raise AssertionError(error)


@pytest.fixture
def gate() -> StepGate:
    return StepGate(2, 10.0)


def line_up(gate, step, now=0.0):
    held = Held(ExecuteModel(step), Nobody(), now=now, until=None)
    gate.line_up(held, now)
    return held


def go(gate):
    """Those that may go, as steps in flight."""
    return [gate.take_off(held.message.step, is_whole=False) for held in gate.admit()]


def steps(flights):
    return [flight and flight.step for flight in flights]


def test_steps_beyond_the_bound_wait_in_the_order_in_which_they_came(gate):
    """G43: a place that is free goes to the one that has waited longest."""
    for step in (1, 2, 3, 4):
        line_up(gate, step)
    first, second = go(gate)
    assert steps([first, second]) == [1, 2]
    assert go(gate) == []
    gate.land(second)
    assert steps(go(gate)) == [3]
    assert repr(gate) == "<StepGate: 2/2 steps in flight, 1 waiting>"
    assert gate.in_the_way().startswith("2 of 2 steps are in flight (ExecutorConfig.max_concurrent_steps): 1, 3;")


def test_a_step_that_is_withdrawn_never_goes(gate):
    """One that has gone cannot be withdrawn."""
    held = [line_up(gate, step) for step in (1, 2, 3, 4)]
    go(gate)
    assert gate.withdraw(held[2])
    assert not gate.withdraw(held[2])
    assert not gate.withdraw(held[0])
    gate.land(gate.flying[1])
    assert steps(go(gate)) == [4]


@pytest.mark.parametrize("order", [(1, 2), (2, 1)])
def test_steps_that_could_not_be_sent_may_come_again(gate, order):
    """No rank has seen their ids, in whichever order it turns out."""
    for step in (1, 2):
        line_up(gate, step)
    flights = dict(zip((1, 2), go(gate), strict=True))
    for step in order:
        gate.take_back(flights[step])
    line_up(gate, 1)
    assert steps(go(gate)) == [1]


def test_a_step_that_was_overtaken_when_it_could_not_be_sent_is_too_late(gate):
    """The ranks have seen a later one."""
    for step in (1, 2):
        line_up(gate, step)
    gate.take_back(go(gate)[0])
    line_up(gate, 1)
    assert steps(go(gate)) == [None]


def test_a_step_whose_id_does_not_increase_takes_no_place(gate):
    """The ranks will refuse it; the step of that id keeps its own."""
    for step in (5, 5, 4):
        line_up(gate, step)
    flights = go(gate)
    assert steps(flights) == [5, None]
    assert steps(go(gate)) == [None]
    assert list(gate.flying) == [5]


def test_landing_twice_frees_one_place(gate):
    """A step of the generation before does not free the place of its namesake."""
    line_up(gate, 1)
    (old,) = go(gate)
    gate.clear()
    line_up(gate, 1)
    (new,) = go(gate)
    gate.land(old)
    assert gate.flying == {1: new}


def test_no_step_goes_while_it_is_paused_and_no_clock_runs(gate):
    """G56: the limit of a step counts from the resume."""
    waiting = [line_up(gate, step) for step in (1, 2, 3)]
    go(gate)
    gate.pause("keep")
    late = line_up(gate, 4, now=5.0)
    gate.land(gate.flying[1])
    assert go(gate) == []
    assert {waiting[2].expires, late.expires, gate.next_wake()} == {math.inf}
    assert repr(gate).endswith("paused (keep)>")
    gate.resume(20.0)
    assert gate.next_wake() == 30.0
    assert steps(go(gate)) == [3]


def test_a_wait_for_a_place_has_the_limit_of_a_step(gate):
    """And then it is over."""
    for step in (1, 2, 3):
        line_up(gate, step)
    go(gate)
    assert gate.due(9.9) == []
    assert [held.message.step for held in gate.due(10.0)] == [3]
    assert not gate.waiting
    assert gate.next_wake() == math.inf


def test_without_a_limit_of_time_steps_wait_for_ever():
    """None in words means no limit."""
    gate = StepGate(1, None)
    assert line_up(gate, 1).expires == math.inf


def test_the_steps_that_pauses_have_ended_are_remembered_up_to_a_bound():
    """The latest, as many as can be in flight: nobody asks for the others."""
    gate = StepGate(2, None)
    gate.aborted |= {11, 9, 10}
    gate.forget_aborted()
    assert gate.aborted == {10, 11}


def test_when_the_ranks_are_gone_all_is_forgotten(gate):
    """Ids may begin anew; those that waited are handed out to be told."""
    for step in (1, 2, 3):
        line_up(gate, step)
    go(gate)
    gate.aborted.add(2)
    assert [held.message.step for held in gate.clear()] == [3]
    assert (gate.flying, list(gate.waiting), gate.aborted) == ({}, [], set())
    line_up(gate, 1)
    assert steps(go(gate)) == [1]


def test_the_bound_follows_the_pipeline():
    """At least one for each stage, and one to plan ahead."""
    assert [default_limit(depth) for depth in (1, 4, 16)] == [8, 8, 17]


def test_pause_modes_are_three():
    """Another one is refused with its choices."""
    assert [check_pause_mode(mode) for mode in ("abort", "finish", "keep")] == ["abort", "finish", "keep"]
    with pytest.raises(ConfigError, match="mode of pause is 'wait': expected one of 'abort', 'finish', 'keep'"):
        check_pause_mode("wait")
