from __future__ import annotations

import math

import anyio
import pytest
import structlog
from stopwatch import Stopwatch

from aexec.actor import Actor, ActorSystem, handles
from aexec.errors import (
    ActorStopped,
    CallCycle,
    CallTimeout,
    MailboxFull,
    UnhandledMessage,
)
from aexec.messages.base import Message

pytestmark = pytest.mark.anyio


class Increment(Message[int], frozen=True):
    by: int = 1


class Fail(Message[int], frozen=True):
    error: Exception


class Hold(Message[str], frozen=True):
    """Keeps the actor busy until it is released."""


class Log(Message[list[int]], frozen=True):
    pass


class Unknown(Message[None], frozen=True):
    pass


class Counter(Actor):
    def __init__(self, start: int = 0) -> None:
        self.count = start
        self.seen: list[int] = []
        self.holding, self.release = anyio.Event(), anyio.Event()

    @handles(Increment)
    def increment(self, message: Increment) -> int:
        self.count += message.by
        self.seen.append(message.by)
        return self.count

    @handles(Fail)
    async def fail(self, message: Fail) -> int:
        raise message.error

    @handles(Hold)
    async def hold(self, message: Hold) -> str:
        self.holding.set()
        await self.release.wait()
        return "released"

    @handles(Log)
    def log(self, message: Log) -> list[int]:
        return list(self.seen)


async def spawn(system: ActorSystem, mailbox: int = 256):
    """A counter and its ref; the counter is reached into only where a test has to hold it."""
    made: list[Counter] = []

    def make(start: int) -> Counter:
        made.append(Counter(start))
        return made[0]

    ref = await system.using(name="counter", mailbox=mailbox).spawn(make, 5)
    return ref, made[0]


async def test_an_ask_returns_what_the_handler_returns(system):
    """The reply is that of the handler."""
    ref, _ = await spawn(system)
    assert await ref.ask(Increment(2)) == 7


async def test_messages_of_one_sender_keep_their_order(system):
    """Tells and asks of one sender are handled in the order in which they were sent."""
    ref, _ = await spawn(system, mailbox=4)
    for number in range(20):
        await ref.tell(Increment(number))
    assert await ref.ask(Log()) == list(range(20))


async def test_an_error_that_says_it_all_has_no_note(system):
    """The actor's class says which ones; an asker who made the mistake need not know the actor."""

    class Plain(Counter):
        self_explanatory = (ValueError,)

    ref = await system.spawn(Plain)
    own, fault = ValueError("no such thing"), KeyError("a fault")
    for error in (own, fault):
        with pytest.raises(type(error)):
            await ref.ask(Fail(error))
    assert not hasattr(own, "__notes__")
    assert len(fault.__notes__) == 1


async def test_an_error_goes_to_the_asker_and_the_actor_lives(system):
    """The very exception is raised at the asker, with a note that names actor and message."""
    ref, _ = await spawn(system)
    error = ValueError("no such thing")
    with pytest.raises(ValueError, match="no such thing") as caught:
        await ref.ask(Fail(error))
    assert caught.value is error
    assert error.__notes__ == ["raised by actor counter while it handled Fail"]
    assert await ref.ask(Increment()) == 6
    assert ref.statistics().failed == 1


@pytest.mark.parametrize(
    "error",
    [StopIteration("end"), StopAsyncIteration("end"), TimeoutError("slow"), ExceptionGroup("all", [ValueError()])],
)
async def test_any_exception_can_be_raised_at_an_asker(system, error):
    """Even those that a future or a coroutine would take for something else come through legibly."""

    class Raising(Actor):
        @handles(Increment)
        def increment(self, message: Increment) -> int:
            raise error

    ref = await system.spawn(Raising)
    with pytest.raises(Exception, match=r"end|slow|all"):
        await ref.ask(Increment())
    assert ref.is_alive


async def test_an_error_of_a_tell_is_logged_and_counted(system):
    """Nobody waits for a tell, so its failure is in the log with actor and message, and the actor lives."""
    ref, _ = await spawn(system)
    with structlog.testing.capture_logs() as logs:
        await ref.tell(Fail(ValueError("lost?")))
        assert await ref.ask(Increment()) == 6
    (line,) = logs
    assert (line["event"], line["actor"], line["message"]) == ("handler failed", "counter", "Fail")
    assert ref.statistics().failed == 1


async def test_a_message_without_handler_is_refused_at_once(system):
    """Every verb raises at the sender, says what is handled, and counts a dead letter."""
    ref, _ = await spawn(system)
    with pytest.raises(
        UnhandledMessage, match="counter has no handler for Unknown; it handles Increment, Fail, Hold, Log"
    ):
        await ref.ask(Unknown())
    with pytest.raises(UnhandledMessage):
        await ref.tell(Unknown())
    with pytest.raises(UnhandledMessage):
        ref.tell_nowait(Unknown())
    assert system.statistics().dead_letters.undeliverable == 3


