"""The base of all actors."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Any, ClassVar

from aexec.actor.cell import Cell
from aexec.actor.context import Context
from aexec.actor.handlers import build_table
from aexec.actor.lifecycle import Exit
from aexec.actor.ref import Ref
from aexec.actor.states import ActorState, check_states
from aexec.actor.supervision import Directive, Supervision
from aexec.actor.table import HandlerTable

__all__ = ("Actor",)


class Actor:
    """Private state, one bounded mailbox, and a method for each message: see ``handles``.

    A subclass is a plain class, with any constructor. Its handlers run one at a time,
    across their awaits; a subclass of it inherits them, and may override them. Without a
    system, as in a unit test, they may simply be called.

    Attributes:
        states: The states that it moves through, the first one first, for ``when=``
            handlers; none for most actors.
        state: The one it is in; setting it lets in what was postponed until then. An actor
            without ``states`` may use the name for anything.
    """

    states: ClassVar[tuple[str, ...]] = ()
    state: Any

    __handlers__: ClassVar[HandlerTable] = HandlerTable({}, starts=False, stops=False)
    _context: Context | None = None

    supervision: ClassVar[Supervision | None] = None
    """How its children are supervised; None: a tell that fails is logged, and only a failing task ends the child."""

    fatal: ClassVar[tuple[type[BaseException], ...]] = ()
    """Errors after which it cannot be trusted: they end it, whichever handler raises them."""

    self_explanatory: ClassVar[tuple[type[BaseException], ...]] = ()
    """Errors that are the asker's own, or say it all: he gets them without the note which actor raised them."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.__handlers__ = build_table(cls, Actor)
        check_states(cls, cls.states, cls.__handlers__)
        if cls.states:
            cls.state = ActorState()

    def __attach__(self, cell: Cell) -> None:
        """The system's way to say where it lives."""
        self._context = Context(cell)
        if self.states:
            cell.enter(self.state)

    def __entered__(self, state: str) -> None:
        """It has moved to another state."""
        if self._context is not None:
            self._context.__entered__(state)

    def __judge__(self, child: Cell, error: BaseException) -> Directive | Awaitable[Directive | None] | None:
        """The system's way to ask what to do about a child."""
        return self.on_child_failed(Ref(child), error)

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

    def on_child_failed(
        self,
        child: Ref[Any],  # noqa: ARG002 - it is for those who override it
        error: BaseException,  # noqa: ARG002 - the same
    ) -> Directive | Awaitable[Directive | None] | None:
        """Decide what to do about a child that failed; may be an ``async def``.

        A failure is that of a tell, of a task of the child's own, of a child of its, or of
        its next start. A plain method is called at once, beside the handlers. While an
        async one runs the child is suspended; it has the system's ``stop_timeout`` in
        seconds. One that raises, or that takes longer, escalates.

        Args:
            child: The child; it cannot be asked from here, as it waits.
            error: What it failed of.

        Returns:
            What to do; None: what ``supervision`` says, or nothing when there is none.
        """
        return None
