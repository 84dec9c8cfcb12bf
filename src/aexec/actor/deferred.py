"""A reply that comes later than its handler returns; the mailbox goes on meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar, final

from aexec.actor.envelope import Envelope, Stage

__all__ = ("Debtor", "Deferred")

R = TypeVar("R")


class Debtor(Protocol):
    """The actor that owes the reply: ``cell.Cell``."""

    def resolve(self, envelope: Envelope, value: Any, /) -> None:
        """Reply to an ask."""
        ...

    def reject_late(self, envelope: Envelope, error: BaseException, /) -> None:
        """Raise an error at an asker, after its handler has returned."""
        ...

    def reply_dropped(self, envelope: Envelope, /) -> None:
        """The reply will never be given; called from any thread."""
        ...

    def call_guarded(self, callback: Callable[[], object], /) -> None:
        """Call something of the user's; what it raises is logged."""
        ...


@final
class Deferred(Generic[R]):
    """The reply to the message in hand, to be given later; made by ``Context.defer``.

    A handler returns it, and keeps it to :meth:`resolve` or :meth:`fail` it once, from
    the loop (``system.call_soon_threadsafe(reply.resolve, value)`` from elsewhere). One
    that is dropped without either ends its ask with an error, at once.
    """

    __slots__ = ("_answered", "_cell", "_envelope")

    def __init__(self, cell: Debtor, envelope: Envelope) -> None:
        self._cell, self._envelope, self._answered = cell, envelope, False

    def __repr__(self) -> str:
        state = "answered" if self._answered else "awaited" if self.is_awaited else "its asker has gone"
        return f"<Deferred {self.call}: {state}>"

    @property
    def call(self) -> str:
        """What it is the reply to, in words."""
        return self._envelope.call

    @property
    def is_awaited(self) -> bool:
        """True while an asker waits for it."""
        reply = self._envelope.reply
        return reply is not None and not reply.done()

    def is_for(self, envelope: Envelope) -> bool:
        """True when it answers ``envelope``."""
        return self._envelope is envelope

    def resolve(self, value: R) -> None:
        """Give the reply; one that comes after its asker has gone is counted and dropped.

        Raises:
            RuntimeError: It was answered before.
        """
        if self._answered:
            raise self._twice()
        self._answered = True
        self._cell.resolve(self._envelope, value)

    def fail(self, error: BaseException) -> None:
        """Raise ``error`` at the asker.

        Raises:
            RuntimeError: It was answered before.
        """
        if self._answered:
            raise self._twice()
        self._answered = True
        self._cell.reject_late(self._envelope, error)

    def on_cancel(self, callback: Callable[[], object]) -> None:
        """Call this once when the asker is cancelled or its deadline passes; at once if it has."""
        envelope = self._envelope
        if self._answered or envelope.reply is None:
            return
        if envelope.reply.done():
            self._cell.call_guarded(callback)
        elif envelope.on_gone is None:
            envelope.on_gone = [callback]
        else:
            envelope.on_gone.append(callback)

    def _twice(self) -> RuntimeError:
        return RuntimeError(f"the reply to {self.call} was given already: resolve() or fail() it once")

    def __del__(self) -> None:
        if not self._answered and self._envelope.stage is Stage.DEFERRED:
            self._cell.reply_dropped(self._envelope)
