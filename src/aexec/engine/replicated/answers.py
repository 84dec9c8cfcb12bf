"""A reply that is given once, by whoever comes first: an agreement, or the end of somebody's patience."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

from aexec.actor import Deferred

__all__ = ("FirstAnswer",)

R = TypeVar("R")


class FirstAnswer(Generic[R]):
    """Passes the first answer on, and no other.

    Args:
        reply: Takes it.
    """

    __slots__ = ("_reply",)

    def __init__(self, reply: Deferred[R]) -> None:
        self._reply: Deferred[R] | None = reply

    def __repr__(self) -> str:
        return f"<FirstAnswer: {'given' if self._reply is None else repr(self._reply)}>"

    def resolve(self, value: R, /) -> None:
        """Give the reply, if there was none."""
        reply, self._reply = self._reply, None
        if reply is not None:
            reply.resolve(value)

    def fail(self, error: Exception, /) -> None:
        """Raise this at the asker, if there was no reply."""
        reply, self._reply = self._reply, None
        if reply is not None:
            reply.fail(error)

    def on_cancel(self, callback: Callable[[], object], /) -> None:
        """Call this when the asker has gone without a reply."""
        if self._reply is not None:
            self._reply.on_cancel(callback)
