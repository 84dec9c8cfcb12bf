"""Loggers of the actor core, with what they speak of bound once."""

from __future__ import annotations

from typing import Any

import structlog

__all__ = ("logger",)


def logger(**bound: Any) -> structlog.stdlib.BoundLogger:
    """A logger with ``bound`` (actor, system, ...) on each of its lines."""
    made: structlog.stdlib.BoundLogger = structlog.get_logger("aexec.actor", **bound)
    return made
