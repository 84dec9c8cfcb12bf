"""The cell of an actor in a system that has a tracer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from aexec.actor.cell import Cell
from aexec.actor.envelope import Envelope
from aexec.actor.logs import logger
from aexec.actor.runtime import Section
from aexec.actor.tracing import Span
from aexec.errors import ActorError

__all__ = ("TracedCell",)


class TracedCell(Cell):
    """Tells the tracer of each message; what a tracer raises is logged, and nothing more comes of it."""

    __slots__ = ("_spans",)

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._spans: dict[Envelope, Span] = {}

    def _call(self, envelope: Envelope) -> float:
        self._open(envelope)
        return super()._call(envelope)

    async def _await(self, envelope: Envelope, section: Section, function: Callable[[Any, Any], Any]) -> None:
        self._open(envelope)
        await super()._await(envelope, section, function)

    def _returned(self, envelope: Envelope, value: Any) -> None:
        self._close(envelope, None)
        super()._returned(envelope, value)

    def _raised(self, envelope: Envelope, error: Exception) -> None:
        self._close(envelope, error)
        super()._raised(envelope, error)

    def _interrupted(self, envelope: Envelope) -> None:
        self._close(envelope, ActorError(f"{envelope.call} was cut short"))
        super()._interrupted(envelope)

    def _open(self, envelope: Envelope) -> None:
        tracer = self.core.tracer
        assert tracer is not None
        try:
            span = tracer.start(self.name, envelope.handler.kind.__name__, envelope.traceparent)
            envelope.traceparent = span.traceparent or envelope.traceparent
        except Exception:  # noqa: BLE001 - a message is handled, traced or not
            logger(actor=self.name).exception("tracer failed", tracer=repr(tracer))
        else:
            self._spans[envelope] = span

    def _close(self, envelope: Envelope, error: BaseException | None) -> None:
        span = self._spans.pop(envelope, None)
        if span is not None:
            try:
                span.end(error)
            except Exception:  # noqa: BLE001 - a message is answered, traced or not
                logger(actor=self.name).exception("tracer failed", span=repr(span))
