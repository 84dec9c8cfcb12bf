from __future__ import annotations

import anyio
import anyio.lowlevel
import pytest
import structlog

from aexec.actor import Actor, handles, trace_context
from aexec.errors import ActorStopped, ConfigError, UnhandledMessage
from aexec.messages.base import Message

pytestmark = pytest.mark.anyio

TRACE = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


class Ask(Message[None], frozen=True):
    what: str


class Note(Message[None], frozen=True):
    text: str


class Unknown(Message[None], frozen=True):
    pass


class Diary(Actor):
    """Does as it is asked, and writes down the notes it gets."""

    def __init__(self, other=None) -> None:
        self.other = other
        self.notes: list[str] = []
        self.facts: list[object] = []
        self.gate = anyio.Event()

    @handles(Note)
    def note(self, message: Note) -> None:
        self.notes.append(message.text)
        self.facts.append((self.context.sender, self.context.traceparent))

    @handles(Ask)
    async def ask(self, message: Ask) -> None:
        await getattr(self, message.what)()

    async def tell_other(self) -> None:
        await self.other.tell(Note("told"))

    async def stop_self(self) -> None:
        self.context.stop()

    async def pipe_and_stop(self) -> None:
        self.context.pipe_to_self(self.gate.wait(), lambda _: Note("too late"), lambda error: Note(repr(error)))
        await anyio.lowlevel.checkpoint()
        self.gate.set()
        for _ in range(5):  # the result is in the mailbox by now
            await anyio.lowlevel.checkpoint()
        self.context.stop()

    async def forget(self) -> None:
        self.notes.clear()

    async def wait(self) -> None:
        await self.gate.wait()

    async def noted_so_many(self, count: int) -> None:
        with anyio.fail_after(5):
            while len(self.notes) < count:
                await anyio.lowlevel.checkpoint()

    async def noted(self, *texts: str) -> None:
        with anyio.fail_after(5):
            while self.notes != list(texts):
                await anyio.lowlevel.checkpoint()


@pytest.fixture
async def diary(system):
    made: list[Diary] = []
    ref = await system.using(name="diary").spawn(lambda: made.append(Diary()) or made[0])
    return ref, made[0]


async def fails() -> str:
    raise ValueError("no result")


async def works() -> str:
    return "result"


async def test_an_actor_knows_its_surroundings(system, diary):
    """Context gives own address, system and incarnation, and prints them."""
    ref, actor = diary
    context = actor.context
    assert context.ref == ref
    assert context.system is system
    assert context.generation == 1
    assert (context.deadline, context.sender, context.traceparent) == (None, None, None)
    assert repr(context) == "<Context diary: 0/256 queued, running>"


async def test_the_log_names_the_actor(diary):
    """Each line of context.log has the system and the actor bound to it."""
    _, actor = diary
    with structlog.testing.capture_logs() as logs:
        actor.context.log.info("written", page=3)
    assert logs == [{"event": "written", "page": 3, "actor": "diary", "system": "test", "log_level": "info"}]
    assert actor.context.log is actor.context.log


async def test_what_an_actor_sent_itself_is_moot_when_it_ends(system, diary):
    """Its own results that come with its end are counted, and nobody is warned of them."""
    ref, _ = diary
    with structlog.testing.capture_logs() as logs:
        await ref.ask(Ask("pipe_and_stop"))
        await ref.closed()
    assert logs == []
    assert system.statistics().dead_letters.closed == 1


async def test_a_message_knows_its_sender_and_its_trace(system, diary):
    """The sender's address and the W3C trace context travel with a message, through handlers as well."""
    ref, actor = diary
    sender = await system.spawn(Diary, ref)
    with trace_context(TRACE):
        await sender.ask(Ask("tell_other"))
    await ref.ask(Note("from outside"))
    assert actor.notes == ["told", "from outside"]
    assert actor.facts == [(sender, TRACE), (None, None)]


async def test_timers_arrive_as_messages(diary, virtual_clock):
    """after() sends the actor a message later; the earlier timer rings first."""
    _, actor = diary
    actor.context.after(0.02, Note("second"))
    actor.context.after(0.001, Note("first"))
    await virtual_clock.advance(0.02)
    assert actor.notes == ["first", "second"]


async def test_a_timer_can_be_called_off(diary, virtual_clock):
    """A cancelled timer does not ring."""
    _, actor = diary
    timer = actor.context.after(0.001, Note("never"))
    timer.cancel()
    actor.context.after(0.02, Note("after it"))
    await virtual_clock.advance(0.02)
    assert actor.notes == ["after it"]


async def test_a_timer_waits_for_room(system):
    """A timer whose actor has a full mailbox is not lost, and does not pass the bound."""
    made: list[Diary] = []
    ref = await system.using(mailbox=1).spawn(lambda: made.append(Diary()) or made[0])
    context = made[0].context
    ref.tell_nowait(Note("first"))
    context._cell.post(Note("second"))
    assert ref.statistics().mailbox == (1, 0, 0, 1, 1, 0)
    await made[0].noted("first", "second")


