from __future__ import annotations

import dataclasses

import anyio
import pytest
import structlog

from aexec.actor import Actor, ActorSystem, handles, trace_context
from aexec.actor.traced import TracedCell
from aexec.errors import ActorError
from aexec.messages.base import Message

pytestmark = pytest.mark.anyio


class Say(Message[str], frozen=True):
    what: str


class Forward(Message[str], frozen=True):
    what: str


class Speaker(Actor):
    @handles(Say)
    def say(self, message: Say) -> str:
        if message.what == "error":
            raise ValueError("no")
        return f"{message.what} {self.context.traceparent}"

    @handles(Forward)
    async def forward(self, message: Forward) -> str:
        if message.what == "hang":
            await anyio.sleep_forever()
        return await self.context.system.find("other", Speaker).ask(Say(message.what))


@dataclasses.dataclass
class Recorder:
    """A tracer that writes down what it is told, and is its own span."""

    told: list[tuple[str, ...]]
    traceparent: str | None = None

    def start(self, actor: str, message: str, traceparent: str | None) -> Recorder:
        number = len(self.told)
        self.told.append((actor, message, str(traceparent)))
        return Recorder(self.told, f"span-{number}")

    def end(self, error: BaseException | None) -> None:
        self.told.append((str(self.traceparent), repr(error)))


async def test_a_trace_goes_from_actor_to_actor():
    """The trace context comes in with a message, and what the handler sends carries its span's."""
    tracer = Recorder([])
    async with ActorSystem(tracer=tracer) as system:
        ref = await system.using(name="one").spawn(Speaker)
        await system.using(name="other").spawn(Speaker)
        with trace_context("outside"):
            assert await ref.ask(Forward("hello")) == "hello span-1"
    assert tracer.told == [
        ("one", "Forward", "outside"),
        ("other", "Say", "span-0"),
        ("span-1", "None"),
        ("span-0", "None"),
    ]


async def test_every_span_ends():
    """With the error that was raised, and when the handler was cut short."""
    tracer = Recorder([])
    async with ActorSystem(tracer=tracer) as system:
        ref = await system.using(name="one").spawn(Speaker)
        with pytest.raises(ValueError, match="no"):
            await ref.ask(Say("error"))
        with anyio.move_on_after(0.01):
            await ref.ask(Forward("hang"))
    ends = [told for told in tracer.told if len(told) == 2]
    assert ends == [
        ("span-0", "ValueError('no')"),
        ("span-2", repr(ActorError("Forward to one was cut short"))),
    ]


async def test_a_tracer_that_fails_stops_no_message():
    """What it raises is logged."""

    class Broken:
        def start(self, *_: object) -> Recorder:
            raise RuntimeError("no backend")

    with structlog.testing.capture_logs() as logs:
        async with ActorSystem(tracer=Broken()) as system:
            ref = await system.spawn(Speaker)
            assert await ref.ask(Say("hello")) == "hello None"
    assert "tracer failed" in [line["event"] for line in logs]


async def test_a_system_without_a_tracer_has_no_traced_cells(system):
    """So that tracing costs nothing there."""
    ref = await system.spawn(Speaker)
    assert not isinstance(ref.__cell__(), TracedCell)
