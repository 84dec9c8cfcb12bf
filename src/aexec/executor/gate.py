"""Which steps may go to the ranks, and which wait: a bound, and the pauses. Pure.

A step takes a place when it is sent and holds it until all ranks have ended it: until its
sampling is answered, or its forward pass where there is nothing to sample. A step that
finds no place, or the executor paused, waits; those that wait go in the order in which
they came.
"""

from __future__ import annotations

import math
from collections import deque
from typing import Any

import msgspec

from aexec.errors import ConfigError
from aexec.executor.collective import Call, Waiter
from aexec.messages.operations import PauseMode
from aexec.messages.step import ExecuteModel, StepId

__all__ = ("PAUSE_MODES", "Flight", "Held", "StepGate", "check_pause_mode", "default_limit")

PAUSE_MODES: tuple[PauseMode, ...] = ("abort", "finish", "keep")


def check_pause_mode(mode: Any) -> PauseMode:
    """Refuse modes that do not exist.

    Raises:
        ConfigError: It is another one.
    """
    for known in PAUSE_MODES:
        if mode == known:
            return known
    raise ConfigError(f"mode of pause is {mode!r}: expected one of {', '.join(map(repr, PAUSE_MODES))}")


def default_limit(pipeline_depth: int) -> int:
    """Steps in flight, unless told: one for each stage and one to plan ahead, and room for drivers that plan more."""
    return max(8, pipeline_depth + 1)


class Held:
    """A step that waits to be sent.

    Attributes:
        message: The step.
        reply: Where its end goes.
        since: When it came.
        expires: When its wait has to end; infinity: never, as while the executor is paused.
        until: When its asker's own deadline passes; None: never.
        call: Its call, once it was sent.
    """

    __slots__ = ("call", "expires", "message", "reply", "since", "until")

    def __init__(self, message: ExecuteModel, reply: Waiter, *, now: float, until: float | None) -> None:
        self.message, self.reply, self.since, self.until = message, reply, now, until
        self.expires = math.inf
        self.call: Call | None = None


class Flight(msgspec.Struct, eq=False):
    """A step that holds a place; a struct, as that takes half the time to make.

    Attributes:
        step: Which.
        is_whole: It has nothing to sample.
        before: The step that took off before it; None: it is the first.
        launch: The call of its forward pass.
        sampling: The call of its sampling, once there is one.
    """

    step: StepId
    is_whole: bool
    before: StepId | None = None
    launch: Call | None = None
    sampling: Call | None = None


class StepGate:
    """The steps of one executor.

    Args:
        limit: Steps that may be in flight.
        timeout: Seconds that a step may take, its wait for a place included; None: no limit.

    Attributes:
        paused: How the executor is paused; None: it is not.
        flying: Steps in flight, the oldest first.
        waiting: Steps that wait, the oldest first.
        aborted: Steps whose driver has not been told yet that a pause has ended them.
    """

    def __init__(self, limit: int, timeout: float | None) -> None:
        self.limit, self.timeout = limit, timeout
        self.paused: PauseMode | None = None
        self.flying: dict[StepId, Flight] = {}
        self.waiting: deque[Held] = deque()
        self.aborted: set[StepId] = set()
        self._last: StepId | None = None

    def __repr__(self) -> str:
        paused = f", paused ({self.paused})" if self.paused else ""
        return f"<StepGate: {len(self.flying)}/{self.limit} steps in flight, {len(self.waiting)} waiting{paused}>"

    @property
    def is_clear(self) -> bool:
        """A step that comes now may go at once."""
        return not self.waiting and self.paused is None and len(self.flying) < self.limit

    def line_up(self, held: Held, now: float) -> None:
        """A step has come; see :meth:`admit`."""
        held.expires = math.inf if self.paused else self.expiry(now)
        self.waiting.append(held)

    def admit(self) -> list[Held]:
        """The steps that may be sent now, in order; their places are taken."""
        ready: list[Held] = []
        if not self.waiting:
            return ready
        while self.waiting and self.paused is None and len(self.flying) + len(ready) < self.limit:
            ready.append(self.waiting.popleft())
        return ready

    def take_off(self, step: StepId, *, is_whole: bool) -> Flight | None:
        """Give a step its place; None: its id does not increase, so that the ranks will refuse it."""
        if self._last is not None and step <= self._last:
            return None
        flight = self.flying[step] = Flight(step, is_whole, self._last)
        self._last = step
        return flight

    def take_back(self, flight: Flight) -> None:
        """A step could not be sent: its place is free, and as no rank has seen its id, it may come again."""
        self.land(flight)
        if self._last == flight.step:
            self._last = flight.before
        for later in self.flying.values():
            if later.before == flight.step:
                later.before = flight.before

    def land(self, flight: Flight) -> None:
        """A step is over on all ranks: its place is free."""
        if self.flying.get(flight.step) is flight:
            del self.flying[flight.step]

    def withdraw(self, held: Held) -> bool:
        """A step is not to be sent any longer; False: it was."""
        if held not in self.waiting:
            return False
        self.waiting.remove(held)
        return True

    def pause(self, mode: PauseMode) -> None:
        """Send no step from now on; the clocks of those that wait stand still."""
        self.paused = mode
        for held in self.waiting:
            held.expires = math.inf

    def forget_aborted(self) -> None:
        """Of the pauses before, remember the latest steps only: no driver has more whose end it may still ask for."""
        self.aborted = set(sorted(self.aborted)[-self.limit :])

    def resume(self, now: float) -> None:
        """Send steps again; see :meth:`admit`."""
        self.paused = None
        for held in self.waiting:
            held.expires = self.expiry(now)

    def due(self, now: float) -> list[Held]:
        """Steps that have waited too long; they wait no longer."""
        late = [held for held in self.waiting if held.expires <= now]
        for held in late:
            self.waiting.remove(held)
        return late

    def next_wake(self) -> float:
        """When :meth:`due` will have something; infinity: never."""
        return min((held.expires for held in self.waiting), default=math.inf)

    def clear(self) -> list[Held]:
        """Forget all steps, as their ranks are gone; returns those that waited."""
        waiting = list(self.waiting)
        self.waiting.clear()
        self.flying.clear()
        self.aborted.clear()
        self._last = None
        return waiting

    def in_the_way(self) -> str:
        """Why a step waits, for its error."""
        steps = ", ".join(map(str, self.flying))
        return (
            f"{len(self.flying)} of {self.limit} steps are in flight (ExecutorConfig.max_concurrent_steps): {steps}; "
            "a step holds its place until it is sampled"
        )

    def expiry(self, now: float) -> float:
        """When the limit of a call passes that begins now; infinity: never."""
        return math.inf if self.timeout is None else now + self.timeout
