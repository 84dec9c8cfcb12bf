from __future__ import annotations

import asyncio

import anyio
import anyio.lowlevel
import pytest
import structlog
from stopwatch import Stopwatch

from aexec.actor import Actor, ActorSystem, Exit, handles
from aexec.errors import ActorDied, ActorStopped, CallCycle, ConfigError
from aexec.messages.base import Message

pytestmark = pytest.mark.anyio
on_asyncio = pytest.mark.parametrize(
    "anyio_backend", [("asyncio", {"debug": True}), ("asyncio", {"use_uvloop": True})], ids=["asyncio", "uvloop"]
)


class Hold(Message[str], frozen=True):
    pass


class Parallel(Message[str], frozen=True):
    pass


class Ping(Message[str], frozen=True):
    pass


class Spawn(Message[None], frozen=True):
    name: str


class Crash(Message[None], frozen=True):
    """Starts a task that fails."""


class Watched(Actor):
    """Writes down what happens to it."""

    def __init__(self, events: list[str], label: str = "it") -> None:
        self.events, self.label = events, label
        self.release = anyio.Event()

    async def on_start(self) -> None:
        self.events.append(f"{self.label} starts")

    async def on_stop(self, reason: Exit) -> None:
        await anyio.lowlevel.checkpoint()
        self.events.append(f"{self.label} stops: {reason.kind}")

    @handles(Ping)
    def ping(self, message: Ping) -> str:
        return "pong"

    @handles(Hold)
    async def hold(self, message: Hold) -> str:
        self.events.append(f"{self.label} holds")
        try:
            await self.release.wait()
        except BaseException:
            self.events.append(f"{self.label} is cut short")
            raise
        return "released"

    @handles(Parallel, concurrent=4)
    async def parallel(self, message: Parallel) -> str:
        return await self.hold(Hold())

    @handles(Spawn)
    async def spawn(self, message: Spawn) -> None:
        await self.context.using(name=message.name).spawn(Watched, self.events, message.name)

    @handles(Crash)
    def crash(self, message: Crash) -> None:
        self.context.start_task(self.crashing())

    async def crashing(self) -> None:
        raise ValueError("broken")


@pytest.fixture
def events() -> list[str]:
    return []


@pytest.fixture
async def watched(system, events):
    """An actor and its ref."""
    made: list[Watched] = []
    ref = await system.using(name="it").spawn(lambda: made.append(Watched(events)) or made[0])
    return ref, made[0]


async def until(condition) -> None:
    with anyio.fail_after(5):
        while not condition():
            await anyio.lowlevel.checkpoint()


# ---------------------------------------------------------------- start


async def test_spawn_returns_after_on_start(system):
    """The first message finds a started actor."""

    class Slow(Actor):
        started = False

        async def on_start(self) -> None:
            await anyio.sleep(0.01)
            self.started = True

        @handles(Ping)
        def ping(self, message: Ping) -> str:
            return str(self.started)

    ref = await system.spawn(Slow)
    assert ref.statistics().state == "running"
    assert await ref.ask(Ping()) == "True"


@pytest.mark.parametrize("where", ["constructor", "on_start"])
async def test_spawn_raises_what_the_start_raised(system, events, where):
    """A failed start is the spawner's error, with a note; on_stop is not called, and nothing is left."""

    class Refusing(Watched):
        def __init__(self) -> None:
            super().__init__(events)
            if where == "constructor":
                raise ValueError("no device")

        async def on_start(self) -> None:
            await self.context.using(name="child").spawn(Watched, events, "child")
            raise ValueError("no device")

    with pytest.raises(ValueError, match="no device") as caught:
        await system.spawn(Refusing)
    assert caught.value.__notes__ == ["raised while actor refusing-1 started"]
    assert system.statistics().actors == 0
    assert events == ([] if where == "constructor" else ["child starts", "child stops: stopped"])


@on_asyncio
async def test_spawn_raises_what_the_loop_raised_in_the_place_of_a_task(system, events, no_more_tasks):
    """Nothing is left of the actor, and its name is free."""
    place = system.using(name="it")
    with no_more_tasks(), pytest.raises(RuntimeError, match="no more tasks"):
        await place.spawn(Watched, events)
    assert (system.statistics().actors, events) == (0, [])
    assert await (await place.spawn(Watched, events)).ask(Ping()) == "pong"


@on_asyncio
async def test_a_task_of_its_own_that_the_loop_does_not_make_is_its_handlers_error(watched, no_more_tasks):
    """The actor lives on, and ends as ever."""
    ref, _ = watched
    with no_more_tasks(), pytest.raises(RuntimeError, match="no more tasks"):
        await ref.ask(Crash(), timeout=1.0)
    assert await ref.ask(Ping()) == "pong"
    with anyio.fail_after(5):
        await ref.stop()


async def test_wrong_arguments_are_the_spawners_error(system):
    """A constructor that is called wrongly raises its TypeError from spawn."""
    with pytest.raises(TypeError, match="missing 1 required positional argument"):
        await system.spawn(Watched)


