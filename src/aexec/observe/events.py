"""What happened, as typed records: one kind of thing, one class, units in the names.

A record is a value: whoever measures makes it, and whoever wants to see it logs it with
:func:`log_event`, counts it or draws it.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    import structlog

__all__ = ("Event", "RequestFinished", "log_event")


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """Base of all event records."""

    @property
    def kind(self) -> str:
        """The class's name as words: ``request finished``."""
        return re.sub(r"(?<!^)(?=[A-Z])", " ", type(self).__name__).lower()


class RequestFinished(Event, frozen=True, kw_only=True):
    """One request came to its end, as its caller saw it.

    Attributes:
        request_id: Which.
        num_prompt_tokens: Tokens of the prompt.
        num_completion_tokens: New tokens.
        finish_reason: Why it ended, as in ``stop`` or ``length``.
        first_token_seconds: From the request to its first token.
        seconds: From the request to its end.
    """

    request_id: str
    num_prompt_tokens: int
    num_completion_tokens: int
    finish_reason: str
    first_token_seconds: float
    seconds: float

    @property
    def tokens_per_second(self) -> float:
        """New tokens per second of the request's whole life."""
        return self.num_completion_tokens / self.seconds if self.seconds > 0 else 0.0


def log_event(log: structlog.stdlib.BoundLogger, event: Event) -> None:
    """Log ``event`` at level ``info``, its fields as facts."""
    log.info(event.kind, **msgspec.structs.asdict(event))
