"""What the two threads of a worker process know of each other.

The main thread writes, the control thread reads, but where it says otherwise. Everything is
one assignment of one value, which other threads see whole.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from aexec.messages.control import Pong
from aexec.worker.claims import Claims
from aexec.worker.compute import Pulse
from aexec.worker.host import WorkerHost
from aexec.worker.stacks import thread_stack

__all__ = ("RankState", "new_pulse")

_tuple: Any = tuple
new_pulse: Callable[[tuple[str, float, int | None]], Pulse] = partial(_tuple.__new__, Pulse)
"""What ``Pulse()`` calls, without a call of Python's: four are made for each step."""

_monotonic = time.monotonic

#: Their frames lead to the work of the main thread, and are no part of it.
_OURS = frozenset(str(Path(__file__).with_name(name)) for name in ("device.py", "process.py"))


class RankState:
    """One rank, as both of its threads see it.

    Attributes:
        rank: Which.
        host: Of the worker class; None until its context is there.
        claims: Its plain calls.
        pulse: What the main thread does.
        steps_ended: Step messages that the main thread is through with.
        steps_awaited: The count that the control thread wants to hear of; written by it.
        has_queued: Tells whether anything waits for the main thread.
        ending: The main thread is to end after what it does now; written by the control thread.
        constructed: The worker object is there.
        is_to_sample: The sampling of the step whose forward pass runs has come along with it.
    """

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.host: WorkerHost | None = None
        self.claims = Claims()
        self.pulse = Pulse("spawned", time.monotonic(), None)
        self.steps_ended = 0
        self.steps_awaited: int | None = None
        self.has_queued: Callable[[], bool] = bool
        self.ending = False
        self.constructed = self.is_to_sample = False
        self._main = threading.get_ident()  # who makes it uses the device

    def __repr__(self) -> str:
        phase, since, step = self.pulse
        return f"<RankState {self.rank}: {phase} for {time.monotonic() - since:.1f} s, step {step}>"

    def begin(self, phase: str, step: int | None = None) -> None:
        """The main thread does something else now."""
        self.pulse = new_pulse((phase, _monotonic(), self.pulse[2] if step is None else step))

    def step_ended(self, tell: Callable[[], None]) -> None:
        """The main thread is through with a step message; ``tell`` if that was waited for."""
        self.steps_ended += 1
        if self.steps_awaited is not None and self.steps_ended >= self.steps_awaited:
            self.steps_awaited = None
            tell()

    def pong(self) -> Pong:
        """The pulse as a message."""
        phase, since, step = self.pulse
        age = time.monotonic() - since
        return Pong(rank=self.rank, phase=phase, step=step, age=age, queued=int(self.is_to_sample or self.has_queued()))

    def stack(self) -> str:
        """Where the main thread is."""
        return thread_stack("main", self._main, self.pulse.phase, _OURS)
