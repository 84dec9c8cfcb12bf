"""The life of an actor, as a table; pure.

An actor starts, runs, ends, and is over. It ends in one of two ways: because it was told
to (stopping), or because something broke (failing). While it ends its mailbox is closed,
its children end, then ``on_stop`` runs, and after that nobody waits for it any longer.

A failure need not be the end. While its supervisor thinks about one the actor is
suspended; between two incarnations it is restarting. Its mailbox stays open in both.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Literal

from aexec.errors import ActorDied, ActorStopped

__all__ = ("ALIVE", "OVER", "TRANSITIONS", "Exit", "LifecycleEvent", "LifecycleState")


class LifecycleState(enum.Enum):
    """Where an actor is in its life."""

    STARTING = "starting"
    RUNNING = "running"
    SUSPENDED = "suspended"
    RESTARTING = "restarting"
    STOPPING = "stopping"
    FAILING = "failing"
    STOPPED = "stopped"
    DEAD = "dead"


class LifecycleEvent(enum.Enum):
    """What can happen to it."""

    STARTED = "on_start returned"
    SUSPEND = "something failed, and its supervisor has to think"
    RESUME = "its supervisor lets it go on"
    RESTART = "its supervisor wants a new incarnation"
    STOP = "somebody asked it to stop"
    FAIL = "something broke, or its task was cancelled from outside"
    ENDED = "children, on_stop and waiters are done with"


TRANSITIONS: dict[LifecycleState, dict[LifecycleEvent, LifecycleState]] = {
    LifecycleState.STARTING: {
        LifecycleEvent.STARTED: LifecycleState.RUNNING,
        LifecycleEvent.STOP: LifecycleState.STOPPING,
        LifecycleEvent.FAIL: LifecycleState.FAILING,
    },
    LifecycleState.RUNNING: {
        LifecycleEvent.SUSPEND: LifecycleState.SUSPENDED,
        LifecycleEvent.RESTART: LifecycleState.RESTARTING,
        LifecycleEvent.STOP: LifecycleState.STOPPING,
        LifecycleEvent.FAIL: LifecycleState.FAILING,
    },
    LifecycleState.SUSPENDED: {
        LifecycleEvent.RESUME: LifecycleState.RUNNING,
        LifecycleEvent.RESTART: LifecycleState.RESTARTING,
        LifecycleEvent.STOP: LifecycleState.STOPPING,
        LifecycleEvent.FAIL: LifecycleState.FAILING,
    },
    LifecycleState.RESTARTING: {
        LifecycleEvent.STARTED: LifecycleState.RUNNING,
        LifecycleEvent.STOP: LifecycleState.STOPPING,
        LifecycleEvent.FAIL: LifecycleState.FAILING,
    },
    LifecycleState.STOPPING: {
        LifecycleEvent.FAIL: LifecycleState.FAILING,
        LifecycleEvent.ENDED: LifecycleState.STOPPED,
    },
    LifecycleState.FAILING: {LifecycleEvent.ENDED: LifecycleState.DEAD},
    LifecycleState.STOPPED: {},
    LifecycleState.DEAD: {},
}

ALIVE = frozenset(state for state, events in TRANSITIONS.items() if LifecycleEvent.STOP in events)
OVER = frozenset(state for state, events in TRANSITIONS.items() if not events)


@dataclass(frozen=True, slots=True)
class Exit:
    """Why an actor ended.

    Attributes:
        kind: ``stopped``: it was told to. ``failed``: an error ended it. ``killed``: it
            was cut short, as its time to stop was up or its task was cancelled.
        reason: The same in words, for people.
        error: What ended it, when an error did.
    """

    kind: Literal["stopped", "failed", "killed"]
    reason: str
    error: BaseException | None = None

    def as_error(self, actor: str) -> ActorDied:
        """What is raised to those who wait for ``actor``, the failure as its cause."""
        kind = ActorStopped if self.kind == "stopped" else ActorDied
        raised = kind(actor, self.reason)
        raised.__cause__ = self.error
        return raised
