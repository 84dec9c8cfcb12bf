"""Log records with their facts bound once: actor, rank, step.

A library configures no logging; what the program has set up goes for aexec too. If it has
configured structlog, aexec's records take that way. If not, they go to the standard
library's loggers ``aexec.*``, so that a program that has set up nothing sees warnings on
its standard error, and nothing on its standard output; the facts of a record are in its
text as ``key=value`` and, for formatters that want data, in ``record.aexec``.
:func:`configure_logging` is for programs, such as the command line.

structlog is imported with the first record, or by the actors of a driver, as it takes rich
along: a fifth of what a worker process imports, which mostly says nothing.
"""

from __future__ import annotations

import json
import logging
import sys
import traceback
from collections.abc import Mapping
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, TextIO

from aexec import environ

if TYPE_CHECKING:
    import structlog
    from structlog.typing import EventDict

__all__ = ("bind_rank", "configure_logging", "get_logger", "log_format")

_ROOT = "aexec"
# What a record gets of its context structlog tells by the variable's name. Source: structlog 26.1, contextvars.py.
_RANK: ContextVar[int] = ContextVar("structlog_rank")


def get_logger(name: str = _ROOT, **facts: Any) -> structlog.stdlib.BoundLogger:
    """Return a logger with ``facts`` bound: ``get_logger("aexec.worker", rank=3)``.

    What the program binds with ``structlog.contextvars``, as a web request's id, is in
    each record too. ``bind`` makes a logger that knows more: ``log.bind(step=7)``.
    """
    from structlog.stdlib import BoundLogger

    return BoundLogger(logging.getLogger(name), (_to_the_program, _keep, _with_context, _to_record), facts)


def bind_rank(rank: int) -> None:
    """Have ``rank`` in each record of this context, those too that are not ours: as structlog's own function, without it.

    Where the program binds another ``rank`` with structlog itself, a record has either.
    """
    _RANK.set(rank)


def _to_the_program(logger: logging.Logger, method: str, event: EventDict) -> EventDict:
    """Hand the record to structlog as the program has configured it, if it has."""
    import structlog

    if structlog.is_configured():
        text = event.pop("event")
        getattr(structlog.get_logger(logger.name), method)(text, **event)
        raise structlog.DropEvent
    return event


def _keep(logger: logging.Logger, method: str, event: EventDict) -> EventDict:
    from structlog.stdlib import filter_by_level

    return filter_by_level(logger, method, event)


def _with_context(logger: logging.Logger, method: str, event: EventDict) -> EventDict:
    from structlog.contextvars import merge_contextvars

    return merge_contextvars(logger, method, event)


def _to_record(_logger: logging.Logger, _method: str, event: EventDict) -> tuple[tuple[str], dict[str, Any]]:
    """Turn structlog's dictionary into the arguments of ``logging.Logger.log``."""
    said = {name: event.pop(name) for name in ("exc_info", "stack_info", "stacklevel") if name in event}
    text = event.pop("event")
    facts = dict(event)
    return (" ".join((text, *_pairs(facts))),), {**said, "extra": {"aexec": {"event": text, **facts}}}


def _pairs(facts: Mapping[str, Any]) -> list[str]:
    return [f"{name}={value!r}" if " " in str(value) else f"{name}={value}" for name, value in facts.items()]


def configure_logging(level: str | None = None, form: str | None = None, stream: TextIO | None = None) -> None:
    """Show aexec's records; a second call replaces what the first one set up.

    Args:
        level: Least severe record that is shown; None takes ``AEXEC_LOG_LEVEL``.
        form: ``console``, ``json`` or ``auto``; None takes ``AEXEC_LOG_FORMAT``.
        stream: Where to, standard error by default.
    """
    target = stream or sys.stderr
    handler = _Handler(target)
    handler.setFormatter(
        _Json() if log_format(target, form) == "json" else logging.Formatter(_CONSOLE, datefmt="%H:%M:%S")
    )
    logger = logging.getLogger(_ROOT)
    for earlier in [handler for handler in logger.handlers if isinstance(handler, _Handler)]:
        logger.removeHandler(earlier)
    logger.addHandler(handler)
    logger.setLevel((level or environ.LOG_LEVEL.read()).upper())
    logger.propagate = False


def log_format(stream: TextIO | None, form: str | None = None) -> str:
    """``console`` or ``json``: what ``auto`` means for a stream; a daemon has none, or a closed one.

    Args:
        stream: Where records go.
        form: As for :func:`configure_logging`.
    """
    form = form or environ.LOG_FORMAT.read()
    if form != "auto":
        return form
    is_closed = stream is None or getattr(stream, "closed", False)  # what programs put in its place may lack that
    return "console" if stream is not None and not is_closed and stream.isatty() else "json"


_CONSOLE = "%(asctime)s %(levelname)-7s %(name)s: %(message)s"


class _Handler(logging.StreamHandler[TextIO]):
    """Marks the handler that is ours to replace."""


class _Json(logging.Formatter):
    """One JSON object per record: the facts under their own names."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the record as one line of JSON."""
        facts: dict[str, Any] = getattr(record, "aexec", None) or {"event": record.getMessage()}
        line = {"time": record.created, "level": record.levelname.lower(), "logger": record.name, **facts}
        if record.exc_info:
            line["traceback"] = "".join(traceback.format_exception(*record.exc_info))
        return json.dumps(line, default=str)
