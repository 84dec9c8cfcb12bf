"""When a thread that waits for a frame may poll for it, and how long.

A thread that sleeps has to be woken, which costs tens of microseconds when it is on another
CPU; one that polls burns its CPU. So it polls for a bounded time, and only if a message was
announced, or if the last waits were short enough that polling would have caught them. It
polls the socket, never memory, and yields to others in between.
"""

from __future__ import annotations

import os

__all__ = ("SpinPolicy", "affordable_spin")

WEIGHT = 0.25  # of the last wait in the mean
LONG = 50.0  # a wait counts as no longer than so many budgets, so that an idle night is soon forgotten


def affordable_spin(spin: float, num_processes: int, num_cpus: int | None = None) -> float:
    """``spin``, or 0 where no CPU is to spare: one that waits would take it from those that work.

    Args:
        spin: Seconds.
        num_processes: Workers and driver together.
        num_cpus: That this process may use; None: ask the system.
    """
    if num_cpus is None:
        usable = getattr(os, "sched_getaffinity", None)
        num_cpus = len(usable(0)) if usable else os.cpu_count() or 1
    return spin if num_processes < num_cpus else 0.0  # with as many, two often share one: slower than to sleep


class SpinPolicy:
    """Remembers how long the last waits were.

    Args:
        limit: Seconds that may be polled at once; 0: never.
    """

    def __init__(self, limit: float) -> None:
        self.limit = limit
        self._mean = LONG * limit
        self._announced = False

    def __repr__(self) -> str:
        return f"<SpinPolicy: {self.limit * 1e6:g} us, waits are {self._mean * 1e6:.3g} us>"

    def announce(self) -> None:
        """A message is about to come."""
        self._announced = True

    def budget(self) -> float:
        """Seconds to poll now."""
        announced, self._announced = self._announced, False
        return self.limit if announced or self._mean < self.limit else 0.0

    def waited(self, seconds: float) -> None:
        """A frame came after so long."""
        self._mean += (min(seconds, LONG * self.limit) - self._mean) * WEIGHT
