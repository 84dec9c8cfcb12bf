"""What surrounds a message on its way, and what a message inherits from where it is sent.

A context variable holds the envelope whose handler runs: asks that the handler makes,
and those of tasks that it starts, inherit its deadline (the lesser wins), its trace
context, and the chain of actors that wait for it.
"""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Callable, Generator
from contextvars import ContextVar
from typing import Any, Final, Protocol

import msgspec

from aexec.actor.runtime import Promise, Section
from aexec.actor.table import Handler
from aexec.messages.base import AnyMessage

__all__ = ("Envelope", "Hop", "Origin", "Stage", "here", "seal", "trace_context")


class Stage(enum.Enum):
    """How far an envelope has come."""

    WAITING = "waits for room in the mailbox"
    QUEUED = "is in the mailbox"
    HELD = "is in the mailbox, and waits for a concurrent= slot"
    POSTPONED = "is in the mailbox, and waits for a state of its actor"
    RUNNING = "its handler runs"
    DEFERRED = "its reply was put off"
    OVER = "nothing more will come of it"


_OVER: Final = Stage.OVER  # looked up for each message, which takes an enum's member 70 ns


class Hop(Protocol):
    """An actor on the way of a message: ``cell.Cell``."""

    name: str
    address: str
    generation: int

    def expire(self, envelope: Envelope, limit: float, /) -> None:
        """The deadline of a message for this actor has passed, ``limit`` seconds after it was sent."""
        ...


class Origin:
    """Where a message is sent from when that is not a handler.

    Attributes:
        cell: The sending actor; None outside of actors.
        callers: Addresses of the actors that wait for what is done here.
        deadline: Until when, in monotonic seconds; None: no limit.
        traceparent: The W3C trace context.
    """

    __slots__ = ("callers", "cell", "deadline", "traceparent")

    def __init__(
        self,
        cell: Hop | None,
        callers: tuple[str, ...] = (),
        deadline: float | None = None,
        traceparent: str | None = None,
    ) -> None:
        self.cell, self.callers, self.deadline, self.traceparent = cell, callers, deadline, traceparent


class Envelope(msgspec.Struct, eq=False):
    """A message on its way to ``cell``; a struct, as that takes half the time to make.

    Attributes:
        id: Its correlation id, unique in its system.
        message: The message; None once it is over, for an idle actor holds on to nothing.
        handler: The handler it is for.
        cell: The actor it is for.
        sender: The actor it is from; None outside of actors.
        generation: The incarnation of the actor it was sent to.
        sent_at: When, in monotonic seconds.
        deadline: Until when its asker waits, in monotonic seconds; None: no limit.
        limit: Seconds from ``sent_at`` to the deadline that the system's heap holds, of the
            asker or of a teller that waits for room; None when it holds none.
        chain: Addresses of the actors that wait for the reply, first asker first.
        traceparent: The W3C trace context.
        reply: What the asker awaits; None for a tell.
        admitted: What a teller awaits while there is no room.
        stage: How far it has come.
        section: Where its ``async def`` handler runs.
        on_gone: Called, in order, when its asker has gone before it was answered.
    """

    id: int
    message: AnyMessage | None
    handler: Handler
    cell: Hop
    generation: int
    sent_at: float
    reply: Promise[Any] | None
    sender: Hop | None = None
    traceparent: str | None = None
    chain: tuple[str, ...] = ()
    deadline: float | None = None
    limit: float | None = None
    admitted: Promise[None] | None = None
    stage: Stage = Stage.QUEUED
    section: Section | None = None
    on_gone: list[Callable[[], object]] | None = None

    def __repr__(self) -> str:
        verb = "tell" if self.reply is None else "ask"
        return f"<Envelope {self.id}: {verb} {self.call}, {self.stage.value}>"

    @property
    def call(self) -> str:
        """What it is, in words."""
        return f"{self.handler.kind.__name__} to {self.cell.name}"

    @property
    def callers(self) -> tuple[str, ...]:
        """Addresses of the actors that wait for what is done on its behalf.

        Its own actor is free again once the handler has returned, so that a task which the
        handler has left behind may ask it.
        """
        return (*self.chain, self.cell.address) if self.stage is Stage.RUNNING else self.chain

    def finish(self) -> None:
        """Let go of all that an idle actor should not hold on to."""
        self.stage = _OVER
        self.message = self.reply = self.deadline = None
        if self.chain:  # a look is cheaper than an assignment, and few have any of these
            self.chain = ()
        if self.on_gone is not None:
            self.on_gone = None
        if self.admitted is not None:
            self.admitted = None

    def is_over(self) -> bool:
        """True when its deadline has lost its meaning."""
        promise = self.reply or self.admitted
        return promise is None or promise.done()

    def expire(self) -> None:
        """Its deadline has passed."""
        limit, self.limit = self.limit, None
        assert limit is not None
        self.cell.expire(self, limit)


def seal(
    number: int,
    message: AnyMessage,
    handler: Handler,
    cell: Hop,
    sent_at: float,
    origin: Envelope | Origin | None,
    reply: Promise[Any] | None,
) -> Envelope:
    """Put a message into an envelope, with what it inherits from where it is sent."""
    if origin is None:
        return Envelope(number, message, handler, cell, cell.generation, sent_at, reply)
    sender, trace = origin.cell, origin.traceparent
    if reply is None:  # nobody waits for what a tell sets off
        return Envelope(number, message, handler, cell, cell.generation, sent_at, reply, sender, trace)
    chain, deadline = origin.callers, origin.deadline
    return Envelope(number, message, handler, cell, cell.generation, sent_at, reply, sender, trace, chain, deadline)


here: ContextVar[Envelope | Origin | None] = ContextVar("here", default=None)


@contextlib.contextmanager
def trace_context(traceparent: str) -> Generator[None, None, None]:
    """Send messages under a W3C ``traceparent``, as a server does with that of its request."""
    now = here.get()
    origin = (
        Origin(None, traceparent=traceparent)
        if now is None
        else Origin(now.cell, now.callers, now.deadline, traceparent)
    )
    token = here.set(origin)
    try:
        yield
    finally:
        here.reset(token)
