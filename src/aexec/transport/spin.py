"""When a thread that waits for a frame may poll for it, and how long.

A thread that sleeps has to be woken: tens of microseconds, and once its CPU has slept too, all
that comes next runs at half its speed. One that polls gives its CPU to whoever wants it, each
time that it finds nothing; so it polls even where there are more processes than CPUs, but for a
bounded time, and only if the last waits were short enough that polling would have caught them.
Where somebody computes, who gives way gets the CPU back only after a slice of the scheduler's,
while a sleeper would be let in at once: there it sleeps. It polls the socket, never memory.
"""

from __future__ import annotations

import os
import time

__all__ = ("SpinPolicy", "affordable_spin")

WEIGHT = 0.25  # of the last wait in the mean
LONG = 50.0  # a wait counts as no longer than so many budgets, so that an idle night is soon forgotten
TAKEN = 5.0  # budgets: whoever was let in for so long computes; our own processes' turns at a small step are shorter
PAUSES = (16, 4096)  # waits without polling after that, at first and at most


def affordable_spin(spin: float, num_cpus: int | None = None) -> float:
    """``spin``, or 0 on a single CPU: there whoever polls only delays what he waits for.

    Args:
        spin: Seconds.
        num_cpus: That this process may use; None: ask the system.
    """
    if num_cpus is None:
        usable = getattr(os, "sched_getaffinity", None)
        num_cpus = len(usable(0)) if usable else os.cpu_count() or 1
    return spin if num_cpus > 1 else 0.0


class SpinPolicy:
    """Remembers how long the last waits were, and whether the CPU was to spare.

    Args:
        limit: Seconds that may be polled at once; 0: never.
    """

    def __init__(self, limit: float) -> None:
        self.limit = limit
        self._mean = LONG * limit
        self._paused, self._pause = 0, PAUSES[0]  # waits left without polling; how many there are the next time

    def __repr__(self) -> str:
        paused = f", does not poll for {self._paused} waits" if self._paused else ""
        return f"<SpinPolicy: {self.limit * 1e6:g} us, waits are {self._mean * 1e6:.3g} us{paused}>"

    def budget(self) -> float:
        """Seconds to poll now; asked for once in a wait."""
        if self._paused:
            self._paused -= 1
            return 0.0
        return self.limit if self._mean < self.limit else 0.0

    def waited(self, seconds: float) -> None:
        """What was waited for came after so long, or has not come for as long."""
        self._mean += (min(seconds, LONG * self.limit) - self._mean) * WEIGHT
        if self._pause > PAUSES[0] and not self._paused and seconds < self.limit:
            self._pause -= 1

    def give_way(self, now: float) -> float:
        """Let others have the CPU; the time when it is ours again.

        Args:
            now: ``time.perf_counter()``.
        """
        os.sched_yield()
        then = time.perf_counter()
        if then - now > TAKEN * self.limit and not self._paused:
            self._paused, self._pause = self._pause, min(2 * self._pause, PAUSES[1])
        return then
