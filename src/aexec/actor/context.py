"""What an actor has of its surroundings: ``self.context``."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar, cast, overload

from aexec.actor.cell import Cell
from aexec.actor.deadlines import Timer
from aexec.actor.deferred import Deferred
from aexec.actor.envelope import Envelope, Stage, here
from aexec.actor.logs import logger
from aexec.actor.ref import Ref
from aexec.actor.runtime import Section
from aexec.actor.spawner import Spawner
from aexec.actor.system import ActorSystem
from aexec.actor.ticker import Ticker
from aexec.actor.watch import unwatch, watch
from aexec.errors import ConfigError, UnhandledMessage
from aexec.messages.base import Message

if TYPE_CHECKING:
    import structlog

__all__ = ("Context", "OwnedTask")

R = TypeVar("R")
T = TypeVar("T")


class OwnedTask:
    """A task that ends with its actor at the latest."""

    __slots__ = ("_section", "name")

    def __init__(self, section: Section, name: str) -> None:
        self._section, self.name = section, name

    def __repr__(self) -> str:
        return f"<OwnedTask {self.name}>"

    def cancel(self) -> None:
        """Cancel it; nothing happens when it has ended."""
        self._section.interrupt()


class Context(Spawner):
    """An actor's place in its system; what it spawns are its children, and end before it does."""

    __slots__ = ("_cell", "_log")

    def __init__(self, cell: Cell) -> None:
        super().__init__(cell.core, cell)
        self._cell = cell
        self._log: structlog.stdlib.BoundLogger | None = None

    def __repr__(self) -> str:
        return f"<Context {self._cell.mailbox.describe(self._cell.state.value)}>"

    @property
    def ref(self) -> Ref[Any]:
        """The actor's own address."""
        return Ref(self._cell)

    @property
    def system(self) -> ActorSystem:
        """The system it lives in."""
        return cast("ActorSystem", self._cell.core.system)

    @property
    def log(self) -> structlog.stdlib.BoundLogger:
        """A logger with the system and the actor bound to it."""
        if self._log is None:
            self._log = logger(system=self._cell.core.name, actor=self._cell.name)
        return self._log

    @property
    def generation(self) -> int:
        """The actor's incarnation, from 1."""
        return self._cell.generation

    @property
    def rank(self) -> int:
        """The actor's place in the group that it was spawned in, from 0; 0 without a group."""
        return 0 if self._cell.place is None else self._cell.place.rank

    @property
    def size(self) -> int:
        """How many members the group has that it was spawned in; 1 without a group."""
        return 1 if self._cell.place is None else self._cell.place.size

    @property
    def deadline(self) -> float | None:
        """Until when the asker of the message in hand waits, in seconds of :meth:`now`; None: no limit."""
        envelope = self._in_hand()
        return None if envelope is None else envelope.deadline

    @property
    def sender(self) -> Ref[Any] | None:
        """The actor that sent the message in hand; None when it came from outside of actors."""
        envelope = self._in_hand()
        sender = None if envelope is None else envelope.sender
        return Ref(sender) if isinstance(sender, Cell) else None

    @property
    def traceparent(self) -> str | None:
        """The W3C trace context of the message in hand."""
        envelope = self._in_hand()
        return None if envelope is None else envelope.traceparent

    @overload
    def defer(self) -> Deferred[Any]: ...

    @overload
    def defer(self, message: Message[R]) -> Deferred[R]: ...

    def defer(self, message: Message[Any] | None = None) -> Deferred[Any]:
        """Put off the reply to the message in hand: return what this returns, and resolve it later.

        Args:
            message: The message in hand; says which reply it is to type checkers.

        Raises:
            RuntimeError: No handler of this actor runs here, or it is about another message.
        """
        envelope = self._in_hand()
        if envelope is None or envelope.stage is not Stage.RUNNING:
            raise RuntimeError(
                f"no handler of {self._cell.name} runs here: defer() puts off the reply of one that does"
            )
        if message is not None and message is not envelope.message:
            raise RuntimeError(
                f"the message in hand is {envelope.message!r}: defer() cannot put off a reply to {message!r}"
            )
        return Deferred(self._cell, envelope)

    def start_task(self, coroutine: Coroutine[Any, Any, Any]) -> OwnedTask:
        """Run a task of the actor's own, beside its handlers.

        It is cancelled when the actor ends; what it raises is the actor's failure.

        Raises:
            ActorDied: The actor has ended, or ends.
        """
        name = getattr(coroutine, "__qualname__", "task")
        return OwnedTask(self._cell.own(coroutine, name), f"{self._cell.name}/{name}")

    def pipe_to_self(
        self,
        awaitable: Awaitable[T],
        on_result: Callable[[T], Message[Any]],
        on_error: Callable[[Exception], Message[Any]],
    ) -> OwnedTask:
        """Await something beside the handlers, and send what comes of it to the actor as a message.

        Args:
            awaitable: What to await.
            on_result: Makes a message of its value.
            on_error: Makes a message of what it raised.

        Raises:
            ActorDied: The actor has ended, or ends.
        """
        return self.start_task(_pipe(self._cell, awaitable, on_result, on_error))

    def post(self, message: Message[Any]) -> None:
        """Send the actor a message of its own, from any turn of its loop; it waits where the mailbox is full.

        Like all that an actor sends itself it is moot once the actor ends, and no dead letter.

        Raises:
            UnhandledMessage: The actor has no handler for it.
        """
        if self._cell.exit is None:
            self._cell.post(message, own=True)

    def after(self, seconds: float, message: Message[Any]) -> Timer:
        """Send the actor a message later; ``cancel()`` what is returned to call it off.

        Raises:
            UnhandledMessage: The actor has no handler for it.
        """
        cell = self._check_handled(message)
        return cell.core.deadlines.call_at(cell.core.runtime.now() + seconds, partial(_ring, cell, cell.actor, message))

    def every(self, seconds: float, message: Message[Any]) -> Ticker:
        """Send the actor a message again and again; ``cancel()`` what is returned to call it off.

        A message is left out when the one before it has not begun yet, so that a slow
        actor's mailbox does not fill with them.

        Args:
            seconds: Between two messages, and before the first one.
            message: The message.

        Raises:
            ConfigError: ``seconds`` is not positive.
            UnhandledMessage: The actor has no handler for it.
        """
        if not seconds > 0:
            raise ConfigError(f"every {seconds} s: expected a positive number of seconds")
        return Ticker(self._check_handled(message), seconds, message)

    def watch(self, ref: Ref[Any]) -> None:
        """Have a ``Terminated`` sent to the actor once the actor behind ``ref`` is over; at once if it is.

        Watching twice is watching once. A restart of the watched actor is no end; one of
        the watching actor ends its watching.

        Raises:
            UnhandledMessage: The actor has no handler for ``Terminated``.
            ValueError: It is the actor's own ref.
        """
        watch(self._cell, ref)

    def unwatch(self, ref: Ref[Any]) -> None:
        """Watch no longer; a ``Terminated`` that is in the mailbox already is handled."""
        unwatch(self._cell, ref)

    def now(self) -> float:
        """Monotonic seconds by the system's clock: ``time.monotonic`` unless a test has replaced it."""
        return self._cell.core.now()

    async def sleep(self, seconds: float) -> None:
        """Wait by the system's clock, so that a test need not."""
        await self._cell.core.sleep(seconds)

    def stop(self) -> None:
        """End the actor once the message in hand is handled."""
        core = self._cell.core
        self._cell.request_stop("it stopped itself", core.runtime.now() + core.stop_timeout)

    def __entered__(self, state: str) -> None:
        """The actor has moved to another of its states."""
        self._cell.enter(state)

    def _check_handled(self, message: Message[Any]) -> Cell:
        cell = self._cell
        if cell.table.find(type(message)) is None:
            raise UnhandledMessage(cell.name, type(message).__name__, cell.table.names)
        if cell.core.carry is not None:
            cell.core.carry(message)  # nobody is there to hear of it when it is sent
        return cell

    def _in_hand(self) -> Envelope | None:
        envelope = here.get()
        return envelope if isinstance(envelope, Envelope) and envelope.cell is self._cell else None


async def _pipe(
    cell: Cell,
    awaitable: Awaitable[T],
    on_result: Callable[[T], Message[Any]],
    on_error: Callable[[Exception], Message[Any]],
) -> None:
    try:
        value = await awaitable
    except Exception as error:  # noqa: BLE001 - the actor decides what to make of it
        message = on_error(error)
    else:
        message = on_result(value)
    if cell.exit is None:  # it may have ended in the turn in which this was ready
        cell.post(message)


def _ring(cell: Cell, actor: object, message: Message[Any]) -> None:
    if cell.exit is None and cell.actor is actor:  # a restart ends the timers of the actor before
        cell.post(message)
