"""What the executor's façade says to its actor, beside the steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from aexec.messages.base import Message
from aexec.messages.lifecycle import HealthReport, RoundResult
from aexec.messages.operations import PauseMode

__all__ = (
    "Agree",
    "CheckHealth",
    "Close",
    "Collective",
    "Open",
    "Pause",
    "Resume",
    "Sleep",
    "Stacks",
    "Wake",
    "WakeUp",
    "WeightsLoaded",
)


class Collective(Message[list[Any]], frozen=True, kw_only=True):
    """Call a worker method on ranks.

    Attributes:
        method: A name, or a callable that takes the worker.
        args: Positional arguments.
        kwargs: Keyword arguments.
        timeout: Seconds; None: no limit.
        ranks: Which, in order.
        reply_rank: The only one whose reply is wanted; None: all.
    """

    method: str | Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    timeout: float | None
    ranks: tuple[int, ...]
    reply_rank: int | None = None


class Agree(Message[RoundResult], frozen=True):
    """Find out what all processes of a replicated executor say, within ``timeout`` seconds."""

    keys: tuple[str, ...]
    timeout: float


class CheckHealth(Message[HealthReport], frozen=True):
    """Ask all ranks for their pulse, and give them ``timeout`` seconds."""

    timeout: float


class Open(Message[None], frozen=True):
    """Bring up the first generation."""


class Close(Message[None], frozen=True):
    """End all calls and all workers, after ``drain`` seconds at most for what runs."""

    drain: float = 0.0


class Sleep(Message[list[Any]], frozen=True):
    """Let go of memory on all ranks; ``timeout`` in seconds, None: no limit."""

    level: int
    timeout: float | None


class WakeUp(Message[list[Any]], frozen=True):
    """Bring back what sleeps, of these tags; None: all of it."""

    tags: tuple[str, ...] | None
    timeout: float | None


class WeightsLoaded(Message[None], frozen=True):
    """All ranks have whole weights."""


class Pause(Message[None], frozen=True):
    """Send no more steps; see ``gate.PauseMode``."""

    mode: PauseMode
    timeout: float | None


class Resume(Message[None], frozen=True):
    """Send steps again."""


class Stacks(Message[dict[int, str]], frozen=True):
    """Ask all ranks where they are, and give them ``timeout`` seconds."""

    timeout: float


class Wake(Message[None], frozen=True):
    """A deadline has passed, or a call has become slow."""
