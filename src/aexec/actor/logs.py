"""Loggers of the actor core, with what they speak of bound once."""

from __future__ import annotations

from typing import Any

from structlog.stdlib import BoundLogger  # now: the first record is not to hold the program's loop up with an import

from aexec.observe import get_logger

__all__ = ("logger",)


def logger(**bound: Any) -> BoundLogger:
    """A logger with ``bound`` (actor, system, ...) on each of its lines."""
    return get_logger("aexec.actor", **bound)
