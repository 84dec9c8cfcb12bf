"""A stopwatch for promises in seconds, on a machine that others use too.

"Within half a second" is said of aexec, not of the machine of the test. Neighbours on the
host take its processors away for longer than that now and then, and then no program on it
makes its bound, however good. What aexec did meanwhile is nothing, so the time does not
count: a bound keeps its meaning, and need not be widened for the worst machine.
"""

from __future__ import annotations

import _thread
import os
import time
from typing import Self

TICK = 0.005  # seconds from one look at the clock to the next
LATE = 0.02  # seconds that a look may be late on a processor that is shared, and not taken away


class Stopwatch:
    """Measures what a block takes.

    A thread on each processor wakes up all the time; where one of them does so late, nobody
    ran there in between. Time in which any processor was taken away is left out, as what
    is waited for may have been the one that ran there.

    Nothing here takes a lock: a test goes on in the very turn of aexec that brings what it
    waits for, and there nothing may block.

    Attributes:
        wall: Seconds by the clock.
        seconds: Those of them in which the machine ran.
    """

    def __init__(self) -> None:
        self.wall = self.seconds = 0.0
        self._stalls: list[tuple[float, float]] = []
        self._processors = os.sched_getaffinity(0)
        self._watched: list[int] = []  # those whose thread has begun,
        self._left: list[int] = []  # and has ended
        self._is_over = False

    def __repr__(self) -> str:
        return (
            f"<Stopwatch: {self.seconds:.3f} s, and {self.wall - self.seconds:.3f} s in which the machine stood still>"
        )

    def __enter__(self) -> Self:
        for processor in self._processors:
            _thread.start_new_thread(self._watch, (processor,))
        while len(self._watched) < len(self._processors):
            os.sched_yield()
        self._began = time.monotonic()
        return self

    def __exit__(self, *_: object) -> None:
        ended = time.monotonic()
        self._is_over = True
        while len(self._left) < len(self._processors):
            os.sched_yield()
        self.wall = ended - self._began
        self.seconds = self.wall - self._stalled(self._began, ended)

    def _watch(self, processor: int) -> None:
        os.sched_setaffinity(_thread.get_native_id(), {processor})
        before, is_over = time.monotonic(), False
        self._watched.append(processor)
        while not is_over:
            is_over = self._is_over
            time.sleep(TICK)
            now = time.monotonic()
            if now - before > TICK + LATE:
                self._stalls.append((before + TICK, now))
            before = now
        self._left.append(processor)

    def _stalled(self, began: float, ended: float) -> float:
        """Seconds in which any of the processors was taken away."""
        total, counted = 0.0, began
        for start, end in sorted(self._stalls):
            total += max(min(end, ended) - max(start, counted), 0.0)
            counted = max(counted, end)
        return total
