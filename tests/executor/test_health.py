from __future__ import annotations

from aexec.executor.health import judge, report
from aexec.messages.control import Pong


def pong(phase="idle", age=0.0):
    return Pong(rank=0, phase=phase, step=3, age=age)


def judged(pong, *, dead=False, stuck_after=10.0):
    return judge(0, pong, dead=dead, waited=1.0, stuck_after=stuck_after).state


def test_a_rank_that_answers_is_alive():
    """However long it has been idle."""
    assert judged(pong()) == "alive"
    assert judged(pong(age=1e6)) == "alive"
    assert judged(pong("execute_model", age=9.0)) == "alive"


def test_a_rank_that_gives_no_answer_is_stuck():
    """Its age is the time it was given."""
    health = judge(0, None, dead=False, waited=1.0, stuck_after=10.0)
    assert (health.state, health.phase, health.age) == ("stuck", "gives no answer", 1.0)


def test_a_call_past_the_step_limit_is_stuck():
    """The process answers, its compute thread hangs."""
    assert judged(pong("execute_model", age=11.0)) == "stuck"
    assert judged(pong("execute_model", age=11.0), stuck_after=None) == "alive"


def test_a_rank_that_ended_is_dead():
    """Whatever it said before."""
    assert judged(pong(), dead=True) == "dead"


def test_the_group_is_as_healthy_as_its_worst_rank():
    """And the report is its own truth value."""
    assert report(1, 2, {0: pong(), 1: pong()}, frozenset(), waited=1.0, stuck_after=None)
    assert not report(1, 2, {0: pong()}, frozenset(), waited=1.0, stuck_after=None)
