"""The figures of actors and systems, typed; ``repr`` prints the same facts."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ("ActorStatistics", "DeadLetterCounts", "MailboxStatistics", "SystemStatistics")


class MailboxStatistics(NamedTuple):
    """One mailbox at one moment.

    Attributes:
        queued: Messages in the normal lane, those held back for a ``concurrent=`` slot or a state among them.
        urgent: Messages in the urgent lane.
        system: Signals in the system lane.
        bound: Most messages that the normal lane takes, and the urgent lane likewise.
        waiting: Senders and timers that wait for room.
        postponed: Messages of both lanes that wait for a state of the actor.
    """

    queued: int
    urgent: int
    system: int
    bound: int
    waiting: int
    postponed: int = 0


class ActorStatistics(NamedTuple):
    """One actor at one moment.

    Attributes:
        name: Its name.
        state: Where it is in its life, as in ``running``.
        generation: Which incarnation, from 1.
        restarts: Incarnations before this one.
        mailbox: Its mailbox.
        in_hand: Handlers that have begun and not ended.
        deferred: Replies that it still owes.
        handled: Messages whose handler returned.
        failed: Messages whose handler raised.
        cancelled: Handlers that were cancelled with their asker.
        busy_seconds: Seconds spent in handlers, their awaits included.
        oldest_seconds: Age of the oldest message that waits, in seconds; 0 without one.
    """

    name: str
    state: str
    generation: int
    restarts: int
    mailbox: MailboxStatistics
    in_hand: int
    deferred: int
    handled: int
    failed: int
    cancelled: int
    busy_seconds: float
    oldest_seconds: float


class DeadLetterCounts(NamedTuple):
    """Messages that came to nothing, by cause.

    Attributes:
        closed: The actor had ended, or ended before it came to them.
        expired: Their deadline passed before they were started.
        cancelled: Their caller had gone before they were started.
        full: There was no room, and the sender did not want to wait.
        undeliverable: The actor has no handler for them.
        no_reply: A handler deferred its reply and dropped it.
    """

    closed: int = 0
    expired: int = 0
    cancelled: int = 0
    full: int = 0
    undeliverable: int = 0
    no_reply: int = 0


class SystemStatistics(NamedTuple):
    """One actor system at one moment.

    Attributes:
        name: Its name.
        state: ``new``, ``open``, ``closing`` or ``closed``.
        actors: Actors that are not over.
        spawned: Actors that were ever spawned.
        sent: Messages that were ever sent, tells and asks.
        deadlines: Deadlines and timers that are held.
        late_replies: Replies that came after their asker had gone; counted and dropped.
        dead_letters: Messages that came to nothing.
    """

    name: str
    state: str
    actors: int = 0
    spawned: int = 0
    sent: int = 0
    deadlines: int = 0
    late_replies: int = 0
    dead_letters: DeadLetterCounts = DeadLetterCounts()
