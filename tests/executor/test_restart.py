from __future__ import annotations

from aexec.config import Restart
from aexec.executor.restart import RestartBudget


def test_without_a_policy_nothing_is_restarted():
    """And the verdict says which setting decided that."""
    budget = RestartBudget(None)
    assert budget.spend(0.0) is None
    assert budget.verdict() == 'the failure is final: on_failure is "fail"'


def test_so_many_restarts_fit_into_the_window():
    """G67: one more within it is final, and says so."""
    budget = RestartBudget(Restart(max_restarts=2, within=60.0, backoff=0.0))
    assert [budget.spend(now) is None for now in (0.0, 1.0, 2.0)] == [False, False, True]
    assert "the 2 restarts allowed within 60 s are used up" in budget.verdict()
    assert repr(budget) == "<RestartBudget: 2/2 spent>"
    alone = RestartBudget(Restart(max_restarts=1, within=60.0))
    assert "the one restart allowed within 60 s is used up" in alone.verdict()


def test_restarts_leave_the_window_with_time():
    """A failure now and then is forgiven for ever."""
    budget = RestartBudget(Restart(max_restarts=1, within=10.0, backoff=0.0))
    assert all(budget.spend(now) is not None for now in (0.0, 11.0, 22.0))


def test_the_wait_doubles_with_each_restart():
    """Within its jitter of a quarter of the first."""
    budget = RestartBudget(Restart(max_restarts=4, within=60.0, backoff=1.0))
    delays = [budget.spend(0.0) for _ in range(4)]
    assert all(full <= delay <= full + 0.25 for full, delay in zip((1.0, 2.0, 4.0, 8.0), delays, strict=True))
