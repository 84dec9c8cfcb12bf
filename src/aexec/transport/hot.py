"""Polling for answers on an event loop, for a moment after something was asked."""

from __future__ import annotations

import asyncio
import time

from aexec.transport.spin import SpinPolicy

__all__ = ("HotWindow",)


class HotWindow:
    """Keeps a loop awake for a moment while answers are about to come.

    It does so with a timer that is always due, so that everything else on the loop has its
    turn, answers that are there before all, and yields the CPU each time. It is used while
    recent answers came within the window, and costs nothing at other times. What is asked
    within a window of the first is one wait, which ends with the last answer.

    Args:
        window: Seconds; 0: never.
    """

    def __init__(self, window: float) -> None:
        self._policy = SpinPolicy(window)
        self._missing = 0  # of what was asked in this wait
        self._asked = 0.0  # when it began
        self._until = 0.0  # when its turns end
        self._turning = False

    def __repr__(self) -> str:
        return f"<HotWindow: {self._missing} answers missing, {self._policy!r}>"

    def asked(self) -> None:
        """A message was sent that will be answered; on the loop."""
        limit = self._policy.limit
        if not limit:
            return
        now = time.perf_counter()
        if self._missing:
            if now - self._asked < limit:
                self._missing += 1
                return
            self._policy.waited(now - self._asked)  # for longer than is polled: what else is missing is not waited for
        self._asked, self._missing = now, 1
        budget = self._policy.budget()
        self._until = now + budget
        if budget and not self._turning:
            self._again()

    def unanswered(self, count: int) -> None:
        """So many of the messages that were sent last will have no answer."""
        self._missing = max(self._missing - count, 0)

    def answered(self) -> None:
        """An answer came."""
        if self._missing:
            self._missing -= 1
            if not self._missing:
                self._policy.waited(time.perf_counter() - self._asked)

    def _turn(self) -> None:
        now = time.perf_counter()
        self._turning = bool(self._missing) and now < self._until
        if self._turning:
            self._policy.give_way(now)
            self._again()

    def _again(self) -> None:
        """Take a turn, once all that is to be sent has been, and behind the answers that are there by then."""
        self._turning = True
        asyncio.get_running_loop().call_at(0.0, self._turn)  # call_soon() would come before what select() finds
