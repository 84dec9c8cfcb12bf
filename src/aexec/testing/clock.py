"""Time that passes when a test says so, or when nothing else happens.

``ActorSystem(clock=VirtualClock())`` takes all of its time from the clock: deadlines,
timers, ``context.sleep``, back-off. Time stands still while any task of the loop can run;
once all of them wait, it leaps to the next deadline. So thirty seconds take no time, and
what happens in them happens in the same order on every loop and machine.

The clock sees tasks of its loop only. What waits for a thread, a process, a socket or
``anyio.sleep`` looks blocked, and time leaps past it: give such a test real time.
"""

from __future__ import annotations

import contextvars
import heapq
import itertools
from collections.abc import Callable, Coroutine
from contextlib import AbstractContextManager
from typing import Any

import anyio
import anyio.lowlevel

from aexec.actor.runtime import Interrupted, Promise, Runtime, Section, TimerHandle
from aexec.errors import ConfigError

__all__ = ("VirtualClock",)

TURNS = 16  # of the loop, after which most chains of messages have come to rest


class _Call:
    """A call at a point in virtual time."""

    __slots__ = ("callback", "when")

    def __init__(self, when: float, callback: Callable[[], None]) -> None:
        self.when = when
        self.callback: Callable[[], None] | None = callback

    def cancel(self) -> None:
        self.callback = None


class VirtualClock:
    """The time of one or more actor systems of one loop.

    Args:
        start: What it shows at first, in seconds.
        autojump: Leap to the next deadline when all tasks of the loop wait. False: time
            passes in :meth:`advance` alone.
    """

    def __init__(self, *, start: float = 0.0, autojump: bool = True) -> None:
        self._now, self._autojump = start, autojump
        self._calls: list[tuple[float, int, _Call]] = []
        self._order = itertools.count()
        self._context = contextvars.copy_context()
        self._systems: list[_VirtualRuntime] = []
        self._jumper: _VirtualRuntime | None = None
        self._advancing = 0

    def __repr__(self) -> str:
        following = self._next()
        until = "nothing to come" if following is None else f"next at {following:.6g} s"
        return f"<VirtualClock at {self._now:.6g} s, {until}>"

    def now(self) -> float:
        """What it shows, in seconds."""
        return self._now

    async def advance(self, seconds: float) -> None:
        """Let time pass, from one deadline to the next.

        Whatever becomes due is done, and has come to rest, before more time passes; and
        so it has when this returns.

        Args:
            seconds: How much.

        Raises:
            ConfigError: It would run backwards.
        """
        if not seconds >= 0:
            raise ConfigError(f"advance({seconds}): expected seconds, 0 or more, as time does not run backwards")
        target = self._now + seconds
        self._advancing += 1
        try:
            await _settle()
            while (when := self._next()) is not None and when <= target:
                self._leap(when)
                await _settle()
            self._now = max(self._now, target)
        finally:
            self._advancing -= 1
            self._watch()

    def govern(self, runtime: Runtime) -> Runtime:
        """A loop under the time of this clock; what ``ActorSystem(clock=...)`` calls.

        Raises:
            ConfigError: The clock governs an open system of another loop.
        """
        elsewhere = next((governed for governed in self._systems if not governed.is_here), None)
        if elsewhere is not None:
            raise ConfigError(f"{self!r} is the time of {elsewhere}: give a system of another loop a clock of its own")
        return _VirtualRuntime(self, runtime)

    # ------------------------------------------------------------ for its runtimes

    def take_in(self, runtime: _VirtualRuntime) -> None:
        """A system was opened."""
        self._systems.append(runtime)

    async def let_go(self, runtime: _VirtualRuntime) -> None:
        """A system is closed."""
        self._systems.remove(runtime)
        if self._jumper is runtime:
            await runtime.end_jumper()
            self._jumper = None
            self._watch()

    def call_at(self, when: float, callback: Callable[[], None]) -> TimerHandle:
        """Call something when it is time."""
        call = _Call(when, callback)
        heapq.heappush(self._calls, (when, next(self._order), call))
        self._watch()
        return call

    async def jump(self) -> None:
        """Leap from deadline to deadline, as long as there are any."""
        try:
            while self._next() is not None and not self._advancing:
                await _settle()
                when = self._next()
                if when is not None and not self._advancing:
                    self._leap(when)
        finally:
            self._jumper = None

    # ------------------------------------------------------------

    def _next(self) -> float | None:
        """When the next call is due."""
        while self._calls and self._calls[0][2].callback is None:
            heapq.heappop(self._calls)
        return self._calls[0][0] if self._calls else None

    def _leap(self, when: float) -> None:
        """Be at ``when``, and call what is due by then."""
        self._now = max(self._now, when)
        while (due := self._next()) is not None and due <= self._now:
            callback = heapq.heappop(self._calls)[2].callback
            assert callback is not None
            self._context.copy().run(callback)

    def _watch(self) -> None:
        """See to it that somebody leaps, if there is anything to leap to."""
        if self._autojump and self._jumper is None and not self._advancing and self._systems and self._calls:
            self._jumper = self._systems[-1]
            self._jumper.start_jumper()


class _VirtualRuntime:
    """A loop under virtual time; see ``runtime.Runtime``."""

    time_slice = -1.0  # virtual time does not pass while messages are handled: take turns after each

    def __init__(self, clock: VirtualClock, runtime: Runtime) -> None:
        self._clock, self._runtime = clock, runtime
        self._section: Section | None = None
        self._ended: Promise[None] | None = None
        self._task: object = None
        self.cancelled: type[BaseException] = runtime.cancelled
        self.now = clock.now

    def __str__(self) -> str:
        return f"{self._runtime}, in virtual time"

    @property
    def is_here(self) -> bool:
        return self._runtime.is_here

    async def open(self) -> None:
        await self._runtime.open()
        self._clock.take_in(self)

    async def close(self) -> None:
        await self._clock.let_go(self)
        await self._runtime.close()

    def promise(self) -> Promise[Any]:
        return self._runtime.promise()

    def section(self) -> Section:
        return self._runtime.section()

    def start(self, coroutine: Coroutine[Any, Any, None], name: str) -> object:
        return self._runtime.start(coroutine, name)

    def shield(self) -> AbstractContextManager[object]:
        return self._runtime.shield()

    def call_later(self, seconds: float, callback: Callable[[], None]) -> TimerHandle:
        return self._clock.call_at(self._clock.now() + seconds, callback)

    def call_soon_threadsafe(self, function: Callable[..., object], *args: Any) -> None:
        self._runtime.call_soon_threadsafe(function, *args)

    async def checkpoint(self) -> None:
        await self._runtime.checkpoint()

    def start_jumper(self) -> None:
        """Let the clock leap in a task of this loop."""
        self._section, self._ended = self._runtime.section(), self._runtime.promise()
        self._task = self._runtime.start(self._jump(self._section, self._ended), "virtual clock")

    async def end_jumper(self) -> None:
        """End that task."""
        section, ended = self._section, self._ended
        if section is not None and ended is not None:
            section.interrupt()
            await ended

    async def _jump(self, section: Section, ended: Promise[None]) -> None:
        try:
            await section.run(self._clock.jump())
        except Interrupted:
            pass
        finally:
            self._section = self._ended = self._task = None
            if not ended.done():
                ended.set_result(None)


async def _settle() -> None:
    """Wait until all other tasks of the loop wait.

    anyio looks every 0.1 s on asyncio, and at once first: so let others have some turns before.
    """
    for _ in range(TURNS):
        await anyio.lowlevel.checkpoint()
    await anyio.wait_all_tasks_blocked()
