from __future__ import annotations

from typing import Any

import anyio
import anyio.lowlevel
import pytest
import structlog

from aexec.actor import Actor, ActorSystem, Exit, Ref, handles
from aexec.actor.supervision import Backoff, Directive, Supervision
from aexec.errors import ActorDied, ActorRestarted, CallCycle, CallTimeout, RestartsExhausted
from aexec.messages.base import Message

pytestmark = pytest.mark.anyio

QUICK = Backoff(0.0, 0.0, 0.0)


class Break(Message[None], frozen=True):
    how: str = "broken"


class BreakTask(Message[None], frozen=True):
    pass


class Count(Message[int], frozen=True):
    pass


class Hold(Message[str], frozen=True):
    pass


class Beside(Message[str], frozen=True):
    pass


class Later(Message[str], frozen=True):
    pass


class Lost(Exception):
    """The device is gone."""


class Child(Actor):
    """Counts, and breaks when told to."""

    def __init__(self, events: list[str], label: str = "child", refuses: int = 0) -> None:
        self.events, self.label, self.count, self.refuses = events, label, 0, refuses

    async def on_start(self) -> None:
        generation = self.context.generation
        if 1 < generation <= 1 + self.refuses:
            self.events.append(f"{self.label} refuses")
            raise OSError("not yet")
        self.events.append(f"{self.label} starts {generation}")

    async def on_stop(self, reason: Exit) -> None:
        await anyio.lowlevel.checkpoint()
        self.events.append(f"{self.label} stops: {reason.kind}")

    @handles(Break, fatal=Lost)
    def fail(self, message: Break) -> None:
        raise Lost("lost") if message.how == "lost" else ValueError(message.how)

    @handles(BreakTask)
    def fail_task(self, message: BreakTask) -> None:
        async def task() -> None:
            raise ValueError("task broken")

        self.context.start_task(task())

    @handles(Count)
    def add(self, message: Count) -> int:
        self.count += 1
        return self.count

    @handles(Hold)
    async def hold(self, message: Hold) -> str:
        self.events.append(f"{self.label} holds")
        await anyio.sleep_forever()
        return "never"

    @handles(Beside, concurrent=2)
    async def beside(self, message: Beside) -> str:
        return await self.hold(Hold())

    @handles(Later)
    def later(self, message: Later) -> Any:
        self.events.append(f"{self.label} owes")
        self.kept = self.context.defer(message)
        return self.kept


class Adopt(Message[Any], frozen=True):
    name: str
    refuses: int = 0


class Parent(Actor):
    """Has children, and restarts them."""

    supervision = Supervision(backoff=QUICK)

    def __init__(self, events: list[str]) -> None:
        self.events = events

    @handles(Adopt)
    async def adopt(self, message: Adopt) -> Ref[Child]:
        return await self.context.using(name=message.name).spawn(Child, self.events, message.name, message.refuses)


@pytest.fixture
def events() -> list[str]:
    return []


@pytest.fixture(autouse=True)
def quiet():
    with structlog.testing.capture_logs() as logs:
        yield logs


async def until(condition) -> None:
    with anyio.fail_after(5):
        while not condition():
            await anyio.lowlevel.checkpoint()


async def family(system: ActorSystem, kind: type[Parent], events: list[str], *names: str, **options: Any):
    parent = await system.using(name="parent").spawn(kind, events)
    return parent, [await parent.ask(Adopt(name, **options)) for name in names]


async def generation(ref: Ref[Any], number: int) -> None:
    await until(lambda: ref.statistics().generation == number and ref.statistics().state == "running")


# ---------------------------------------------------------------- restart


async def test_a_restart_is_a_new_actor_at_the_same_address(system, events):
    """The same ref reaches a new object from the same arguments; on_stop of the old one ran as failed."""
    _, (ref,) = await family(system, Parent, events, "it")
    assert await ref.ask(Count()) == 1
    address = ref.address
    await ref.tell(Break())
    assert await ref.ask(Count()) == 1
    assert (ref.address, ref.statistics().generation, ref.statistics().restarts) == (address, 2, 1)
    assert events == ["it starts 1", "it stops: failed", "it starts 2"]


