"""Traces of actors for OpenTelemetry: ``ActorSystem(tracer=OpenTelemetryTracer())``.

A span for each message that is handled: child of the span that sent it, parent of those
of the messages that the handler sends, and current while the handler runs, so that spans
of other libraries find their place. Needs the extra ``otel``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from aexec.errors import MissingExtra

if TYPE_CHECKING:
    from opentelemetry import trace

__all__ = ("OpenTelemetrySpan", "OpenTelemetryTracer")


class OpenTelemetrySpan:
    """One message in hand."""

    __slots__ = ("_span", "_use", "traceparent")

    def __init__(self, span: trace.Span) -> None:
        from opentelemetry import trace

        self._span = span
        self._use = trace.use_span(span, record_exception=False, set_status_on_exception=False)
        self._use.__enter__()
        context = span.get_span_context()
        self.traceparent: str | None = (
            f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}" if context.is_valid else None
        )

    def end(self, error: BaseException | None, /) -> None:
        """End the span; an error becomes its status and an event of it."""
        from opentelemetry import trace

        if error is not None:
            self._span.record_exception(error)
            self._span.set_status(trace.Status(trace.StatusCode.ERROR, f"{type(error).__name__}: {error}"))
        self._use.__exit__(None, None, None)
        self._span.end()


class OpenTelemetryTracer:
    """Makes the spans.

    Args:
        provider: Whose tracer it uses; None: the process's.

    Raises:
        MissingExtra: OpenTelemetry is not installed.
    """

    def __init__(self, provider: trace.TracerProvider | None = None) -> None:
        try:
            from opentelemetry import trace
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
        except ImportError as error:
            raise MissingExtra("OpenTelemetryTracer", "otel", "opentelemetry") from error
        self._tracer = trace.get_tracer("aexec.actor", tracer_provider=provider)
        self._propagator = TraceContextTextMapPropagator()
        self._kind = trace.SpanKind.CONSUMER

    def __repr__(self) -> str:
        return f"<OpenTelemetryTracer {type(self._tracer).__name__}>"

    def start(self, actor: str, message: str, traceparent: str | None, /) -> OpenTelemetrySpan:
        """Begin the span of a message."""
        from opentelemetry.context import Context

        parent = self._propagator.extract({} if traceparent is None else {"traceparent": traceparent}, Context())
        attributes = {"aexec.actor": actor, "aexec.message": message}
        return OpenTelemetrySpan(
            self._tracer.start_span(f"{actor} {message}", parent, kind=self._kind, attributes=attributes)
        )