async def test_a_child_that_asks_its_spawner_is_told_of_the_cycle(system):
    """A handler that spawns waits for on_start, which therefore cannot ask it."""

    class Child(Actor):
        def __init__(self, parent) -> None:
            self.parent = parent

        async def on_start(self) -> None:
            await self.parent.ask(Ping())

    class Parent(Actor):
        @handles(Ping)
        async def ping(self, message: Ping) -> str:
            await self.context.spawn(Child, self.context.ref)
            return "never"

    ref = await system.using(name="parent").spawn(Parent)
    with pytest.raises(CallCycle, match="parent -> child-1 -> parent"):
        await ref.ask(Ping())


async def test_a_cancelled_spawn_leaves_no_actor(system, events):
    """An actor whose spawner is cancelled is cut short in on_start and not left behind."""

    class Slow(Watched):
        async def on_start(self) -> None:
            await self.hold(Hold())

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(system.spawn, Slow, events)
        await until(lambda: events)
        tasks.cancel_scope.cancel()
    await until(lambda: system.statistics().actors == 0)
    assert events == ["it holds", "it is cut short"]


# ---------------------------------------------------------------- stop


async def test_stop_says_why_it_ended(watched, events):
    """stop() returns once on_stop has run; a second stop() returns the same."""
    ref, _ = watched
    exit_ = await ref.stop()
    assert (exit_.kind, exit_.reason, exit_.error) == ("stopped", "it was told to stop", None)
    assert events == ["it starts", "it stops: stopped"]
    assert await ref.stop() == exit_
    assert ref.statistics().state == "stopped"


async def test_queued_messages_are_answered_when_it_stops(system, watched, events):
    """Asks in the mailbox end with ActorStopped at once; the handler that runs may finish."""
    ref, actor = watched
    replies: list[str] = []

    async def ask(message: Message[str]) -> None:
        try:
            replies.append(await ref.ask(message))
        except ActorStopped as error:
            replies.append(str(error))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(ask, Hold())
        await until(lambda: "it holds" in events)
        tasks.start_soon(ask, Ping())
        await until(lambda: ref.statistics().mailbox.queued == 1)
        tasks.start_soon(ref.stop)
        await until(lambda: replies)
        assert replies == ["actor it is dead: it was told to stop"]
        assert ref.statistics().state == "stopping"
        assert not ref.is_alive
        actor.release.set()
    assert replies[1:] == ["released"]
    assert events[-1] == "it stops: stopped"
    assert system.statistics().dead_letters.closed == 1


@pytest.mark.parametrize("message", [Hold(), Parallel()])
async def test_what_still_runs_when_the_time_is_up_is_cut_short(watched, events, message):
    """stop(timeout=) cancels the handler after its seconds; its asker gets ActorDied, and on_stop still runs."""
    ref, _ = watched
    async with anyio.create_task_group() as tasks:

        async def ask() -> None:
            with pytest.raises(ActorDied, match="its time to stop was up"):
                await ref.ask(message)

        tasks.start_soon(ask)
        await until(lambda: "it holds" in events)
        exit_ = await ref.stop(timeout=0.02)
    assert exit_.kind == "killed"
    assert events == ["it starts", "it holds", "it is cut short", "it stops: killed"]


@on_asyncio
async def test_who_does_not_want_to_end_is_cut_short_again(system, monkeypatch):
    """A handler that swallows its cancellation gets another one, until it ends."""
    monkeypatch.setattr("aexec.actor.cell.STUBBORN", 0.01)
    swallowed: list[str] = []

    class Stubborn(Actor):
        @handles(Hold)
        async def hold(self, message: Hold) -> str:
            while len(swallowed) < 3:
                try:
                    await asyncio.sleep(60)
                except asyncio.CancelledError:
                    swallowed.append("cancellation")
            return "at last"

    ref = await system.spawn(Stubborn)
    ref.tell_nowait(Hold())
    await until(lambda: ref.statistics().in_hand == 1)
    await ref.stop(timeout=0.0)
    assert len(swallowed) == 3


async def test_on_stop_has_a_limit():
    """An on_stop that does not return is cut short after stop_timeout, and the log says so."""

    class Hanging(Actor):
        async def on_stop(self, reason: Exit) -> None:
            await anyio.sleep_forever()

    with structlog.testing.capture_logs() as logs:
        async with ActorSystem(stop_timeout=0.02) as system:
            await system.spawn(Hanging)
    assert [line["event"] for line in logs] == ["on_stop was cut short"]


async def test_on_stop_is_shielded_from_the_end_of_the_time_to_stop(system, events):
    """The limit of stop() cuts handlers short, and never on_stop."""

    class Tidy(Watched):
        async def on_stop(self, reason: Exit) -> None:
            await anyio.sleep(0.05)
            events.append("tidied")

    ref = await system.spawn(Tidy, events)
    await ref.stop(timeout=0.0)
    assert events[-1] == "tidied"


