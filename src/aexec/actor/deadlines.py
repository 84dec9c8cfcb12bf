"""All deadlines and timers of a system: one heap, one timer of the loop.

A timer of the loop per ask costs 3 µs and a cancel scope 20 µs; an entry here costs
below 1 µs (measured: ``benches/bench_actor.py``). Most deadlines never come: an entry
that is over is dropped once it is the earliest, or when such entries are the greater part.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable
from typing import Protocol

from aexec.actor.runtime import Runtime, TimerHandle

__all__ = ("Deadlines", "Entry", "Timer")

MIN_STALE = 256


class Entry(Protocol):
    """What can have a deadline."""

    def is_over(self) -> bool:
        """True when its deadline has lost its meaning."""
        ...

    def expire(self) -> None:
        """Its deadline has passed; called once, on the loop, and raises nothing."""
        ...


class Timer:
    """A call at a point in time."""

    __slots__ = ("_callback", "_deadlines", "when")

    def __init__(self, when: float, callback: Callable[[], object], deadlines: Deadlines) -> None:
        self.when = when
        self._callback: Callable[[], object] | None = callback
        self._deadlines = deadlines

    def __repr__(self) -> str:
        return f"<Timer {'over' if self._callback is None else f'at {self.when:.3f}'}>"

    def is_over(self) -> bool:
        """True when it was called or called off."""
        return self._callback is None

    def expire(self) -> None:
        """Call it."""
        if self._callback is not None:
            callback, self._callback = self._callback, None
            callback()

    def cancel(self) -> None:
        """Call it off; nothing happens if it was called already."""
        if self._callback is not None:
            self._callback = None
            self._deadlines.forget()


class Deadlines:
    """Holds deadlines, and expires them when their time has come."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._heap: list[tuple[float, int, Entry]] = []
        self._order = itertools.count()
        self._stale = 0
        self._armed_for = math.inf
        self._timer: TimerHandle | None = None

    def __repr__(self) -> str:
        return f"<Deadlines: {len(self)} held>"

    def __len__(self) -> int:
        return len(self._heap) - self._stale

    def add(self, when: float, entry: Entry) -> None:
        """Expire ``entry`` at ``when`` unless it is over by then."""
        heapq.heappush(self._heap, (when, next(self._order), entry))
        if when < self._armed_for:
            self._arm(when)

    def call_at(self, when: float, callback: Callable[[], object]) -> Timer:
        """Call ``callback`` at ``when``; it must not raise."""
        timer = Timer(when, callback, self)
        self.add(when, timer)
        return timer

    def forget(self) -> None:
        """Take note that one entry is over before its time."""
        heap = self._heap
        self._stale += 1
        while heap and heap[0][2].is_over():
            heapq.heappop(heap)
            self._stale -= 1
        if self._stale > MIN_STALE and self._stale * 2 > len(heap):
            self._heap = [held for held in heap if not held[2].is_over()]
            heapq.heapify(self._heap)
            self._stale = 0

    def close(self) -> None:
        """Forget all of them."""
        self._heap.clear()
        self._stale = 0
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._armed_for = math.inf

    def _arm(self, when: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._armed_for = when
        self._timer = self._runtime.call_later(max(0.0, when - self._runtime.now()), self._fire)

    def _fire(self) -> None:
        self._timer, self._armed_for = None, math.inf
        now = self._runtime.now()
        while self._heap and (self._heap[0][0] <= now or self._heap[0][2].is_over()):
            _, _, entry = heapq.heappop(self._heap)
            if entry.is_over():
                self._stale -= 1
            else:
                entry.expire()
        if self._heap and self._heap[0][0] < self._armed_for:
            self._arm(self._heap[0][0])
