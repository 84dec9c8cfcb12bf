"""What a tracer is: it is told when an actor begins a message, and when it has ended it.

A system without one pays nothing for it: its actors live in cells that know no tracer.
``observe.otel`` has one for OpenTelemetry.
"""

from __future__ import annotations

from typing import Protocol

__all__ = ("Span", "Tracer")


class Span(Protocol):
    """A message in hand."""

    @property
    def traceparent(self) -> str | None:
        """The W3C trace context that messages carry which the handler sends; None: they carry none."""
        ...

    def end(self, error: BaseException | None, /) -> None:
        """The handler has ended.

        Args:
            error: What it raised, or why it was cut short; None: it returned.
        """
        ...


class Tracer(Protocol):
    """Follows messages from actor to actor."""

    def start(self, actor: str, message: str, traceparent: str | None, /) -> Span:
        """An actor begins to handle a message.

        Called in the task that the handler runs in, as is the end of its span.

        Args:
            actor: The actor's name.
            message: The type of the message.
            traceparent: The W3C trace context that the message carries.
        """
        ...