async def test_no_verb_passes_the_bound(system):
    """With a full mailbox tell_nowait raises, tell waits, and an ask waits, in this order."""
    ref, counter = await spawn(system, mailbox=2)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(ref.ask, Hold())
        await counter.holding.wait()
        for number in (1, 2):
            ref.tell_nowait(Increment(number))
        with pytest.raises(MailboxFull, match="the mailbox of counter is full"):
            ref.tell_nowait(Increment(100))
        tasks.start_soon(ref.tell, Increment(3))
        await anyio.wait_all_tasks_blocked()
        tasks.start_soon(ref.ask, Increment(4))
        await anyio.wait_all_tasks_blocked()
        assert ref.statistics().mailbox == (2, 0, 0, 2, 2, 0)
        with pytest.raises(MailboxFull):
            ref.tell_nowait(Increment(100))
        counter.release.set()
    assert await ref.ask(Log()) == [1, 2, 3, 4]
    assert system.statistics().dead_letters.full == 2


async def test_waiting_for_room_has_a_limit(system):
    """A tell that finds no room in time raises CallTimeout and is never handled."""
    ref, counter = await spawn(system, mailbox=1)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(ref.ask, Hold())
        await counter.holding.wait()
        ref.tell_nowait(Increment(1))
        with pytest.raises(CallTimeout, match=r"Increment to counter passed its limit of 0\.01 s \(it never started\)"):
            await ref.tell(Increment(2), timeout=0.01)
        counter.release.set()
    assert await ref.ask(Log()) == [1]
    assert system.statistics().dead_letters.expired == 1


async def test_a_cancelled_tell_is_not_delivered(system):
    """A tell that is cancelled while it waits for room leaves the queue before the mailbox."""
    ref, counter = await spawn(system, mailbox=1)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(ref.ask, Hold())
        await counter.holding.wait()
        ref.tell_nowait(Increment(1))
        with anyio.move_on_after(0.01):
            await ref.tell(Increment(2))
        counter.release.set()
    assert await ref.ask(Log()) == [1]
    assert system.statistics().dead_letters.cancelled == 1


async def test_a_passed_deadline_never_starts(system):
    """An ask whose limit is not above zero fails at once; one that expires in the mailbox is taken out."""
    ref, counter = await spawn(system)
    for limit in (0.0, -1.0, math.nan):
        with pytest.raises(CallTimeout) as caught:
            await ref.ask(Increment(), timeout=limit)
        assert not caught.value.started
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(ref.ask, Hold())
        await counter.holding.wait()
        with pytest.raises(CallTimeout) as caught:
            await ref.ask(Increment(), timeout=0.01)
        assert ref.statistics().mailbox.queued == 0
        counter.release.set()
    assert not caught.value.started
    assert await ref.ask(Log()) == []
    assert system.statistics().dead_letters.expired == 4


@pytest.mark.usefixtures("virtual_clock")
async def test_a_deadline_ends_a_handler_that_runs(system):
    """The asker is told that it had started, and the handler is cancelled."""
    ref, _ = await spawn(system)
    with pytest.raises(CallTimeout, match="it had started") as caught:
        await ref.ask(Hold(), timeout=0.25)
    assert caught.value.started
    assert await ref.ask(Increment()) == 6
    assert ref.statistics().cancelled == 1


async def test_the_systems_timeout_holds_unless_another_is_given():
    """Without timeout= an ask has the system's limit; None in words is no limit."""
    async with ActorSystem(timeout=0.01) as system:
        ref, counter = await spawn(system)
        with pytest.raises(CallTimeout):
            await ref.ask(Hold())
        counter.holding = anyio.Event()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(lambda: ref.ask(Hold(), timeout=None))
            await counter.holding.wait()
            assert system.statistics().deadlines == 0
            counter.release.set()


async def test_cancelling_an_ask_takes_the_message_back(system):
    """A message whose caller has gone before it was started is never started."""
    ref, counter = await spawn(system)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(ref.ask, Hold())
        await counter.holding.wait()
        with anyio.move_on_after(0.01):
            await ref.ask(Increment())
        counter.release.set()
    assert await ref.ask(Log()) == []
    assert system.statistics().dead_letters.cancelled == 1
    assert system.statistics().deadlines == 0


async def test_an_actor_that_has_ended_answers_at_once(system):
    """An ask raises ActorStopped without waiting; tells are dead letters, counted and logged once."""
    ref, _ = await spawn(system)
    await ref.stop()
    with Stopwatch() as watch, pytest.raises(ActorStopped, match="actor counter is dead: it was told to stop"):
        await ref.ask(Increment())
    assert watch.seconds < 0.5
    with structlog.testing.capture_logs() as logs:
        await ref.tell(Increment())
        ref.tell_nowait(Increment())
    assert [(line["kind"], line["actor"]) for line in logs] == [("closed", "counter")]
    assert system.statistics().dead_letters.closed == 3


