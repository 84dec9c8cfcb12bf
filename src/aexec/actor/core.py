"""What the actors of one system share: the loop, deadlines, counters, who is alive."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from aexec.actor.deadletters import DeadLetters
from aexec.actor.deadlines import Deadlines
from aexec.actor.events import ActorEvent
from aexec.actor.finding import describe_here
from aexec.actor.runtime import Promise, Runtime
from aexec.actor.tracing import Tracer
from aexec.errors import ConfigError, WrongLoop
from aexec.observe.hub import EventHub

if TYPE_CHECKING:
    from aexec.actor.cell import Cell

__all__ = ("Core",)


class Core:
    """The shared part of an open system.

    Args:
        name: The system's name.
        runtime: Its loop.
        timeout: Seconds an ask takes at most unless it says otherwise; None: no limit.
        mailbox: Bound of a mailbox unless it is spawned with another.
        stop_timeout: Seconds that an actor has to end when nobody said how many.

    Attributes:
        now: Monotonic seconds, as the runtime gives them.
        time_slice: Seconds of handling after which an actor lets other tasks run.
        system: The ``ActorSystem``, for those who know what that is.
        closing: No more actors are spawned.
        uid: Tells this system from all others, in addresses.
        cells: Actors that are not over, by name.
        ids: Correlation ids.
        events: Tells listeners what happens to actors; None while there has been no listener.
        tracer: Is told of each message that is handled.
        carry: What messages and replies pass through on their way; None: nothing.
        late_replies: Replies that came after their asker had gone.
    """

    def __init__(
        self, name: str, runtime: Runtime, *, timeout: float | None, mailbox: int, stop_timeout: float
    ) -> None:
        self.name, self.runtime = name, runtime
        self.timeout, self.mailbox, self.stop_timeout = timeout, mailbox, stop_timeout
        self.now, self.time_slice = runtime.now, runtime.time_slice
        self.system: object = None
        self.closing = False
        self.uid = f"{name}-{os.urandom(4).hex()}"
        self.deadlines = Deadlines(runtime)
        self.dead_letters = DeadLetters(name)
        self.cells: dict[str, Cell] = {}
        self.ids = itertools.count(1)
        self.events: EventHub[ActorEvent] | None = None
        self.tracer: Tracer | None = None
        self.carry: Callable[[Any], Any] | None = None
        self.sent = 0
        self.spawned = 0
        self.late_replies = 0
        self._numbers: dict[str, itertools.count[int]] = {}

    def check_loop(self) -> None:
        """Raise unless the caller is on the system's loop.

        Raises:
            WrongLoop: It is not; names both loops.
        """
        if not self.runtime.is_here:
            raise WrongLoop(self.name, str(self.runtime), describe_here())

    async def sleep(self, seconds: float) -> None:
        """Wait, by the clock of the system."""
        promise = self.runtime.promise()
        timer = self.deadlines.call_at(self.now() + seconds, partial(_wake, promise))
        try:
            await promise
        finally:
            timer.cancel()

    def register(self, cell: Cell) -> None:
        """Take note of a new actor."""
        self.cells[cell.name] = cell
        self.spawned += 1

    def choose_name(self, wanted: str | None, kind: str) -> str:
        """A name that no live actor has.

        Raises:
            ConfigError: ``wanted`` is taken.
        """
        if wanted is not None:
            if wanted in self.cells:
                raise ConfigError(
                    f"an actor {wanted!r} is alive in system {self.name}: choose another name, or stop it"
                )
            return wanted
        numbers = self._numbers.setdefault(kind.lower(), itertools.count(1))
        return next(name for number in numbers if (name := f"{kind.lower()}-{number}") not in self.cells)


def _wake(promise: Promise[None]) -> None:
    if not promise.done():
        promise.set_result(None)
