"""What happens to the actors of a system, as records: ``async for event in system.events()``."""

from __future__ import annotations

from typing import Literal

from aexec.actor.deadletters import DeadLetterKind
from aexec.observe import Event

__all__ = ("ActorEvent", "DeadLettered", "Escalated", "Exited", "Restarted", "Spawned")


class ActorEvent(Event, frozen=True, kw_only=True):
    """Base of all of them.

    Attributes:
        actor: The actor's name.
    """

    actor: str


class Spawned(ActorEvent, frozen=True, kw_only=True):
    """An actor has started for the first time.

    Attributes:
        parent: Name of the actor that spawned it; None: it is at the top.
    """

    parent: str | None


class Restarted(ActorEvent, frozen=True, kw_only=True):
    """A new incarnation of an actor has started.

    Attributes:
        generation: Which one, from 1.
        reason: Why the one before ended.
    """

    generation: int
    reason: str


class Escalated(ActorEvent, frozen=True, kw_only=True):
    """A failure was more than the actor's supervisor would deal with.

    Attributes:
        parent: Name of the supervisor, which has failed in its stead; None: the actor was
            at the top, so that it ends and nothing else.
        reason: The failure, in words.
    """

    parent: str | None
    reason: str


class Exited(ActorEvent, frozen=True, kw_only=True):
    """An actor that had started is over.

    Attributes:
        how: ``stopped``, ``failed`` or ``killed``, as in ``Exit.kind``.
        reason: The same in words.
    """

    how: Literal["stopped", "failed", "killed"]
    reason: str


class DeadLettered(ActorEvent, frozen=True, kw_only=True):
    """Messages came to nothing; the first of a cause, and then one record in a while.

    Attributes:
        cause: What became of them; see ``DeadLetterCounts``.
        message: The type of the latest one.
        so_far: How many there were of this cause, in the system's life.
    """

    cause: DeadLetterKind
    message: str
    so_far: int
