"""Faults of actors, as values: what is to go wrong between an actor's mailbox and its handler.

::

    faults.inject(ref, faults.Raise(ValueError("no")), kind=Increment, times=1)

A fault strikes messages that are sent after it was injected, until it has struck so many
times or is removed, and in every incarnation of the actor. An actor without faults pays
nothing for them.
"""

from __future__ import annotations

import abc
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Self

import anyio

from aexec.actor import Actor, Ref
from aexec.actor.absent import Absent, find_cell
from aexec.actor.cell import Cell
from aexec.actor.supervision import Trouble
from aexec.actor.table import Handler, HandlerTable
from aexec.errors import ActorError, ConfigError
from aexec.messages.base import AnyMessage

__all__ = ("Delay", "Die", "Drop", "Fault", "Hang", "Hit", "Injected", "Injection", "Raise", "inject")


class Injected(ActorError):
    """What an actor fails of when a test wants it to."""


@dataclass(frozen=True, slots=True)
class Hit:
    """A message that a fault strikes.

    Attributes:
        actor: The actor.
        cell: Its place in its system.
        message: The message.
        proceed: Handles the message after all; what it returns is the reply.
    """

    actor: Actor
    cell: Cell
    message: AnyMessage
    proceed: Callable[[], Awaitable[Any]]


class Fault(abc.ABC):
    """What goes wrong with a message; a subclass may be anybody's."""

    @abc.abstractmethod
    async def strike(self, hit: Hit) -> Any:
        """Do this in place of the handler; what is returned is the reply."""


@dataclass(frozen=True, slots=True)
class Raise(Fault):
    """The handler raises.

    Attributes:
        error: What it raises.
    """

    error: Exception

    async def strike(self, hit: Hit) -> Any:  # noqa: ARG002 - it is the contract's
        """Raise it.

        Raises:
            Exception: The error.
        """
        raise self.error


@dataclass(frozen=True, slots=True)
class Delay(Fault):
    """The message is handled later, and all behind it with it.

    Attributes:
        seconds: How much later, by the system's clock.
    """

    seconds: float

    async def strike(self, hit: Hit) -> Any:
        """Wait, and handle the message."""
        await hit.actor.context.sleep(self.seconds)
        return await hit.proceed()


@dataclass(frozen=True, slots=True)
class Hang(Fault):
    """The handler never returns: until its asker gives up, or the actor ends."""

    async def strike(self, hit: Hit) -> Any:  # noqa: ARG002 - it is the contract's
        """Wait for ever."""
        await anyio.sleep_forever()


@dataclass(frozen=True, slots=True)
class Drop(Fault):
    """The message is lost: nothing is done, and its asker hears nothing."""

    async def strike(self, hit: Hit) -> Any:
        """Do nothing."""
        reply = hit.actor.context.defer()
        if not reply.is_awaited:
            return None
        # The callback keeps the reply, which would be refused if nobody did, until its asker has gone.
        reply.on_cancel(lambda: reply.fail(Injected(f"{reply.call} was dropped")))
        return reply


@dataclass(frozen=True, slots=True)
class Die(Fault):
    """The actor fails while the message is in hand; its supervisor decides what becomes of it.

    Attributes:
        error: What it fails of.
    """

    error: Exception = field(default_factory=lambda: Injected("a test wanted it to die"))

    async def strike(self, hit: Hit) -> Any:
        """Let the actor fail; who asked hears ``ActorDied``, or ``ActorRestarted``."""
        hit.cell.judge(self.error, Trouble.TASK)
        await anyio.sleep_forever()


class Injection:
    """A fault in an actor; made by :func:`inject`, and removed at the end of a ``with`` block.

    Attributes:
        fault: What goes wrong.
        struck: How many messages it has struck.
    """

    def __init__(self, fault: Fault, kind: type[AnyMessage], times: int | None) -> None:
        self.fault, self._kind, self._left = fault, kind, times
        self.struck = 0

    def __repr__(self) -> str:
        left = "no end" if self._left is None else f"{self._left} left"
        return f"<Injection {self.fault!r} on {self._kind.__name__}: {self.struck} struck, {left}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def remove(self) -> None:
        """Strike no more."""
        self._left = 0

    def take(self, message: AnyMessage) -> bool:
        """True when it strikes this message."""
        if self._left == 0 or not isinstance(message, self._kind):
            return False
        self.struck += 1
        if self._left is not None:
            self._left -= 1
        return True


class _FaultyTable(HandlerTable):
    """The handlers of an actor, with faults before them."""

    __slots__ = ("_cell", "_faulty", "_inner", "injections")

    def __init__(self, inner: HandlerTable, cell: Cell, injections: list[Injection]) -> None:
        super().__init__({}, starts=inner.starts, stops=inner.stops)
        self._inner, self._cell, self.injections = inner, cell, injections
        self._faulty: dict[Handler, Handler] = {}

    def __iter__(self) -> Iterator[Handler]:
        return iter(self._inner)

    def renew(self, table: HandlerTable) -> HandlerTable:
        return _FaultyTable(table, self._cell, self.injections)

    def find(self, kind: type) -> Handler | None:
        return self._wrap(self._inner.find(kind))

    def find_stream(self, kind: type) -> Handler | None:
        return self._wrap(self._inner.find_stream(kind))

    def _wrap(self, handler: Handler | None) -> Handler | None:
        if handler is None:
            return None
        faulty = self._faulty.get(handler)
        if faulty is None:
            faulty = self._faulty[handler] = replace(handler, function=self._prefix(handler), is_async=True)
        return faulty

    def _prefix(self, handler: Handler) -> Callable[[Any, Any], Awaitable[Any]]:
        async def run(actor: Any, message: AnyMessage) -> Any:
            async def proceed() -> Any:
                result = handler.function(actor, message)
                return await result if handler.is_async else result

            injection = next((one for one in self.injections if one.take(message)), None)
            if injection is None:
                return await proceed()
            return await injection.fault.strike(Hit(actor, self._cell, message, proceed))

        return run


def inject(ref: Ref[Any], fault: Fault, *, kind: type[AnyMessage] = AnyMessage, times: int | None = None) -> Injection:
    """Let something go wrong in an actor.

    Of several faults in one actor the first that fits a message strikes it.

    Args:
        ref: The actor.
        fault: What goes wrong.
        kind: The type of the messages it strikes, or a base of it.
        times: How many messages it strikes; None: all of them.

    Raises:
        ConfigError: ``times`` is not positive, ``fault`` is none, the actor is not here, or has no handler for ``kind``.
    """
    if not hasattr(fault, "strike"):
        raise ConfigError(f"fault is {fault!r}: expected one as faults.Raise(error) or faults.Hang()")
    if times is not None and times < 1:
        raise ConfigError(f"times is {times}: expected at least 1, or None for no end")
    cell = find_cell(ref.address)
    if isinstance(cell, Absent):
        raise ConfigError(f"no fault can be injected into {ref.name}: {cell.exit and cell.exit.reason}")
    if cell.table.find(kind) is None and not any(issubclass(handler.kind, kind) for handler in cell.table):
        raise ConfigError(f"{ref.name} has no handler for {kind.__name__}; it handles {', '.join(cell.table.names)}")
    table = cell.table
    if not isinstance(table, _FaultyTable):
        cell.table = table = _FaultyTable(table, cell, [])
    injection = Injection(fault, kind, times)
    table.injections.append(injection)
    return injection
