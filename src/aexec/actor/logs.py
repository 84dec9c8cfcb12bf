"""Loggers of the actor core, with what they speak of bound once."""

from __future__ import annotations

from typing import Any

from aexec.observe import BoundLogger, get_logger

__all__ = ("logger",)


def logger(**bound: Any) -> BoundLogger:
    """A logger with ``bound`` (actor, system, ...) on each of its lines."""
    return get_logger("aexec.actor", **bound)
