"""Death-watch: an actor is sent a message when another one is over."""

from __future__ import annotations

from functools import partial
from typing import Any

from aexec.actor.cell import Cell
from aexec.actor.lifecycle import Exit
from aexec.actor.ref import Ref
from aexec.errors import UnhandledMessage
from aexec.messages.base import Message

__all__ = ("Terminated", "unwatch", "watch")


class Terminated(Message[None], frozen=True):
    """An actor that was watched is over: ``@handles(Terminated)`` takes it.

    Attributes:
        ref: Its ref.
        exit: Why it ended.
    """

    ref: Ref[Any]
    exit: Exit


def watch(cell: Cell, ref: Ref[Any]) -> None:
    """Have a ``Terminated`` sent to the actor in ``cell`` when the one behind ``ref`` is over.

    Raises:
        UnhandledMessage: The actor has no handler for it.
        ValueError: It is the actor itself.
        WrongLoop: The other one lives on another loop.
    """
    if cell.table.find(Terminated) is None:
        raise UnhandledMessage(cell.name, "Terminated, which watch() sends", cell.table.names)
    other = ref.__cell__()
    if other is cell:
        raise ValueError(f"{cell.name} watches itself: nobody is told of an own end, see on_stop()")
    other.core.check_loop()
    cell.observe(other, partial(_tell, cell, ref))


def unwatch(cell: Cell, ref: Ref[Any]) -> None:
    """Watch no longer."""
    cell.forget(ref.__cell__())


def _tell(cell: Cell, ref: Ref[Any], exit_: Exit) -> None:
    """As soon as there is room: the bound of a mailbox loses no end of an actor."""
    if cell.exit is None:
        cell.post(Terminated(ref, exit_))