async def test_a_restart_keeps_the_mailbox(system, events):
    """Messages that wait survive a restart; the one that failed does not come again."""
    _, (ref,) = await family(system, Parent, events, "it")
    ref.tell_nowait(Break())
    for _ in range(3):
        ref.tell_nowait(Count())
    assert await ref.ask(Count()) == 4
    assert ref.statistics().failed == 1


async def test_an_ask_that_fails_is_its_askers_business(system, events):
    """An error of an ask goes to the asker, and the actor lives on as it is."""
    _, (ref,) = await family(system, Parent, events, "it")
    await ref.ask(Count())
    with pytest.raises(ValueError, match="broken"):
        await ref.ask(Break())
    assert await ref.ask(Count()) == 2
    assert ref.statistics().restarts == 0


async def test_a_task_that_fails_restarts_its_actor(system, events):
    """A supervised actor does not die of a task of its own."""
    _, (ref,) = await family(system, Parent, events, "it")
    await ref.ask(BreakTask())
    await generation(ref, 2)


@pytest.mark.parametrize("message", [Beside(), Later()])
async def test_an_ask_in_hand_ends_with_the_incarnation(system, events, message):
    """Who waits for a handler or a deferred reply of the old incarnation is told that it was restarted."""
    _, (ref,) = await family(system, Parent, events, "it")
    async with anyio.create_task_group() as tasks:

        async def ask() -> None:
            with pytest.raises(ActorRestarted, match=r"it was restarted while it had .* in hand: ValueError: broken"):
                await ref.ask(message)

        tasks.start_soon(ask)
        await until(lambda: len(events) == 2)
        await ref.tell(Break())
    assert await ref.ask(Count()) == 1


async def test_messages_held_back_for_a_slot_begin_in_the_next_incarnation(system, events):
    """A concurrent= message that found no slot is handled by the new actor."""
    _, (ref,) = await family(system, Parent, events, "it")
    for _ in range(3):
        ref.tell_nowait(Beside())
    await until(lambda: events.count("it holds") == 2)
    await ref.tell(Break())
    await until(lambda: events[-1] == "it holds" and "it starts 2" in events)
    assert events.count("it holds") == 3
    await ref.stop(timeout=0.0)


async def test_a_backoff_that_fails_is_logged_and_the_actor_comes_back(system, events):
    """The fault of a wait strategy is not the actor's: it waits as by default."""
    wait_for_ever = Supervision(backoff=lambda state: float("inf"))
    ref = await system.using(supervision=wait_for_ever).spawn(Child, events)
    with structlog.testing.capture_logs() as logs:
        await ref.tell(Break())
        assert await ref.ask(Count()) == 1
    assert "backoff failed" in [entry["event"] for entry in logs]


async def test_children_end_before_their_parent_is_restarted(system, events):
    """A restarted actor begins without children."""
    top = await system.using(supervision=Supervision(backoff=QUICK), name="top").spawn(Mother, events)
    child = await top.ask(Adopt("child"))
    await top.tell(Break())
    await generation(top, 2)
    assert (await child.stop()).reason == "its parent top ended"
    assert events == ["top starts", "child starts 1", "child stops: stopped", "top stops: failed", "top starts"]


class Mother(Parent):
    async def on_start(self) -> None:
        self.events.append("top starts")

    async def on_stop(self, reason: Exit) -> None:
        self.events.append(f"top stops: {reason.kind}")

    @handles(Break)
    def fail(self, message: Break) -> None:
        raise ValueError(message.how)


async def test_asks_wait_between_incarnations_within_their_deadline(system, events):
    """During the back-off an ask waits, and its own limit ends it; a stop ends the back-off at once."""

    class Slow(Parent):
        supervision = Supervision(backoff=Backoff(60.0, 60.0))

    _, (ref,) = await family(system, Slow, events, "it")
    await ref.tell(Break())
    await until(lambda: "it stops: failed" in events)
    assert ref.statistics().state == "restarting"
    assert ref.is_alive
    with pytest.raises(CallTimeout, match="it never started"):
        await ref.ask(Count(), timeout=0.02)
    with anyio.fail_after(2):
        assert (await ref.stop()).kind == "stopped"
    assert events == ["it starts 1", "it stops: failed"]


# ---------------------------------------------------------------- the budget


