"""Finds actors by address, and stands in for those that are not here.

A ref pickles as its address. Where it is unpickled, the actor may have ended, its system
may be closed, or it lives in another process: then whatever is sent to it says so.
"""

from __future__ import annotations

import weakref
from typing import Any, NoReturn, cast

from aexec.actor.cell import Cell
from aexec.actor.core import Core
from aexec.actor.lifecycle import Exit, LifecycleState
from aexec.actor.runtime import Runtime

__all__ = ("Absent", "find_cell", "open_cores", "register", "unregister")

_open: weakref.WeakValueDictionary[str, Core] = weakref.WeakValueDictionary()


class _NoLoop:
    """Of a runtime, what is used before a message is refused."""

    is_here = True
    time_slice = 0.0

    def now(self) -> float:
        return 0.0

    def promise(self) -> None:
        return None


class Absent(Cell):
    """In place of the cell of an actor that cannot be reached; dead from the beginning.

    Args:
        address: The actor's address.
        reason: Why it cannot be reached.
    """

    __slots__ = ()

    def __init__(self, address: str, reason: str) -> None:
        core = Core("absent", cast("Runtime", _NoLoop()), timeout=None, mailbox=1, stop_timeout=1.0)
        super().__init__(core, address.rpartition("/")[2], 1, None, None, self._letter)
        self.address, self.state, self.exit = address, LifecycleState.DEAD, Exit("killed", reason)

    def _letter(self, *_: Any, **__: Any) -> NoReturn:
        """Refuse a message.

        Raises:
            ActorDied: Always; says where the actor is not.
        """
        assert self.exit is not None
        raise self.exit.as_error(self.name)


def register(core: Core) -> None:
    """A system is open: addresses may lead to it."""
    _open[core.uid] = core


def unregister(core: Core) -> None:
    """A system is closed."""
    _open.pop(core.uid, None)


def open_cores() -> list[Core]:
    """The systems that are open in this process, of all its loops."""
    return list(_open.values())


def find_cell(address: str) -> Cell:
    """The cell at an address, in any system that is open in this process."""
    core = next((core for uid, core in _open.items() if address.startswith(f"{uid}/")), None)
    if core is None:
        return Absent(address, f"{address} is in a system that was closed, or that lives in another process")
    name = address.removeprefix(f"{core.uid}/").partition("/")[2]
    cell = core.cells.get(name)
    if cell is None or cell.address != address:
        return Absent(address, f"{address} has ended; its system {core.name} is open")
    return cell
