"""How often, and how soon, a worker group may be rebuilt. Pure: time comes as an argument."""

from __future__ import annotations

from collections import deque

import tenacity

from aexec.config import Restart

__all__ = ("RestartBudget",)

_LONGEST = 60.0  # seconds between two attempts, however many went before


class RestartBudget:
    """Counts restarts within a sliding window.

    Args:
        policy: None: never restart.
    """

    def __init__(self, policy: Restart | None) -> None:
        self.policy = policy
        self._spent: deque[float] = deque(maxlen=policy.max_restarts if policy else 1)

    def __repr__(self) -> str:
        if self.policy is None:
            return "<RestartBudget: never>"
        return f"<RestartBudget: {len(self._spent)}/{self.policy.max_restarts} spent>"

    def spend(self, now: float) -> float | None:
        """Take one restart: seconds to wait before it, None if the budget is used up."""
        if self.policy is None:
            return None
        while self._spent and now - self._spent[0] > self.policy.within:
            self._spent.popleft()
        if len(self._spent) == self.policy.max_restarts:
            return None
        self._spent.append(now)
        return self._delay(len(self._spent), self.policy.backoff)

    def verdict(self) -> str:
        """Why the failure is final, for its note."""
        if self.policy is None:
            return 'the failure is final: on_failure is "fail"'
        most = self.policy.max_restarts
        allowed = "the one restart" if most == 1 else f"the {most} restarts"
        return (
            f"the failure is final: {allowed} allowed within {self.policy.within:g} s "
            f"{'is' if most == 1 else 'are'} used up (Restart.max_restarts, Restart.within)"
        )

    @staticmethod
    def _delay(attempt: int, backoff: float) -> float:
        wait = tenacity.wait_exponential(multiplier=backoff, max=_LONGEST) + tenacity.wait_random(0, backoff / 4)
        state = tenacity.RetryCallState(tenacity.Retrying(), fn=None, args=(), kwargs={})
        state.attempt_number = attempt
        return float(wait(state))
