"""Where a ref leads to that was unpickled and whose actor is not here."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, NoReturn

from aexec.actor.core import Core
from aexec.actor.lifecycle import Exit, LifecycleState
from aexec.actor.mailbox import Mailbox
from aexec.actor.statistics import ActorStatistics
from aexec.errors import ActorDied

if TYPE_CHECKING:
    from aexec.actor.cell import Cell

__all__ = ("Absent", "find_cell", "register", "unregister")

_open: weakref.WeakValueDictionary[str, Core] = weakref.WeakValueDictionary()


class Absent:
    """In place of a cell: whatever is asked of it, it says why the actor cannot be reached.

    Args:
        address: The actor's address.
        reason: Why it is not here.
    """

    __slots__ = ("address", "exit", "generation", "mailbox", "name", "state")

    def __init__(self, address: str, reason: str) -> None:
        self.address, self.name = address, address.rpartition("/")[2]
        self.exit = Exit("killed", reason)
        self.state = LifecycleState.DEAD
        self.generation = 0
        self.mailbox = Mailbox(self.name, 1)

    def __repr__(self) -> str:
        return f"<Absent {self.address}: {self.exit.reason}>"

    def ask(self, *_: Any) -> NoReturn:
        """Refuse.

        Raises:
            ActorDied: Always; says which system is meant.
        """
        raise ActorDied(self.name, self.exit.reason)

    post = tell_nowait = ask_for = ask

    def statistics(self) -> ActorStatistics:
        """None of its figures are known here."""
        return ActorStatistics(self.name, self.state.value, 0, 0, self.mailbox.statistics(), 0, 0, 0, 0, 0, 0.0, 0.0)

    async def closed(self) -> Exit:
        """It is not here, so that nobody has to wait."""
        return self.exit


def register(core: Core) -> None:
    """A system is open: unpickled refs may lead to it."""
    _open[core.uid] = core


def unregister(core: Core) -> None:
    """A system is closed."""
    _open.pop(core.uid, None)


def find_cell(address: str) -> Cell | Absent:
    """The cell at an address, in any system that is open in this process."""
    uid, _, name = address.partition("/")[0], None, address.rpartition("/")[2]
    core = _open.get(uid)
    if core is None:
        return Absent(address, f"its system {uid} is closed, or was opened in another process")
    cell = core.cells.get(name)
    if cell is None or cell.address != address:
        return Absent(address, f"it has ended, in system {uid}")
    return cell