async def test_a_call_cycle_raises_at_once(system):
    """A to B to A raises CallCycle with the names on the way, and is not found out by waiting."""

    class Through(Message[int], frozen=True):
        refs: tuple

    class Hop(Actor):
        @handles(Through)
        async def through(self, message: Through) -> int:
            first, *rest = message.refs
            return await first.ask(Through(tuple(rest)))

    hops = {name: await system.using(name=name).spawn(Hop) for name in "abc"}
    with pytest.raises(CallCycle, match="call cycle a -> b -> a") as caught:
        await hops["c"].ask(Through((hops["a"], hops["b"], hops["a"])))
    assert caught.value.chain == ("a", "b", "a")
    with pytest.raises(CallCycle, match="a -> a"):
        await hops["a"].ask(Through((hops["a"],)))


async def test_stopping_yourself_from_a_handler_is_a_cycle(system):
    """A handler that waits for its own actor's end is told so, and pointed to context.stop()."""

    class Suicidal(Actor):
        @handles(Increment)
        async def increment(self, message: Increment) -> int:
            await self.context.ref.stop()
            return 0

    ref = await system.spawn(Suicidal)
    with pytest.raises(CallCycle):
        await ref.ask(Increment())
    assert ref.is_alive


async def test_nested_asks_inherit_the_lesser_deadline(system):
    """The deadline of the message in hand holds for asks made in its handler."""
    seen: list[float | None] = []

    class Inner(Actor):
        @handles(Increment)
        def increment(self, message: Increment) -> int:
            seen.append(self.context.deadline)
            return 1

    class Outer(Actor):
        def __init__(self, inner, timeout) -> None:
            self.inner, self.timeout = inner, timeout

        @handles(Increment)
        async def increment(self, message: Increment) -> int:
            seen.append(self.context.deadline)
            return await self.inner.ask(Increment(), timeout=self.timeout)

    inner = await system.spawn(Inner)
    for timeout in (None, 100.0, 1.0):
        outer = await system.spawn(Outer, inner, timeout)
        await outer.ask(Increment(), timeout=5.0)
    (outer1, inner1), (outer2, inner2), (outer3, inner3) = seen[:2], seen[2:4], seen[4:]
    assert inner1 == outer1
    assert inner2 == outer2
    assert inner3 < outer3 - 3.0


async def test_a_task_that_a_handler_leaves_behind_may_ask_its_actor(system):
    """The chain and the deadline of a message end with its handler."""

    class Parent(Actor):
        def __init__(self) -> None:
            self.result: int | None = None
            self.done = anyio.Event()

        @handles(Hold)
        def hold(self, message: Hold) -> str:
            self.context.start_task(self.later(self.context.ref))
            return "started"

        @handles(Increment)
        def increment(self, message: Increment) -> int:
            return 42

        async def later(self, ref) -> None:
            self.result = await ref.ask(Increment())
            self.done.set()

    made: list[Parent] = []
    ref = await system.spawn(lambda: made.append(Parent()) or made[0])
    assert await ref.ask(Hold()) == "started"
    await made[0].done.wait()
    assert made[0].result == 42


async def test_a_full_mailbox_of_one_who_waits_for_you_is_an_error(system):
    """tell() to an actor that waits for the sender does not wait for room that cannot come."""

    class Asking(Actor):
        def __init__(self, other) -> None:
            self.other = other

        @handles(Hold)
        async def hold(self, message: Hold) -> str:
            self.context.ref.tell_nowait(Increment())
            return await self.other.ask(Fail(ref_of(self)))

        @handles(Increment)
        def increment(self, message: Increment) -> int:
            return 1

    def ref_of(actor):
        return actor.context.ref

    class Telling(Actor):
        @handles(Fail)
        async def fail(self, message: Fail) -> int:
            await message.error.tell(Increment())
            return 1

    other = await system.spawn(Telling)
    ref = await system.using(name="asking", mailbox=1).spawn(Asking, other)
    with pytest.raises(MailboxFull, match="asking"):
        await ref.ask(Hold())


async def test_refs_are_values(system):
    """Two refs to one actor are equal and hash alike; a ref prints its actor's state."""
    ref, _ = await spawn(system)

    class Self(Actor):
        @handles(Log)
        def log(self, message: Log) -> list:
            return [self.context.ref]

    other = await system.spawn(Self)
    (again,) = await other.ask(Log())
    assert again == other
    assert hash(again) == hash(other)
    assert ref != other
    assert repr(ref) == "<Ref counter: 0/256 queued, running>"
    assert ref.name == "counter"
    assert ref.address.endswith("/counter")
    await ref.stop()
    assert repr(ref) == "<Ref counter: 0/256 queued, stopped>"
    assert not ref.is_alive


async def test_an_actor_is_idle_while_it_waits_and_nothing_has_come():
    """A message that has not begun is something, and an actor that has ended does not wait."""
    async with ActorSystem() as system:
        ref = await system.spawn(Counter)
        await ref.ask(Increment())
        assert ref.is_idle
        ref.tell_nowait(Increment())
        assert not ref.is_idle
        assert await ref.ask(Increment()) == 3
        assert ref.is_idle
        await ref.stop()
        assert not ref.is_idle
