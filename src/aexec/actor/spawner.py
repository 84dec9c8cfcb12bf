"""How actors come to be, typed by their constructors."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import ParamSpec, TypeVar

from aexec.actor.cell import Cell, Hosted
from aexec.actor.core import Core
from aexec.actor.ref import Ref
from aexec.errors import ConfigError

__all__ = ("Spawner",)

A = TypeVar("A", bound=Hosted)
P = ParamSpec("P")


class Spawner:
    """Spawns actors: an actor system (at the top), a context (children), or what ``using`` returns.

    Args:
        core: What the actors of the system share; None while the system is not open.
        parent: The actor whose children they are; None: the system's own.
        name: Name of the next actor; None: made from its class.
        mailbox: Bound of its mailbox; None: the system's default.
    """

    __slots__ = ("_core", "_mailbox", "_name", "_parent")

    def __init__(
        self, core: Core | None, parent: Cell | None = None, name: str | None = None, mailbox: int | None = None
    ) -> None:
        self._core: Core | None = core
        self._parent, self._name, self._mailbox = parent, name, mailbox

    def using(self, *, name: str | None = None, mailbox: int | None = None) -> Spawner:
        """A spawner with options, as in ``system.using(name="counter", mailbox=64).spawn(Counter)``.

        Args:
            name: Name of the actor, unique among the live ones of the system.
            mailbox: Most messages in its normal lane, and in its urgent lane likewise.

        Raises:
            ConfigError: ``mailbox`` is not positive.
        """
        if mailbox is not None and mailbox < 1:
            raise ConfigError(f"mailbox is {mailbox}: expected at least 1, as there are no unbounded mailboxes")
        return Spawner(self._open_core(), self._parent, name, mailbox)

    async def spawn(self, actor: Callable[P, A], /, *args: P.args, **kwargs: P.kwargs) -> Ref[A]:
        """Construct an actor and start it.

        Args:
            actor: Its class.
            args: What its constructor takes.
            kwargs: The same, by name.

        Returns:
            Its address, once ``on_start`` has returned.

        Raises:
            ConfigError: The name is taken, or the system is not open.
            Exception: What the constructor or ``on_start`` raised.
        """
        core = self._open_core()
        core.check_loop()
        if self._parent is not None and self._parent.exit is not None:
            raise self._parent.exit.as_error(self._parent.name)
        name = core.choose_name(self._name, getattr(actor, "__name__", "actor"))
        bound = core.mailbox if self._mailbox is None else self._mailbox
        cell = Cell(core, name, bound, self._parent, partial(actor, *args, **kwargs))
        await cell.start()
        return Ref(cell)

    def _open_core(self) -> Core:
        if self._core is None:
            raise ConfigError("the actor system is not open: use `async with system:` or `await system.open()`")
        if self._core.closing:
            raise ConfigError(f"actor system {self._core.name} was closed: open a new one")
        return self._core
