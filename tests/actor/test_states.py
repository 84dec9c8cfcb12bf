from __future__ import annotations

import anyio
import anyio.lowlevel
import pytest

from aexec.actor import Actor, handles
from aexec.errors import ActorStopped, CallTimeout, MailboxFull
from aexec.messages.base import Message

pytestmark = pytest.mark.anyio


class Load(Message[None, "Model"], frozen=True):
    state: str = "ready"


class Become(Message[None, "Model"], frozen=True):
    state: str


class Run(Message[int, "Model"], frozen=True):
    number: int


class Side(Message[int, "Model"], frozen=True):
    number: int


class Quick(Message[int, "Model"], frozen=True):
    number: int


class Any(Message[int, "Model"], frozen=True):
    number: int


class Model(Actor):
    states = ("starting", "ready", "draining")

    def __init__(self) -> None:
        self.ran: list[int] = []
        self.gate = anyio.Event()

    @handles(Load)
    async def load(self, message: Load) -> None:
        await self.gate.wait()
        self.state = message.state

    @handles(Become, lane="urgent")
    def become(self, message: Become) -> None:
        self.state = message.state

    @handles(Run, when="ready")
    def run(self, message: Run) -> int:
        self.ran.append(message.number)
        return message.number

    @handles(Side, when=("ready", "draining"), concurrent=2)
    async def side(self, message: Side) -> int:
        self.ran.append(message.number)
        await self.gate.wait()
        return message.number

    @handles(Quick, when="ready", lane="urgent")
    def quick(self, message: Quick) -> int:
        self.ran.append(message.number)
        return message.number

    @handles(Any)
    def any(self, message: Any) -> int:
        self.ran.append(message.number)
        return message.number


@pytest.fixture
async def model(system):
    made: list[Model] = []
    ref = await system.using(name="model", mailbox=8).spawn(lambda: made.append(Model()) or made[0])
    return ref, made[0]


async def until(condition) -> None:
    with anyio.fail_after(5):
        while not condition():
            await anyio.lowlevel.checkpoint()


async def test_messages_wait_for_their_state_in_order(model):
    """What is for another state waits for it, and then comes in order and before anything newer."""
    ref, actor = model
    for number in (1, 2):
        ref.tell_nowait(Run(number))
    assert await ref.ask(Any(0)) == 0
    assert ref.statistics().mailbox.postponed == 2
    assert repr(ref) == "<Ref model: 2/8 queued, 2 of them postponed, running>"
    ref.tell_nowait(Become("ready"))
    ref.tell_nowait(Run(3))
    ref.tell_nowait(Any(4))
    assert await ref.ask(Run(5)) == 5
    assert actor.ran == [0, 1, 2, 3, 4, 5]
    assert ref.statistics().mailbox == (0, 0, 0, 8, 0, 0)


async def test_what_is_still_out_of_turn_waits_on(model):
    """A change to a state that is not theirs leaves messages where they are, in order."""
    ref, actor = model
    for number in (1, 2):
        ref.tell_nowait(Run(number))
    await ref.ask(Become("draining"))
    await ref.ask(Any(0))
    assert ref.statistics().mailbox.postponed == 2
    await ref.ask(Become("ready"))
    assert await ref.ask(Run(3)) == 3
    assert actor.ran == [0, 1, 2, 3]


async def test_a_change_while_a_handler_awaits_reaches_the_urgent_lane_at_once(model):
    """A postponed urgent message is begun beside the handler that is in hand."""
    ref, actor = model
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(ref.ask, Load("draining"))
        await anyio.wait_all_tasks_blocked()
        tasks.start_soon(ref.ask, Quick(1))
        await anyio.wait_all_tasks_blocked()
        assert actor.ran == []
        actor.state = "ready"
        await until(lambda: actor.ran == [1])
        actor.gate.set()


async def test_a_task_of_the_actors_own_may_change_its_state(model):
    """The change wakes an actor that has nothing else to do."""
    ref, actor = model
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(ref.ask, Run(1))
        await anyio.wait_all_tasks_blocked()

        async def load() -> None:
            actor.state = "ready"

        actor.context.start_task(load())
    assert actor.ran == [1]


