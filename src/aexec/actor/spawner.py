"""How actors come to be, typed by their constructors."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import ParamSpec, TypeVar

import anyio

from aexec.actor.cell import Cell, Hosted
from aexec.actor.core import Core
from aexec.actor.group import RefGroup
from aexec.actor.place import Place
from aexec.actor.ref import Ref
from aexec.actor.supervision import Supervision
from aexec.actor.traced import TracedCell
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
        supervision: How it is supervised; None: as its parent says.
    """

    __slots__ = ("_core", "_mailbox", "_name", "_parent", "_supervision")

    def __init__(
        self,
        core: Core | None,
        parent: Cell | None = None,
        name: str | None = None,
        mailbox: int | None = None,
        supervision: Supervision | None = None,
    ) -> None:
        self._core: Core | None = core
        self._supervision = supervision
        self._parent, self._name, self._mailbox = parent, name, mailbox

    def using(
        self, *, name: str | None = None, mailbox: int | None = None, supervision: Supervision | None = None
    ) -> Spawner:
        """A spawner with options, as in ``system.using(name="counter", mailbox=64).spawn(Counter)``.

        Args:
            name: Name of the actor, unique among the live ones of the system.
            mailbox: Most messages in its normal lane, and in its urgent lane likewise.
            supervision: How it is supervised, and with whom: all that are spawned by one
                parent (or at the top) under the same object are one group. None: as the
                parent's class says, or not in particular.

        Raises:
            ConfigError: ``mailbox`` is not positive.
        """
        if mailbox is not None and mailbox < 1:
            raise ConfigError(f"mailbox is {mailbox}: expected at least 1, as there are no unbounded mailboxes")
        return Spawner(self._open_core(), self._parent, name, mailbox, supervision)

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
            TypeError: ``actor`` makes no actors.
            Exception: What the constructor or ``on_start`` raised.
        """
        _check_maker(actor)
        name = self._open_core().choose_name(self._name, getattr(actor, "__name__", "actor"))
        cell = self._build(name, partial(actor, *args, **kwargs))
        await cell.start()
        return Ref(cell)

    async def spawn_group(self, size: int, actor: Callable[P, A], /, *args: P.args, **kwargs: P.kwargs) -> RefGroup[A]:
        """Construct ``size`` actors of a kind and start them at the same time.

        Each knows its ``context.rank`` and ``context.size``. When one does not start, none
        is left.

        Args:
            size: How many.
            actor: Their class.
            args: What its constructor takes; all get the same.
            kwargs: The same, by name.

        Returns:
            Their addresses in rank order, once ``on_start`` has returned in all of them;
            the actors are called ``name[0]``, ``name[1]``, ...

        Raises:
            ConfigError: ``size`` is not positive, the name is taken, or the system is not open.
            TypeError: ``actor`` makes no actors.
            Exception: The first that a constructor or ``on_start`` raised.
        """
        if size < 1:
            raise ConfigError(f"size is {size}: a group has at least one member")
        _check_maker(actor)
        name = self._open_core().choose_name(self._name, getattr(actor, "__name__", "actor"))
        cells: list[Cell] = []
        for rank in range(size):
            cell = self._build(self._open_core().choose_name(f"{name}[{rank}]", ""), partial(actor, *args, **kwargs))
            cell.place = Place(rank, size)
            cells.append(cell)
        await _start_all(name, cells)
        return RefGroup([Ref(cell) for cell in cells], name)

    def _build(self, name: str, make: Callable[[], Hosted]) -> Cell:
        core = self._open_core()
        core.check_loop()
        if self._parent is not None and self._parent.exit is not None:
            raise self._parent.exit.as_error(self._parent.name)
        bound = core.mailbox if self._mailbox is None else self._mailbox
        supervision = self._supervision
        if supervision is None and self._parent is not None:
            supervision = self._parent.actor.supervision
        kind = Cell if core.tracer is None else TracedCell
        return kind(core, name, bound, self._parent, supervision, make)

    def _open_core(self) -> Core:
        if self._core is None:
            raise ConfigError("the actor system is not open: use `async with system:` or `await system.open()`")
        if self._core.closing:
            raise ConfigError(f"actor system {self._core.name} was closed: open a new one")
        return self._core


async def _start_all(name: str, cells: list[Cell]) -> None:
    """Start actors at the same time; when one does not start, all others end.

    Raises:
        Exception: What the first one raised that did not start.
    """
    errors: list[Exception] = []

    async def start(cell: Cell) -> None:
        try:
            await cell.start()
        except Exception as error:  # noqa: BLE001 - the first is raised below
            errors.append(error)
            tasks.cancel_scope.cancel()

    all_started = False
    try:
        async with anyio.create_task_group() as tasks:
            for cell in cells:
                tasks.start_soon(start, cell)
        all_started = not errors
    finally:
        if not all_started:
            with anyio.CancelScope(shield=True):  # a cancelled spawner leaves none of them
                await _end_all(name, cells)
    if errors:
        raise errors[0]


async def _end_all(name: str, cells: list[Cell]) -> None:
    for cell in cells:
        cell.request_stop(f"another of its group {name} did not start", cell.core.runtime.now())
    for cell in cells:
        if cell.core.cells.get(cell.name) is cell:
            await cell.closed()


def _check_maker(actor: object) -> None:
    if not callable(actor) or (isinstance(actor, type) and not hasattr(actor, "__handlers__")):
        raise TypeError(
            f"what is to be spawned is {actor!r}: expected a class of actors, with what its constructor takes behind "
            "it, as in spawn(Counter, 5)"
        )