async def test_an_error_in_on_stop_is_logged_and_the_end_goes_on(system):
    """A clean-up that fails keeps nobody from being told of the end."""

    class Failing(Actor):
        async def on_stop(self, reason: Exit) -> None:
            raise ValueError("cannot tidy")

    ref = await system.spawn(Failing)
    with structlog.testing.capture_logs() as logs:
        assert (await ref.stop()).kind == "stopped"
    assert [(line["event"], line["actor"]) for line in logs] == [("on_stop failed", "failing-1")]


async def test_children_end_before_their_parents(watched, events):
    """The youngest first, and each before on_stop of its parent."""
    ref, _ = watched
    await ref.ask(Spawn("first"))
    await ref.ask(Spawn("second"))
    await ref.stop()
    assert set(events[-3:-1]) == {"first stops: stopped", "second stops: stopped"}
    assert events[-1] == "it stops: stopped"


async def test_a_child_may_end_before_its_parent_does(watched, events, system):
    """A child that was stopped is forgotten, and its name is free again."""
    ref, actor = watched
    for _ in range(2):
        await ref.ask(Spawn("child"))
        with pytest.raises(ConfigError, match="an actor 'child' is alive"):
            await system.using(name="child").spawn(Watched, events)
        child = next(iter(ref._cell.children.values()))
        child.request_stop("test", None)
        await child.closed()
    assert ref._cell.children == {}
    assert actor.context.ref == ref


async def test_no_child_is_born_to_an_actor_that_ends(watched):
    """A context of an actor that has ended spawns nothing."""
    ref, actor = watched
    context = actor.context
    await ref.stop()
    with pytest.raises(ActorStopped):
        await context.spawn(Watched, [])


async def test_cancelling_stop_does_not_call_it_off(watched, events):
    """Who waits for the end may go; the actor ends all the same."""
    ref, actor = watched
    ref.tell_nowait(Hold())
    await until(lambda: "it holds" in events)
    with anyio.move_on_after(0.01):
        await ref.stop()
    actor.release.set()
    await until(lambda: ref.statistics().state == "stopped")


# ---------------------------------------------------------------- failure


async def test_a_failing_task_takes_its_actor_along(system, watched, events):
    """An error of an owned task ends the actor: waiters get ActorDied at once, the log the traceback."""
    ref, _ = watched
    with structlog.testing.capture_logs() as logs:
        async with anyio.create_task_group() as tasks:

            async def ask() -> None:
                with pytest.raises(ActorDied, match="actor it is dead: ValueError: broken") as caught:
                    await ref.ask(Hold())
                assert isinstance(caught.value.__cause__, ValueError)

            await ref.ask(Crash())
            tasks.start_soon(ask)
        await until(lambda: ref.statistics().state == "dead")
    assert [(line["event"], line["reason"]) for line in logs] == [("actor failed", "ValueError: broken")]
    assert events[-1] == "it stops: failed"
    assert system.statistics().actors == 0


async def test_a_failure_cuts_a_running_handler_short(watched, events):
    """An actor that has failed does not wait for its handler."""
    ref, actor = watched
    with Stopwatch() as watch:
        async with anyio.create_task_group() as tasks:

            async def ask() -> None:
                with pytest.raises(ActorDied, match="broken"):
                    await ref.ask(Hold())

            tasks.start_soon(ask)
            await until(lambda: "it holds" in events)
            actor.context.start_task(actor.crashing())
    assert watch.seconds < 1.0
    assert "it is cut short" in events


@on_asyncio
async def test_a_task_cancelled_from_outside_ends_its_actor(watched, events):
    """A cancellation that nobody in aexec asked for goes through: the actor is killed, and its waiters are told."""
    ref, _ = watched
    ask = asyncio.create_task(ref.ask(Hold()))
    await until(lambda: "it holds" in events)
    (task,) = [task for task in asyncio.all_tasks() if task.get_name() == "it"]
    task.cancel()
    with pytest.raises(ActorDied, match="its task was cancelled from outside"):
        await ask
    with pytest.raises(asyncio.CancelledError):
        await task
    assert events[-1] == "it stops: killed"


@on_asyncio
async def test_a_cancellation_from_outside_wins_over_an_askers(watched, events):
    """When the handler is cancelled for its asker and from outside in one turn, the outside one goes through."""
    ref, _ = watched
    ask = asyncio.create_task(ref.ask(Hold()))
    await until(lambda: "it holds" in events)
    (task,) = [task for task in asyncio.all_tasks() if task.get_name() == "it"]
    ask.cancel()
    asyncio.get_running_loop().call_soon(task.cancel)
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ref.statistics().state == "dead"


async def test_an_actor_prints_its_state(watched):
    """The repr of a cell is that of its mailbox with its state."""
    ref, _ = watched
    assert repr(ref._cell) == "<Cell it: 0/256 queued, running>"