async def test_the_budget_ends_it(system, events):
    """One failure more than the budget allows ends the actor and its parent, by name, count and window."""
    parent, (ref,) = await family(system, Parent, events, "it")
    for number in range(3):
        await ref.tell(Break())
        await generation(ref, number + 2)
    await ref.tell(Break("the last"))
    with pytest.raises(
        ActorDied, match=r"it has used up its 3 restarts within 60 s .* its last failure: ValueError: the last"
    ) as caught:
        await ref.ask(Count())
    assert isinstance(caught.value.__cause__, RestartsExhausted)
    await until(lambda: not parent.is_alive)


async def test_budgets_are_counted_per_child(system, events):
    """The failures of one child do not use up another's restarts."""
    _, (first, second) = await family(system, Parent, events, "first", "second")
    for number in range(3):
        for ref in (first, second):
            await ref.tell(Break())
            await generation(ref, number + 2)


async def test_a_start_that_fails_counts_and_does_not_loop(system, events):
    """Restarts whose on_start fails use up the budget; a later one that succeeds ends it well."""
    _, (patient,) = await family(system, Parent, events, "it", refuses=2)
    await patient.tell(Break())
    assert await patient.ask(Count()) == 1
    assert events == ["it starts 1", "it stops: failed", "it refuses", "it refuses", "it starts 4"]


async def test_a_start_that_always_fails_ends_it(system, events):
    """An actor that cannot start again ends when its restarts are used up."""
    _, (ref,) = await family(system, Parent, events, "it", refuses=99)
    await ref.tell(Break())
    with pytest.raises(ActorDied, match="used up its 3 restarts"):
        await ref.ask(Count())
    assert events.count("it refuses") == 3


# ---------------------------------------------------------------- strategies


@pytest.mark.parametrize(
    ("strategy", "restarted"),
    [("one_for_one", "b"), ("rest_for_one", "bc"), ("one_for_all", "abc")],
)
async def test_a_strategy_says_who_is_restarted(system, events, strategy, restarted):
    """They go down the youngest first, and come up the eldest first."""

    class Group(Parent):
        supervision = Supervision(strategy=strategy, backoff=QUICK)

    _, refs = await family(system, Group, events, "a", "b", "c")
    del events[:]
    await refs[1].tell(Break())
    await generation(refs[1], 2)
    await until(lambda: len(events) == 2 * len(restarted))
    assert events == [
        *[f"{name} stops: failed" for name in reversed(restarted)],
        *[f"{name} starts 2" for name in restarted],
    ]
    assert {ref.name for ref in refs if ref.statistics().restarts} == set(restarted)


async def test_siblings_are_cut_short_for_a_restart(system, events):
    """A sibling that is restarted along does not finish its handler."""

    class Group(Parent):
        supervision = Supervision(strategy="one_for_all", backoff=QUICK)

    _, (first, second) = await family(system, Group, events, "a", "b")
    async with anyio.create_task_group() as tasks:

        async def ask() -> None:
            with pytest.raises(ActorRestarted, match="restarted with its sibling b: ValueError: broken"):
                await first.ask(Hold())

        tasks.start_soon(ask)
        await until(lambda: "a holds" in events)
        await second.tell(Break())
    await generation(first, 2)


async def test_actors_at_the_top_are_a_group_by_their_supervision(system, events):
    """What is spawned under one Supervision is restarted together; others are left alone."""
    together = system.using(supervision=Supervision(strategy="one_for_all", backoff=QUICK))
    first, second = [await together.spawn(Child, events) for _ in range(2)]
    other = await system.spawn(Child, events)
    await second.tell(Break())
    await generation(first, 2)
    await generation(second, 2)
    assert other.statistics().generation == 1


async def test_a_member_that_is_stopped_holds_up_no_round(system, events):
    """A restart of a group goes on without who was stopped meanwhile."""

    class Group(Parent):
        supervision = Supervision(strategy="one_for_all", backoff=Backoff(0.05, 0.05, 0.0))

    _, refs = await family(system, Group, events, "a", "b", "c")
    await refs[2].tell(Break())
    await until(lambda: "a stops: failed" in events)
    await refs[0].stop()
    await generation(refs[1], 2)
    await generation(refs[2], 2)


