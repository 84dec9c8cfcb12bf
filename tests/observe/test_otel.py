from __future__ import annotations

import sys

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from aexec.actor import Actor, ActorSystem, Message, handles, trace_context
from aexec.errors import MissingExtra
from aexec.observe.otel import OpenTelemetryTracer

pytestmark = pytest.mark.anyio

OUTSIDE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


class Say(Message[str], frozen=True):
    what: str


class Forward(Message[str], frozen=True):
    what: str


class Speaker(Actor):
    @handles(Say)
    def say(self, message: Say) -> str:
        trace.get_current_span().add_event("said")
        if message.what == "error":
            raise ValueError("no")
        return message.what

    @handles(Forward)
    async def forward(self, message: Forward) -> str:
        return await self.context.system.find("other", Speaker).ask(Say(message.what))


@pytest.fixture
def exporter() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture
def tracer(exporter: InMemorySpanExporter) -> OpenTelemetryTracer:
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    return OpenTelemetryTracer(provider)


async def test_spans_follow_the_messages(tracer: OpenTelemetryTracer, exporter: InMemorySpanExporter) -> None:
    """One trace from the request to the last actor, each span the child of the one that sent its message."""
    async with ActorSystem(tracer=tracer) as system:
        ref = await system.using(name="one").spawn(Speaker)
        await system.using(name="other").spawn(Speaker)
        with trace_context(OUTSIDE):
            assert await ref.ask(Forward("hello")) == "hello"
    said, forwarded = exporter.get_finished_spans()
    assert (said.name, forwarded.name) == ("other Say", "one Forward")
    assert f"{forwarded.context.trace_id:032x}" == OUTSIDE.split("-")[1]
    assert f"{forwarded.parent.span_id:016x}" == OUTSIDE.split("-")[2]
    assert said.parent.span_id == forwarded.context.span_id
    assert [event.name for event in said.events] == ["said"]
    assert trace.get_current_span() is trace.INVALID_SPAN


async def test_an_error_is_the_spans_status(tracer: OpenTelemetryTracer, exporter: InMemorySpanExporter) -> None:
    """A handler that raises leaves a span that says so."""
    async with ActorSystem(tracer=tracer) as system:
        ref = await system.using(name="one").spawn(Speaker)
        with pytest.raises(ValueError, match="no"):
            await ref.ask(Say("error"))
    (span,) = exporter.get_finished_spans()
    assert (span.status.status_code, span.status.description) == (trace.StatusCode.ERROR, "ValueError: no")
    assert [event.name for event in span.events] == ["said", "exception"]


def test_without_opentelemetry_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error says what to install."""
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    with pytest.raises(MissingExtra, match=r"needs the extra 'otel' .*pip install 'aexec\[otel\]'"):
        OpenTelemetryTracer()