async def test_timers_end_with_their_actor(system, diary, virtual_clock):
    """A timer of an actor that has ended rings for nobody."""
    ref, actor = diary
    actor.context.after(0.005, Note("too late"))
    await ref.stop()
    await virtual_clock.advance(0.02)
    assert system.statistics().dead_letters.closed == 0


async def test_a_timer_for_a_message_without_handler_is_refused(diary):
    """The mistake is raised where it is made, not when the timer rings."""
    _, actor = diary
    with pytest.raises(UnhandledMessage):
        actor.context.after(0.0, Unknown())


async def test_a_ticker_comes_again_until_it_is_called_off(diary):
    """every() sends the message again and again; none comes after cancel()."""
    _, actor = diary
    ticker = actor.context.every(0.001, Note("tick"))
    assert repr(ticker) == "<Ticker Note to diary: every 0.001 s>"
    await actor.noted_so_many(3)
    ticker.cancel()
    ticker.cancel()
    assert repr(ticker) == "<Ticker Note to diary: over>"
    await actor.context.ref.ask(Ask("forget"))
    actor.context.after(0.01, Note("after it"))
    await actor.noted("after it")


async def test_ticks_do_not_pile_up(diary):
    """A tick is left out while the one before it waits in the mailbox."""
    ref, actor = diary
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(ref.ask, Ask("wait"))
        await anyio.wait_all_tasks_blocked()
        ticker = actor.context.every(0.001, Note("tick"))
        await anyio.sleep(0.02)
        assert ref.statistics().mailbox.queued == 1
        ticker.cancel()
        actor.gate.set()
    await actor.noted("tick")


async def test_ticks_end_with_their_actor(system, diary):
    """A ticker of an actor that has ended comes to rest."""
    ref, actor = diary
    actor.context.every(0.001, Note("tick"))
    await ref.stop()
    with anyio.fail_after(5):
        while system.statistics().deadlines:
            await anyio.lowlevel.checkpoint()
    assert system.statistics().dead_letters.undeliverable == 0


async def test_a_senseless_ticker_is_refused(diary):
    """Its period is positive, and its message is one that the actor handles."""
    _, actor = diary
    with pytest.raises(ConfigError, match="every 0 s"):
        actor.context.every(0, Note("tick"))
    with pytest.raises(UnhandledMessage):
        actor.context.every(1.0, Unknown())


async def test_results_are_piped_to_the_actor(diary):
    """What an awaitable gives or raises comes back as a message, handled in turn."""
    _, actor = diary
    actor.context.pipe_to_self(works(), Note, lambda error: Note(repr(error)))
    await actor.noted("result")
    actor.context.pipe_to_self(fails(), Note, lambda error: Note(repr(error)))
    await actor.noted("result", "ValueError('no result')")


async def test_an_owned_task_ends_with_its_actor(diary):
    """A task of the actor's own is cancelled before the actor is over; none can be started after."""
    ref, actor = diary
    ended: list[str] = []

    async def task() -> None:
        try:
            await anyio.sleep_forever()
        finally:
            ended.append("ended")

    owned = actor.context.start_task(task())
    assert repr(owned).startswith("<OwnedTask diary/")
    await anyio.wait_all_tasks_blocked()
    context = actor.context
    await ref.stop()
    assert ended == ["ended"]
    with pytest.raises(ActorStopped):
        context.start_task(task())


async def test_an_owned_task_can_be_cancelled(diary):
    """Cancelling it is not a failure of the actor, before or after it has begun."""
    ref, actor = diary
    for begun in (False, True):
        ended = anyio.Event()

        async def task(ended: anyio.Event = ended) -> None:
            try:
                await anyio.sleep_forever()
            finally:
                ended.set()

        owned = actor.context.start_task(task())
        if begun:
            await anyio.wait_all_tasks_blocked()
        owned.cancel()
        if begun:
            await ended.wait()
    await ref.ask(Note("alive"))


async def test_an_actor_may_stop_itself(diary):
    """context.stop() ends the actor once the message in hand is handled."""
    ref, _ = diary
    await ref.ask(Ask("stop_self"))
    exit_ = await ref.stop()
    assert exit_.reason == "it stopped itself"


async def test_what_an_actor_posts_itself_is_moot_once_it_ends(system, diary):
    """It comes like any message, whoever's turn it is; when the actor ends it is counted, and nobody is warned."""
    ref, actor = diary
    actor.context.post(Note("in time"))
    await actor.noted("in time")
    with structlog.testing.capture_logs() as logs:
        actor.context.post(Note("too late"))
        await ref.stop()
        actor.context.post(Note("later still"))
    assert logs == []
    assert actor.notes == ["in time"]
    assert system.statistics().dead_letters.closed == 1