# ---------------------------------------------------------------- directives


class Decider(Parent):
    """Does what it is told."""

    decision: Any = None
    asked: list[str]

    def on_child_failed(self, child: Ref[Any], error: BaseException) -> Any:
        self.events.append(f"asked about {child.name}: {error}")
        return self.decision


class Thinker(Decider):
    """The same, after some thought."""

    async def on_child_failed(self, child: Ref[Any], error: BaseException) -> Any:
        await anyio.lowlevel.checkpoint()
        return super().on_child_failed(child, error)


@pytest.mark.parametrize("kind", [Decider, Thinker])
async def test_resume_goes_on_as_it_is(system, events, kind):
    """The message is lost, the state is kept, and later messages come in order."""
    kind = type("It", (kind,), {"decision": Directive.RESUME})
    _, (ref,) = await family(system, kind, events, "it")
    await ref.ask(Count())
    await ref.tell(Break())
    await ref.tell(Break("again"))
    assert await ref.ask(Count()) == 2
    assert events == ["it starts 1", "asked about it: broken", "asked about it: again"]


@pytest.mark.parametrize("kind", [Decider, Thinker])
async def test_restart_is_the_default_and_may_be_said(system, events, kind):
    """None means what the supervision says, which is to restart."""
    for decision in (None, Directive.RESTART):
        parent, (ref,) = await family(system, type("It", (kind,), {"decision": decision}), events, "it")
        await ref.ask(Count())
        await ref.tell(Break())
        assert await ref.ask(Count()) == 1
        await parent.stop()


@pytest.mark.parametrize("kind", [Decider, Thinker])
async def test_stop_ends_the_child_alone(system, events, kind):
    """A child that is stopped for its failure is dead; its parent lives."""
    parent, (ref,) = await family(system, type("It", (kind,), {"decision": Directive.STOP}), events, "it")
    await ref.tell(Break())
    with pytest.raises(ActorDied, match="actor it is dead: ValueError: broken"):
        await ref.ask(Count())
    assert parent.is_alive


@pytest.mark.parametrize("kind", [Decider, Thinker])
async def test_escalate_fails_the_parent(system, events, kind):
    """The failure is the parent's, whose supervisor deals with it: here the parent is restarted."""
    kind = type("It", (kind,), {"decision": Directive.ESCALATE})
    top = system.using(name="parent", supervision=Supervision(backoff=QUICK))
    parent = await top.spawn(kind, events)
    ref = await parent.ask(Adopt("it"))
    await ref.tell(Break())
    await generation(parent, 2)
    assert not ref.is_alive


async def test_escalation_past_the_top_is_logged(system, events, quiet):
    """At the top the actor ends, the log says so, and the system lives."""
    top = system.using(supervision=Supervision(max_restarts=0), name="top")
    ref = await top.spawn(Child, events)
    await ref.tell(Break())
    await until(lambda: ref.statistics().state == "dead")
    assert "escalated past the top: the system lives on" in [line["event"] for line in quiet]
    assert (await system.spawn(Child, events)).is_alive


@pytest.mark.parametrize("decision", ["yes", True])
@pytest.mark.parametrize("kind", [Decider, Thinker])
async def test_what_is_no_directive_is_not_taken_for_one(system, events, kind, decision):
    """A supervisor that returns something else has decided nothing, and the failure goes up."""
    parent, (ref,) = await family(system, type("It", (kind,), {"decision": decision}), events, "it")
    await ref.tell(Break())
    await until(lambda: not parent.is_alive)


async def test_a_supervisor_that_raises_escalates(system, events, quiet):
    """An error in on_child_failed is logged, and the child's failure goes up."""

    class Helpless(Parent):
        async def on_child_failed(self, child: Ref[Any], error: BaseException) -> Directive:
            raise RuntimeError("at a loss")

    parent, (ref,) = await family(system, Helpless, events, "it")
    await ref.tell(Break())
    await until(lambda: not parent.is_alive)
    assert "on_child_failed failed" in [line["event"] for line in quiet]