async def test_postponed_messages_keep_their_deadlines(model):
    """An ask that waits for a state ends in time, as never started, and never runs."""
    ref, actor = model
    with pytest.raises(CallTimeout) as caught:
        await ref.ask(Run(1), timeout=0.01)
    assert not caught.value.started
    assert ref.statistics().mailbox == (0, 0, 0, 8, 0, 0)
    await ref.ask(Become("ready"))
    await ref.ask(Any(0))
    assert actor.ran == [0]


async def test_a_postponed_message_can_be_cancelled(model):
    """Its room is free again when its asker has gone."""
    ref, actor = model
    with anyio.move_on_after(0.01):
        await ref.ask(Run(1))
    assert ref.statistics().mailbox.queued == 0
    await ref.ask(Become("ready"))
    assert actor.ran == []


async def test_postponed_messages_take_up_room(model):
    """They count against the bound, for every verb."""
    ref, _ = model
    for number in range(8):
        await ref.tell(Run(number))
    await anyio.wait_all_tasks_blocked()
    with pytest.raises(MailboxFull):
        ref.tell_nowait(Any(9))
    with pytest.raises(CallTimeout):
        await ref.tell(Any(9), timeout=0.01)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(ref.ask, Any(10))
        await anyio.wait_all_tasks_blocked()
        assert ref.statistics().mailbox.waiting == 1
        await ref.ask(Become("ready"))


async def test_postponed_messages_end_with_their_actor(system, model):
    """When it stops, those who asked are told so, and tells are dead letters."""
    ref, _ = model
    ref.tell_nowait(Run(1))
    async with anyio.create_task_group() as tasks:

        async def ask() -> None:
            with pytest.raises(ActorStopped):
                await ref.ask(Run(2))

        tasks.start_soon(ask)
        await anyio.wait_all_tasks_blocked()
        await ref.stop()
    assert system.statistics().dead_letters.closed == 2


async def test_held_back_messages_of_a_state_wait_for_it_again(model):
    """A concurrent= message that has waited for its slot is postponed if the state has changed meanwhile."""
    ref, actor = model
    actor.state = "ready"
    for number in range(4):
        ref.tell_nowait(Side(number))
    await until(lambda: sorted(actor.ran) == [0, 1])
    await ref.ask(Become("starting"))
    actor.gate.set()
    await until(lambda: ref.statistics().mailbox.postponed == 2)
    await ref.ask(Become("draining"))
    await until(lambda: sorted(actor.ran) == [0, 1, 2, 3])
    assert ref.statistics().mailbox.queued == 0


async def test_setting_the_same_state_changes_nothing(model):
    """Only a change lets messages in, so that an actor cannot spin."""
    ref, actor = model
    ref.tell_nowait(Run(1))
    await anyio.wait_all_tasks_blocked()
    actor.state = "starting"
    await ref.ask(Any(0))
    assert actor.ran == [0]


def test_an_actor_begins_in_its_first_state():
    """It may move before it lives in a system, as in a unit test or its constructor."""
    actor = Model()
    assert actor.state == "starting"
    actor.state = "ready"
    assert actor.state == "ready"
    assert isinstance(Model.state, object)


def test_unknown_states_are_refused():
    """A state that is not declared is refused: in when= as the class is created, in self.state when it is set."""
    with pytest.raises(ValueError, match="Model has no state 'steady': its states are starting, ready, draining"):
        Model().state = "steady"
    with pytest.raises(TypeError, match=r"Wrong\.run is for when='steady', and the states of Wrong are 'ready'"):

        class Wrong(Actor):
            states = ("ready",)

            @handles(Run, when="steady")
            def run(self, message: Run) -> int:
                return 1

    with pytest.raises(TypeError, match="the states of Undeclared are not declared"):

        class Undeclared(Actor):
            @handles(Run, when="ready")
            def run(self, message: Run) -> int:
                return 1

    with pytest.raises(TypeError, match="expected names"):

        class Text(Actor):
            states = "ready"


def test_an_actor_without_states_may_use_the_name():
    """``state`` is an attribute like any other unless a class declares states."""

    class Free(Actor):
        pass

    actor = Free()
    actor.state = {"mine": 1}
    assert actor.state == {"mine": 1}
