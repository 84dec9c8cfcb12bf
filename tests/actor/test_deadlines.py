from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import pytest

from aexec.actor.deadlines import MIN_STALE, Deadlines


@dataclass
class Handle:
    when: float
    callback: Any
    cancelled: bool = False

    def cancel(self) -> None:
        self.cancelled = True


@dataclass
class Clock:
    """A runtime of which only the time is real enough."""

    time: float = 0.0
    handles: list[Handle] = field(default_factory=list)

    def now(self) -> float:
        return self.time

    def call_later(self, seconds: float, callback: Any) -> Handle:
        self.handles.append(Handle(self.time + seconds, callback))
        return self.handles[-1]

    @property
    def live(self) -> list[Handle]:
        return [handle for handle in self.handles if not handle.cancelled]

    def advance(self, seconds: float) -> None:
        end = self.time + seconds
        while due := [handle for handle in self.live if handle.when <= end]:
            handle = min(due, key=lambda handle: handle.when)
            self.handles.remove(handle)
            self.time = max(self.time, handle.when)
            handle.callback()
        self.time = end


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def deadlines(clock) -> Deadlines:
    return Deadlines(clock)


def test_entries_expire_in_the_order_of_their_time(clock, deadlines):
    """Whatever the order in which they were added."""
    called: list[float] = []
    times = [random.uniform(0, 10) for _ in range(50)]
    for when in times:
        deadlines.call_at(when, lambda when=when: called.append(when))
    clock.advance(20)
    assert called == sorted(times)
    assert len(deadlines) == 0


def test_there_is_one_timer_at_most(clock, deadlines):
    """However many deadlines are held, the loop has one timer, for the earliest."""
    for when in (5.0, 3.0, 4.0, 1.0, 2.0):
        deadlines.call_at(when, lambda: None)
    assert [handle.when for handle in clock.live] == [1.0]


def test_no_deadline_means_no_timer(clock, deadlines):
    """An idle system does not wake up."""
    timer = deadlines.call_at(1.0, lambda: None)
    timer.cancel()
    clock.advance(2)
    assert clock.live == []
    assert len(deadlines) == 0


def test_a_timer_that_is_called_off_is_not_called(clock, deadlines):
    """Cancelling is final, and may be done twice."""
    called: list[int] = []
    timer = deadlines.call_at(1.0, lambda: called.append(1))
    timer.cancel()
    timer.cancel()
    clock.advance(2)
    assert called == []
    assert repr(timer) == "<Timer over>"


def test_entries_that_are_over_are_dropped_when_they_come_first(deadlines):
    """With asks that end in time, the heap holds nothing."""
    for step in range(10):
        deadlines.call_at(100.0 + step, lambda: None).cancel()
        assert len(deadlines._heap) == 0
    assert len(deadlines) == 0


def test_entries_that_are_over_do_not_pile_up(deadlines):
    """Behind one that is pending, they are thrown out when they are the greater part."""
    deadlines.call_at(1.0, lambda: None)
    for step in range(20 * MIN_STALE):
        deadlines.call_at(100.0 + step, lambda: None).cancel()
    assert len(deadlines) == 1
    assert len(deadlines._heap) <= 2 * MIN_STALE


def test_compaction_keeps_what_is_pending(clock, deadlines):
    """Throwing out what is over loses no live deadline."""
    called: list[int] = []
    for number in range(10):
        deadlines.call_at(50.0 + number, lambda number=number: called.append(number))
    for _ in range(10 * MIN_STALE):
        deadlines.call_at(90.0, lambda: None).cancel()
    assert len(deadlines) == 10
    clock.advance(100)
    assert called == list(range(10))


def test_a_callback_may_set_the_next_deadline(clock, deadlines):
    """Adding while expiring works, and arms one timer."""
    called: list[float] = []

    def again() -> None:
        called.append(clock.time)
        if len(called) < 3:
            deadlines.call_at(clock.time + 1.0, again)

    deadlines.call_at(1.0, again)
    clock.advance(10)
    assert called == [1.0, 2.0, 3.0]


def test_closing_forgets_all(clock, deadlines):
    """Nothing is called after close, and no timer is left on the loop."""
    called: list[int] = []
    deadlines.call_at(1.0, lambda: called.append(1))
    deadlines.close()
    clock.advance(2)
    assert called == []
    assert clock.live == []
    assert repr(deadlines) == "<Deadlines: 0 held>"