async def test_a_supervisor_that_takes_too_long_escalates(events):
    """An async on_child_failed has the system's stop_timeout."""

    class Slow(Parent):
        async def on_child_failed(self, child: Ref[Any], error: BaseException) -> Directive:
            await anyio.sleep_forever()
            return Directive.RESUME

    async with ActorSystem(stop_timeout=0.02) as system:
        parent, (ref,) = await family(system, Slow, events, "it")
        await ref.tell(Break())
        await until(lambda: not parent.is_alive)


async def test_a_suspended_child_can_be_stopped(system, events):
    """A supervisor that still thinks holds up nobody's stop, and its later decision is void."""
    release = anyio.Event()

    class Slow(Parent):
        async def on_child_failed(self, child: Ref[Any], error: BaseException) -> Directive:
            await release.wait()
            return Directive.RESTART

    _, (ref,) = await family(system, Slow, events, "it")
    await ref.tell(Break())
    await until(lambda: ref.statistics().state == "suspended")
    ref.tell_nowait(Count())
    await anyio.wait_all_tasks_blocked()
    assert ref.statistics().handled == 0
    with anyio.fail_after(2):
        assert (await ref.stop()).kind == "stopped"
    release.set()
    await anyio.wait_all_tasks_blocked()
    assert events == ["it starts 1", "it stops: stopped"]


async def test_a_supervisor_cannot_ask_the_child_that_waits_for_it(system, events):
    """An ask from on_child_failed to the failed child is a call cycle, at once."""

    class Curious(Parent):
        async def on_child_failed(self, child: Ref[Any], error: BaseException) -> Directive:
            with pytest.raises(CallCycle):
                await child.ask(Count())
            return Directive.RESUME

    _, (ref,) = await family(system, Curious, events, "it")
    await ref.tell(Break())
    assert await ref.ask(Count()) == 1


# ---------------------------------------------------------------- fatal errors


@pytest.mark.parametrize("by_class", [False, True])
async def test_a_fatal_error_ends_the_actor_on_an_ask(system, events, by_class):
    """The asker gets the error itself, all after it ActorDied, and nobody restarts it."""

    class Doomed(Child):
        fatal = (Lost, ValueError)

    ref = await system.using(supervision=Supervision(backoff=QUICK)).spawn(Doomed, events)
    with pytest.raises(ValueError if by_class else Lost):
        await ref.ask(Break("broken" if by_class else "lost"))
    with pytest.raises(ActorDied):
        await ref.ask(Count())
    assert (await ref.closed()).kind == "failed"
    assert ref.statistics().restarts == 0


async def test_a_fatal_error_ends_the_actor_on_a_tell(system, events):
    """The supervisor is not asked."""
    _, (ref,) = await family(system, Parent, events, "it")
    ref.tell_nowait(Break("lost"))
    with pytest.raises(ActorDied, match="Lost: lost"):
        await ref.ask(Count())


async def test_a_fatal_error_in_a_deferred_reply_ends_the_actor(system, events):
    """It is fatal also when it comes after the handler has returned."""

    class Doomed(Child):
        fatal = (Lost,)

    made: list[Doomed] = []
    ref = await system.spawn(lambda: made.append(Doomed(events)) or made[0])
    async with anyio.create_task_group() as tasks:

        async def ask() -> None:
            with pytest.raises(Lost):
                await ref.ask(Later())

        tasks.start_soon(ask)
        await until(lambda: "child owes" in events)
        made[0].kept.fail(Lost("late"))
    assert not ref.is_alive


# ---------------------------------------------------------------- nobody supervises


async def test_without_supervision_a_tell_that_fails_is_logged(system, events, quiet):
    """Nothing is restarted that nobody asked to have restarted."""
    ref = await system.spawn(Child, events)
    await ref.ask(Count())
    await ref.tell(Break())
    assert await ref.ask(Count()) == 2
    assert [line["event"] for line in quiet] == ["handler failed"]


async def test_closing_during_a_restart_leaves_nothing(events):
    """A system closes while its actors are in any state of a restart."""
    async with ActorSystem() as system:
        supervised = system.using(supervision=Supervision(strategy="one_for_all", max_restarts=1000, backoff=QUICK))
        refs = [await supervised.spawn(Child, events) for _ in range(5)]
        for ref in refs:
            ref.tell_nowait(Break())
        await anyio.lowlevel.checkpoint()
    assert system.statistics().actors == 0
