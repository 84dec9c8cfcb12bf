"""What the executor's façade says to its actor, beside the steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from aexec.messages.base import Message
from aexec.messages.lifecycle import HealthReport

__all__ = ("CheckHealth", "Close", "Collective", "Open", "Wake")


class Collective(Message[list[Any]], frozen=True, kw_only=True):
    """Call a worker method on ranks.

    Attributes:
        method: A name, or a callable that takes the worker.
        args: Positional arguments.
        kwargs: Keyword arguments.
        timeout: Seconds; None: no limit.
        ranks: Which, in order.
    """

    method: str | Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    timeout: float | None
    ranks: tuple[int, ...]


class CheckHealth(Message[HealthReport], frozen=True):
    """Ask all ranks for their pulse, and give them ``timeout`` seconds."""

    timeout: float


class Open(Message[None], frozen=True):
    """Bring up the first generation."""


class Close(Message[None], frozen=True):
    """End all calls and all workers."""


class Wake(Message[None], frozen=True):
    """A deadline has passed, or a call has become slow."""
