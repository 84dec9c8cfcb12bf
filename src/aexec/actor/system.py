"""A set of actors on one event loop, with a beginning and an end."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from types import TracebackType
from typing import Any, Literal, Self, TypeVar, overload

import anyio

from aexec.actor.absent import register, unregister
from aexec.actor.core import Core
from aexec.actor.envelope import here
from aexec.actor.events import ActorEvent, DeadLettered
from aexec.actor.finding import find_runtime
from aexec.actor.logs import logger
from aexec.actor.ref import Ref, ref_to
from aexec.actor.runtime import Clock
from aexec.actor.spawner import Spawner
from aexec.actor.statistics import SystemStatistics
from aexec.actor.tracing import Tracer
from aexec.actor.tree import Tree, grow
from aexec.errors import ConfigError
from aexec.messages.portable import copy_of
from aexec.observe.hub import EventHub, EventStream

__all__ = ("ActorSystem",)

A = TypeVar("A")

SystemState = Literal["new", "open", "closing", "closed"]


class ActorSystem(Spawner):
    """Runs actors on the event loop it is opened on: asyncio, uvloop or trio.

    ``async with ActorSystem() as system:`` is the usual form. ``open`` and ``aclose`` may
    also be called from different tasks, as by a fixture, a notebook cell or a lifespan.
    Several systems may be open in one process and on one loop; nothing is shared.

    Args:
        name: Names it in logs and errors.
        timeout: Seconds an ask takes at most unless it says otherwise; None: no limit.
        mailbox: Most messages in a mailbox lane unless an actor is spawned with another bound.
        stop_timeout: Seconds that actors have to end at ``aclose`` and when they fail.
        tracer: Is told of each message that is handled, as ``observe.otel``'s is.
        clock: Where its time comes from, as ``testing.VirtualClock``; None: from the loop.
        check_messages: Send every message and reply as a copy, as between processes; what
            cannot travel raises ``MessageNotPortable`` where it is sent. For tests.

    Raises:
        ConfigError: A setting is not positive.
    """

    def __init__(
        self,
        *,
        name: str = "actors",
        timeout: float | None = 30.0,
        mailbox: int = 256,
        stop_timeout: float = 10.0,
        tracer: Tracer | None = None,
        clock: Clock | None = None,
        check_messages: bool = False,
    ) -> None:
        super().__init__(None)
        if mailbox < 1 or stop_timeout <= 0 or (timeout is not None and not timeout > 0):
            raise ConfigError(
                f"mailbox is {mailbox}, timeout {timeout} and stop_timeout {stop_timeout}: expected positive values, "
                "or timeout=None for asks without a limit"
            )
        self.name, self.timeout, self.stop_timeout = name, timeout, stop_timeout
        self._default_mailbox, self._tracer, self._clock = mailbox, tracer, clock
        self._check_messages = check_messages
        self._state: SystemState = "new"

    def __repr__(self) -> str:
        if self._core is None:
            return f"<ActorSystem {self.name}: {self._state}>"
        return f"<ActorSystem {self.name}: {len(self._core.cells)} actors, {self._state}, {self._core.runtime}>"

    async def open(self) -> Self:
        """Make it ready to spawn actors on the loop that runs here.

        Raises:
            ConfigError: It was opened before.
        """
        if self._state != "new":
            raise ConfigError(f"actor system {self.name} is {self._state}: open a new one")
        runtime = find_runtime()
        if self._clock is not None:
            runtime = self._clock.govern(runtime)
        self._state = "open"
        await runtime.open()
        self._core = Core(
            self.name,
            runtime,
            timeout=self.timeout,
            mailbox=self._default_mailbox,
            stop_timeout=self.stop_timeout,
        )
        self._core.system, self._core.tracer = self, self._tracer
        self._core.carry = copy_of if self._check_messages else None
        register(self._core)
        return self

    async def aclose(self, *, timeout: float | None = None) -> None:
        """End all actors, children first; may be called twice, and from any task of the loop.

        Args:
            timeout: Seconds after which running handlers are cancelled; None: ``stop_timeout``.

        Raises:
            CallCycle: A handler of one of its actors calls it, and would wait for itself.
            WrongLoop: It was opened on another loop.
        """
        if self._core is None:
            self._state = "closed"
            return
        self._core.check_loop()
        if self._state == "closed":
            return
        if (origin := here.get()) is not None:
            for cell in self._core.cells.values():
                cell.check_cycle(origin.callers)
        self._state, self._core.closing = "closing", True
        by = self._core.runtime.now() + (self.stop_timeout if timeout is None else timeout)
        with anyio.CancelScope(shield=True):  # a cancelled owner still leaves nothing behind
            await self._end(self._core, by)

    async def _end(self, core: Core, by: float) -> None:
        while tops := [cell for cell in core.cells.values() if cell.parent is None]:
            for cell in reversed(tops):
                cell.request_stop(f"system {self.name} was closed", by)
            for cell in tops:
                await cell.closed()
        core.deadlines.close()
        unregister(core)
        if core.events is not None:
            core.events.close()
        self._state = "closed"
        await core.runtime.close()

    async def __aenter__(self) -> Self:
        return await self.open()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.aclose(timeout=None if error is None else 0.0)

    def __del__(self) -> None:
        if getattr(self, "_state", "new") in {"open", "closing"}:
            warnings.warn(
                f"{self!r} was never closed: use `async with`, or await aclose()",
                ResourceWarning,
                source=self,
                stacklevel=2,
            )

    def now(self) -> float:
        """Monotonic seconds by the system's clock.

        Raises:
            ConfigError: The system is not open.
        """
        return self._open_core().now()

    async def sleep(self, seconds: float) -> None:
        """Wait by the system's clock, which a test may have replaced.

        Raises:
            ConfigError: The system is not open.
        """
        await self._open_core().sleep(seconds)

    def call_soon_threadsafe(self, function: Callable[..., object], *args: Any) -> None:
        """Call ``function(*args)`` on the system's loop; from any thread. What it raises is logged.

        Raises:
            ConfigError: The system was never opened.
            RuntimeError: The loop is closed.
        """
        if self._core is None:
            raise ConfigError("the actor system is not open: use `async with system:` or `await system.open()`")
        self._core.runtime.call_soon_threadsafe(self._call_guarded, function, args)

    def statistics(self) -> SystemStatistics:
        """Its figures; those of one actor are in ``ref.statistics()``."""
        core = self._core
        if core is None:
            return SystemStatistics(self.name, self._state)
        return SystemStatistics(
            name=self.name,
            state=self._state,
            actors=len(core.cells),
            spawned=core.spawned,
            sent=core.sent,
            deadlines=len(core.deadlines),
            late_replies=core.late_replies,
            dead_letters=core.dead_letters.statistics(),
        )

    @overload
    def find(self, name: str) -> Ref[Any] | None: ...

    @overload
    def find(self, name: str, kind: type[A]) -> Ref[A] | None: ...

    def find(self, name: str, kind: type[Any] = object) -> Ref[Any] | None:
        """The live actor of a name; None: there is none.

        Args:
            name: Its name.
            kind: Its class, which types the ref.

        Raises:
            ConfigError: The system is not open, or the actor is of another class.
        """
        cell = self._open_core().cells.get(name)
        if cell is None:
            return None
        if cell.actor is not None and not isinstance(cell.actor, kind):
            raise ConfigError(f"actor {name} is a {type(cell.actor).__name__}: expected a {kind.__name__}")
        return Ref(cell)

    def ref(self, address: str) -> Ref[Any]:
        """The ref with an address of this system, as in ``system.ref(ref.address)``.

        One to an actor that has ended is a ref like any other: asks end with ``ActorDied``.

        Raises:
            ConfigError: The system is not open, or the address is another system's.
        """
        uid = self._open_core().uid
        if not address.startswith(f"{uid}/"):
            raise ConfigError(f"{address} is no address in system {self.name}: its addresses begin with {uid}/")
        return ref_to(address)

    def tree(self) -> Tree:
        """The live actors and who is whose child: print it, or end a notebook cell with it."""
        return grow(self.name, () if self._core is None else self._core.cells.values())

    def events(self) -> EventStream[ActorEvent]:
        """What happens to the actors from now on: ``async for event in system.events()``.

        The stream ends with the system. A listener that falls behind loses the oldest.

        Raises:
            ConfigError: The system is not open.
        """
        core = self._open_core()
        if core.events is None:
            core.events = hub = EventHub[ActorEvent]()
            core.dead_letters.listener = lambda kind, actor, message, so_far: hub.emit(
                DeadLettered(actor=actor, cause=kind, message=message, so_far=so_far)
            )
        return core.events.listen()

    def _call_guarded(self, function: Callable[..., object], args: tuple[Any, ...]) -> None:
        try:
            function(*args)
        except Exception:  # noqa: BLE001 - it has no caller any more
            logger(system=self.name).exception("call_soon_threadsafe failed", function=repr(function))
