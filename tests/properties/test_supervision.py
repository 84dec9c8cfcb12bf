"""Supervision under any sequence of failures: its budgets hold, and every ask ends once."""

from __future__ import annotations

import asyncio
from typing import Any

import structlog
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from aexec.actor import Actor, ActorSystem, Backoff, Exit, Ref, Supervision, handles
from aexec.actor.supervision import Budget, Strategy
from aexec.errors import ActorError, CallTimeout
from aexec.messages.base import Message

MAX_ALIVE = 3


@given(
    pauses=st.lists(st.floats(0.0, 30.0), max_size=60),
    max_restarts=st.integers(0, 5),
    within=st.floats(0.1, 60.0),
)
def test_no_window_holds_more_restarts_than_the_budget(pauses, max_restarts, within):
    """Whenever failures come, any window of ``within`` seconds holds ``max_restarts`` of them at most."""
    budget, supervision = Budget(), Supervision(max_restarts=max_restarts, within=within)
    now, granted = 0.0, list[float]()
    for pause in pauses:
        now += pause
        attempt = budget.spend(now, supervision)
        recent = [when for when in granted if now - when <= within]
        assert (attempt is None) == (len(recent) >= max_restarts)
        if attempt is not None:
            granted.append(now)
            assert attempt == len(recent) + 1
    for when in granted:
        assert sum(when <= other <= when + within * (1 - 1e-9) for other in granted) <= max_restarts


class Work(Message[int], frozen=True):
    """Takes as many turns of the loop as it says, and fails if it says so."""

    turns: int
    fails: bool


class Quick(Message[int], frozen=True):
    fails: bool


class Beside(Message[int], frozen=True):
    turns: int
    fails: bool


class Later(Message[int], frozen=True):
    """Never answered by its handler."""


class Unsound(Exception):
    """Ends its actor."""


class Doom(Message[int], frozen=True):
    pass


class Flaky(Actor):
    """Fails whenever it is told to, now and then in its start."""

    def __init__(self, refusals: list[bool], kept: list[Any]) -> None:
        self.refusals, self.kept = refusals, kept  # kept outlives it, so that no garbage collection helps

    async def on_start(self) -> None:
        await asyncio.sleep(0)
        if self.context.generation > 1 and self.refusals and self.refusals.pop():
            raise OSError("not yet")

    async def on_stop(self, reason: Exit) -> None:
        await asyncio.sleep(0)

    @handles(Work)
    async def work(self, message: Work) -> int:
        for _ in range(message.turns):
            await asyncio.sleep(0)
        return self.quick(Quick(message.fails))

    @handles(Quick)
    def quick(self, message: Quick) -> int:
        if message.fails:
            raise ValueError("broken")
        return 1

    @handles(Beside, concurrent=2)
    async def beside(self, message: Beside) -> int:
        return await self.work(Work(message.turns, message.fails))

    @handles(Later)
    def later(self, message: Later) -> Any:
        self.kept.append(self.context.defer(message))
        return self.kept[-1]

    @handles(Doom, fatal=Unsound)
    def doom(self, message: Doom) -> int:
        raise Unsound


besides = st.builds(Beside, st.integers(0, 9), st.booleans())
messages = st.one_of(
    st.builds(Work, st.integers(0, 4), st.booleans()),
    st.builds(Quick, st.booleans()),
    besides,
    st.builds(Later),
)
bursts = st.lists(messages, min_size=2, max_size=4) | st.lists(besides, min_size=3, max_size=4)


class Supervised(RuleBasedStateMachine):
    """A group of actors that fail, are restarted, stopped and asked in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.system = ActorSystem(timeout=None, stop_timeout=5.0)
        self.refs: list[Ref[Flaky]] = []
        self.asks: list[asyncio.Task[Any]] = []
        self.kept: list[Any] = []
        self.logs = structlog.testing.capture_logs()
        self.logs.__enter__()

    def run(self, coroutine) -> Any:
        return self.runner.run(coroutine)

    @initialize(strategy=st.sampled_from(Strategy.__args__), max_restarts=st.integers(0, 4))
    def open(self, strategy, max_restarts) -> None:
        self.supervision = Supervision(
            strategy=strategy, max_restarts=max_restarts, within=3600.0, backoff=Backoff(0.0, 0.0, 0.0)
        )
        self.run(self.system.open())
        self.spawn([])
        self.spawn([True])

    @rule(refusals=st.lists(st.booleans(), max_size=4))
    def spawn(self, refusals) -> None:
        if sum(ref.is_alive for ref in self.refs) < MAX_ALIVE:
            spawner = self.system.using(supervision=self.supervision, mailbox=4)
            self.refs.append(self.run(spawner.spawn(Flaky, list(refusals), self.kept)))

    @rule(which=st.integers(0, 30), message=messages)
    def ask(self, which, message) -> None:
        async def start() -> None:
            self.asks.append(asyncio.create_task(self.refs[which % len(self.refs)].ask(message)))

        self.run(start())

    @rule(which=st.integers(0, 30), message=messages)
    def tell(self, which, message) -> None:
        async def send() -> None:
            ref = self.refs[which % len(self.refs)]
            try:
                ref.tell_nowait(message)
            except ActorError:
                return

        self.run(send())

    @rule(which=st.integers(0, 30), burst=bursts, how=st.sampled_from([Quick, Work]))
    def burst(self, which, burst, how) -> None:
        """Some asks, and then a tell that fails while they are in hand or wait."""
        for message in burst:
            self.ask(which, message)
        self.wait(1)
        self.tell(which, Quick(True) if how is Quick else Work(1, True))

    @rule(which=st.integers(0, 30))
    def doom(self, which) -> None:
        self.ask(which, Doom())

    @rule(which=st.integers(0, 30))
    def cancel(self, which) -> None:
        async def cancel() -> None:
            if self.asks:
                self.asks[which % len(self.asks)].cancel()

        self.run(cancel())

    @rule(which=st.integers(0, 30), seconds=st.sampled_from([0.0, 0.005, None]))
    def stop(self, which, seconds) -> None:
        self.run(asyncio.wait_for(self.refs[which % len(self.refs)].stop(timeout=seconds), 4.0))

    @rule(turns=st.integers(1, 8))
    def wait(self, turns) -> None:
        async def wait() -> None:
            for _ in range(turns):
                await asyncio.sleep(0)

        self.run(wait())

    @invariant()
    def budgets_hold(self) -> None:
        figures = [ref.statistics() for ref in self.refs]
        limit = getattr(self, "supervision", Supervision()).max_restarts
        together = 1 if self.refs and self.supervision.strategy == "one_for_one" else len(self.refs)
        assert all(figure.restarts <= limit * together for figure in figures)
        assert all(figure.mailbox.queued <= 4 for figure in figures)

    def teardown(self) -> None:
        try:
            if self.refs:
                self.run(asyncio.wait_for(self.close(), 10.0))
        finally:
            self.runner.close()
            self.logs.__exit__(None, None, None)

    async def close(self) -> None:
        await self.system.aclose(timeout=0.5)
        done, pending = await asyncio.wait(self.asks, timeout=2.0) if self.asks else (set(), set())
        assert not pending
        for ask in done:
            error = None if ask.cancelled() else ask.exception()
            assert error is None or isinstance(error, (ActorError, CallTimeout, ValueError, Unsound)), error
        assert self.system.statistics().actors == 0


def test_every_ask_ends_once_whatever_fails_is_restarted_or_stopped():
    """No sequence of failures, restarts, stops and cancellations leaves an ask open or a budget exceeded."""
    run_state_machine_as_test(Supervised, settings=settings(stateful_step_count=30))
