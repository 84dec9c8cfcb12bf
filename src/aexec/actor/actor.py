"""The base of all actors."""

from __future__ import annotations

from typing import Any, ClassVar

from aexec.actor.cell import Cell
from aexec.actor.context import Context
from aexec.actor.handlers import build_table
from aexec.actor.lifecycle import Exit
from aexec.actor.table import HandlerTable

__all__ = ("Actor",)


class Actor:
    """Private state, one bounded mailbox, and a method for each message: see ``handles``.

    A subclass is a plain class, with any constructor. Its handlers run one at a time,
    across their awaits; a subclass of it inherits them, and may override them. Without a
    system, as in a unit test, they may simply be called.
    """

    __handlers__: ClassVar[HandlerTable] = HandlerTable({}, starts=False, stops=False)
    _context: Context | None = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.__handlers__ = build_table(cls, Actor)

    def __attach__(self, cell: Cell) -> None:
        """The system's way to say where it lives."""
        self._context = Context(cell)

    @property
    def context(self) -> Context:
        """Its surroundings: own address, children, tasks, timers, log.

        Raises:
            RuntimeError: It was not spawned; in a constructor it is not there yet.
        """
        if self._context is None:
            raise RuntimeError(
                f"{type(self).__name__} has no context: it is there from on_start on, once a system has spawned it"
            )
        return self._context

    async def on_start(self) -> None:
        """Before the first message; what it raises, ``spawn`` raises, and ``on_stop`` is not called."""

    async def on_stop(self, reason: Exit) -> None:
        """After the last message and the end of all children.

        It has the system's ``stop_timeout`` in seconds, and is not cancelled before.

        Args:
            reason: Why it ends.
        """
