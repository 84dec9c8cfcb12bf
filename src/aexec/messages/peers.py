"""What the ranks of an external launcher say to each other, beside the replies of their workers.

Each rank keeps a pair of lines to the first rank of its replica, its **hub**; the first rank of
every other replica keeps one to rank 0 of all. In this order:

1. hub: ``EVENT`` with :class:`Seated`; rank: with its :class:`Cards`, hubs on to rank 0; and back those of all ranks, once they are there.
2. rank: :class:`Present`, once its worker is there; hub: :class:`Assembled`, once all have said so.
3. rank: ``MESSAGE`` under the call's number with a :class:`Called`, for each call, before it runs;
   only where calls are compared.
4. rank: ``REPLY`` or ``FAILURE`` under the call's number and its own rank (:func:`pack_call`),
   with the value or the error; the hub hands it on to the others under the same number. A
   ``REPLY`` of the hub says besides that all have made that call alike; where there is none
   to say it, an ``EVENT`` under the call's number, without a value.
5. rank: ``MESSAGE`` under the number of the round, as a negative one, with the keys that it has; hub:
   ``MESSAGE`` under that number with what came of it, a ``RoundResult``, once all have said theirs.
6. either, on the control line: :class:`Asked` and :class:`Answered`, which the hub hands on.
7. either: :class:`Lost` and :class:`Parted`, which go on to whom they concern.
8. rank: :class:`Departing`; hub: :class:`Departed` to the others, :class:`Farewell` to that one.

A line that breaks before its :class:`Farewell` is a death.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec

from aexec.errors import AexecError, RanksDiverged, WorkerDied
from aexec.messages.base import Message
from aexec.messages.control import Hello

__all__ = (
    "Answered",
    "Asked",
    "Assembled",
    "Called",
    "Cards",
    "Departed",
    "Departing",
    "Farewell",
    "Lost",
    "Parted",
    "Present",
    "Seated",
    "Whereabouts",
    "pack_call",
    "unpack_call",
)

_RANK_BITS = 20


def pack_call(seq: int, rank: int) -> int:
    """The number that a reply travels under.

    >>> unpack_call(pack_call(7, 3))
    (7, 3)
    """
    return seq << _RANK_BITS | rank


def unpack_call(call: int) -> tuple[int, int]:
    """Call and rank of a reply."""
    return call >> _RANK_BITS, call & (1 << _RANK_BITS) - 1


class Called(NamedTuple):
    """A rank makes a call; it travels as a plain tuple.

    Attributes:
        digest: Of all that has to be the same on all ranks.
        text: What it asks for, for people.
        step: The step; None outside of steps.
        answers: This rank does not answer it itself (0), or among others (1), or alone (2): then no reply of
            another will tell it that all have made the call.
    """

    digest: bytes
    text: str
    step: int | None = None
    answers: int = 0


class Seated(msgspec.Struct, frozen=True):
    """Your line is taken: when it ends from now on, something is wrong."""


class Cards(msgspec.Struct, frozen=True):
    """What ranks have to tell all others before anything else; those of ``first``, ``first + 1`` and so on."""

    first: int
    cards: list[Any]


class Present(msgspec.Struct, frozen=True):
    """The worker of this rank is there."""

    hello: Hello


class Assembled(msgspec.Struct, frozen=True):
    """So are all of the replica, in rank order."""

    hellos: list[Hello]


class Asked(msgspec.Struct, frozen=True):
    """A message for one rank, which answers from its loop.

    Attributes:
        source: The rank that asks.
        target: Whom; -1: the hub itself.
        call: The asker's number.
        message: What it asks.
    """

    source: int
    target: int
    call: int
    message: Message[Any]


class Answered(msgspec.Struct, frozen=True):
    """The answer.

    Attributes:
        source: The rank that answers.
        target: The one that has asked.
        call: The asker's number.
        value: The answer, unless there is an error.
        error: Why there is none.
    """

    source: int
    target: int
    call: int
    value: Any = None
    error: AexecError | None = None


class Lost(msgspec.Struct, frozen=True):
    """A rank has ended without a word, or its worker has.

    Attributes:
        rank: Counted over all replicas.
        error: How; its rank is counted likewise.
    """

    rank: int
    error: WorkerDied


class Parted(msgspec.Struct, frozen=True):
    """The ranks of this replica do not do the same."""

    error: RanksDiverged


class Whereabouts(Message[dict[int, str]], frozen=True):
    """For the hub itself: which call has each rank made last?"""


class Departing(msgspec.Struct, frozen=True):
    """This rank is through, and makes no call after number ``last``; ``why``: if something was wrong.

    Before all have their cards, and without a ``why``, it means: I begin anew.
    """

    last: int
    why: str = ""


class Departed(msgspec.Struct, frozen=True):
    """Another rank of the replica is."""

    rank: int
    last: int
    why: str = ""


class Farewell(msgspec.Struct, frozen=True):
    """Your departure is known, or the hub's own is due: the line ends; ``why``: if something was wrong."""

    why: str = ""
