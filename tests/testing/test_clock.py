from __future__ import annotations

import time

import anyio
import pytest

from aexec.actor import Actor, ActorSystem, Backoff, Message, Supervision, handles
from aexec.errors import CallTimeout, ConfigError
from aexec.testing import VirtualClock

pytestmark = pytest.mark.anyio


class Tick(Message[None], frozen=True):
    """Time to do something."""


class Slow(Message[float], frozen=True):
    """Take some seconds; the reply is when they were over."""

    seconds: float = 1.0


class Break(Message[None], frozen=True):
    """Fail."""


class Worker(Actor):
    def __init__(self, trace: list[tuple[str, float]]) -> None:
        self.trace = trace

    async def on_start(self) -> None:
        self.trace.append(("start", self.context.now()))
        self.context.every(7.0, Tick())

    @handles(Tick)
    def tick(self, message: Tick) -> None:
        self.trace.append(("tick", self.context.now()))

    @handles(Slow)
    async def slow(self, message: Slow) -> float:
        await self.context.sleep(message.seconds)
        return self.context.now()

    @handles(Break)
    def break_(self, message: Break) -> None:
        self.trace.append(("break", self.context.now()))
        raise ValueError("broken")


@pytest.fixture
def trace() -> list[tuple[str, float]]:
    return []


async def test_thirty_seconds_take_no_time(trace):
    """Timers, deadlines and back-off leap; the trace is the same on every loop, to the last bit."""
    supervision = Supervision(backoff=Backoff(initial=4.0, jitter=0.0))
    began = time.monotonic()
    async with ActorSystem(clock=VirtualClock()) as system:
        ref = await system.using(supervision=supervision).spawn(Worker, trace)
        await ref.tell(Break())
        assert await ref.ask(Slow(2.0)) == 6.0
        with pytest.raises(CallTimeout):
            await ref.ask(Slow(9.0), timeout=3.0)
        await system.sleep(21.0)
        assert system.now() == 30.0
    assert trace == [
        ("start", 0.0),
        ("break", 0.0),
        ("start", 4.0),
        ("tick", 11.0),
        ("tick", 18.0),
        ("tick", 25.0),
    ]
    assert time.monotonic() - began < 5.0  # 0.05 s on an idle machine


async def test_without_autojump_time_stands_until_it_is_advanced(trace):
    """What is due by then is done, at its own time, when advance() returns."""
    clock = VirtualClock(start=100.0, autojump=False)
    async with ActorSystem(clock=clock) as system:
        await system.spawn(Worker, trace)
        await anyio.wait_all_tasks_blocked()
        assert clock.now() == 100.0
        await clock.advance(14.5)
        assert (clock.now(), trace[1:]) == (114.5, [("tick", 107.0), ("tick", 114.0)])
        await clock.advance(0.0)
        assert "next at 121 s" in repr(clock)


async def test_advance_ends_where_it_says_with_autojump_too(trace):
    """The two ways to pass time do not get in each other's way."""
    clock = VirtualClock()
    async with ActorSystem(clock=clock) as system:
        await system.spawn(Worker, trace)
        await clock.advance(8.0)
        assert [when for _, when in trace] == [0.0, 7.0]


async def test_time_does_not_run_backwards():
    """advance() says so."""
    with pytest.raises(ConfigError, match="backwards"):
        await VirtualClock().advance(-1.0)


async def test_two_systems_share_a_clock_and_may_close_in_any_order(trace):
    """The one that is left goes on leaping."""
    clock = VirtualClock()
    first, second = ActorSystem(clock=clock), ActorSystem(clock=clock)
    await first.open()
    await second.open()
    await first.spawn(Worker, trace)
    await second.spawn(Worker, trace)
    await second.sleep(1.0)
    await second.aclose()
    await first.sleep(8.0)
    await first.aclose()
    assert (clock.now(), [what for what, _ in trace]) == (9.0, ["start", "start", "tick"])
    assert "nothing to come" in repr(clock)


async def test_an_actor_that_never_stops_telling_itself_does_not_stop_the_loop():
    """In virtual time no slice of time is ever up, and others have their turns all the same."""

    class Again(Message[None], frozen=True):
        pass

    class Restless(Actor):
        @handles(Again)
        def again(self, message: Again) -> None:
            self.context.ref.tell_nowait(message)

    async with ActorSystem(clock=VirtualClock(autojump=False)) as virtual:
        ref = await virtual.spawn(Restless)
        await ref.tell(Again())
        while ref.statistics().handled < 3:
            await anyio.lowlevel.checkpoint()


async def test_a_handler_that_hangs_is_cut_short_at_close_without_waiting(trace):
    """The ten seconds that actors have to stop are virtual as well."""
    began = time.monotonic()
    async with ActorSystem(clock=VirtualClock()) as system:
        ref = await system.spawn(Worker, trace)
        await ref.tell(Slow(10_000.0))
        await anyio.lowlevel.checkpoint()
        await system.aclose()
        assert system.statistics().actors == 0
    assert time.monotonic() - began < 5.0
