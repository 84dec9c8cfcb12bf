"""What the actor core needs of an event loop; which one runs, ``finding`` tells.

Two implementations: ``_asyncio`` (uvloop included), whose futures are the hot path, and
``_trio``. Neither enters a cancel scope or a task group in one task and leaves it in
another, so that a system may be opened and closed from any task: a notebook cell, a
fixture, a lifespan.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Generator
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeVar

__all__ = (
    "TIME_SLICE",
    "Clock",
    "Interrupted",
    "Promise",
    "Runtime",
    "Section",
    "TimerHandle",
    "start_in",
)

TIME_SLICE = 0.002  # seconds of handling after which other tasks get their turn

T = TypeVar("T")


class Interrupted(Exception):
    """A section ended because :meth:`Section.interrupt` cut it short."""


class Promise(Protocol[T]):
    """A value to come, awaited by one task; ``asyncio.Future`` is one."""

    def __await__(self) -> Generator[Any, Any, T]:
        """Wait for the value, or raise the error."""
        ...

    def done(self) -> bool:
        """True once it has a value or an error, or its waiter has gone."""
        ...

    def cancelled(self) -> bool:
        """True when its waiter has gone."""
        ...

    def cancel(self) -> bool:
        """Say that nobody waits for it any longer."""
        ...

    def set_result(self, result: T, /) -> None:
        """Give the value."""
        ...

    def set_exception(self, exception: BaseException, /) -> None:
        """Give the error."""
        ...

    def exception(self) -> BaseException | None:
        """The error, which counts as seen from now on."""
        ...


class Section(Protocol):
    """A stretch of a task that can be cut short without ending the task.

    Attributes:
        active: True while it runs.
    """

    active: bool

    async def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Await ``coroutine`` in the task at hand.

        Raises:
            Interrupted: It was cut short, before or while it ran.
        """
        ...

    def interrupt(self) -> None:
        """Cut it short, from outside of its task."""
        ...


class TimerHandle(Protocol):
    """A call to come."""

    def cancel(self) -> None:
        """Call it off."""
        ...


class Runtime(Protocol):
    """An event loop, as far as the core needs one."""

    @property
    def time_slice(self) -> float:
        """Seconds of handling after which an actor lets other tasks run; below 0: after each message."""
        ...

    @property
    def cancelled(self) -> type[BaseException]:
        """What it raises in a task that is cancelled."""
        ...

    def __str__(self) -> str:
        """Names the loop, for people."""
        ...

    @property
    def is_here(self) -> bool:
        """True when the code that asks runs on this loop."""
        ...

    async def open(self) -> None:
        """Be ready to start tasks."""
        ...

    async def close(self) -> None:
        """Give back what open took; raises what no ordinary handler may catch and some handler raised."""
        ...

    def now(self) -> float:
        """Monotonic seconds; deadlines are given in them."""
        ...

    def promise(self) -> Promise[Any]:
        """A new promise."""
        ...

    def section(self) -> Section:
        """A new section."""
        ...

    def start(self, coroutine: Coroutine[Any, Any, None], name: str) -> object:
        """Start a task; the caller keeps what is returned, which may be all that keeps it alive."""
        ...

    def shield(self) -> AbstractContextManager[object]:
        """Inside, the end of the whole event loop does not reach the task at its every await."""
        ...

    def call_later(self, seconds: float, callback: Callable[[], None]) -> TimerHandle:
        """Call something on the loop later."""
        ...

    def call_soon_threadsafe(self, function: Callable[..., object], *args: Any) -> None:
        """Call something on the loop soon, from any thread."""
        ...

    async def checkpoint(self) -> None:
        """Let other tasks run."""
        ...


class Clock(Protocol):
    """Where a system takes its time from when that is not its loop: ``testing.VirtualClock``."""

    def govern(self, runtime: Runtime, /) -> Runtime:
        """The same loop, under the time of this clock."""
        ...


def start_in(
    tasks: dict[Section, object],
    runtime: Runtime,
    run: Callable[[Coroutine[Any, Any, Any], Section], Coroutine[Any, Any, None]],
    coroutine: Coroutine[Any, Any, Any],
    section: Section,
    name: str,
) -> None:
    """Start a task that takes itself out of ``tasks``, which an eager one does before this returns.

    Args:
        tasks: Those that run, by their sections.
        runtime: Where it runs.
        run: What the task does: it awaits ``coroutine``, in ``section``, and takes itself out.
        coroutine: Closed if there will be no task.
        section: The task's own.
        name: Of the task.

    Raises:
        Exception: The loop does not make a task, as with a task factory that raises; nothing is left behind.
    """
    tasks[section] = None
    life = run(coroutine, section)
    try:
        task = runtime.start(life, name)
    except BaseException:
        life.close()
        coroutine.close()
        tasks.pop(section, None)
        raise
    if section in tasks:
        tasks[section] = task
