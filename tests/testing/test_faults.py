from __future__ import annotations

import anyio
import pytest

from aexec.actor import Actor, ActorSystem, Backoff, Message, Supervision, handles
from aexec.errors import ActorDied, ActorRestarted, CallTimeout, ConfigError
from aexec.messages.base import StreamMessage
from aexec.testing import VirtualClock, faults

pytestmark = pytest.mark.anyio

QUICK = Supervision(backoff=Backoff(initial=0.0, jitter=0.0))


class Increment(Message[int], frozen=True):
    """Add one."""


class Get(Message[int], frozen=True):
    """Read."""


class Count(StreamMessage[int], frozen=True):
    """Count to three."""


class Counter(Actor):
    value = 0

    @handles(Increment)
    def increment(self, message: Increment) -> int:
        self.value += 1
        return self.value

    @handles(Get)
    async def get(self, message: Get) -> int:
        return self.value

    @handles(Count)
    async def count(self, message: Count):
        for number in (1, 2, 3):
            yield number


@pytest.fixture
async def counter(system):
    return await system.spawn(Counter)


async def test_raise_strikes_one_kind_so_many_times(counter):
    """Others, and those after it, are handled as ever."""
    injection = faults.inject(counter, faults.Raise(ValueError("x")), kind=Increment, times=1)
    assert await counter.ask(Get()) == 0
    with pytest.raises(ValueError, match="x"):
        await counter.ask(Increment())
    assert await counter.ask(Increment()) == 1
    assert repr(injection) == "<Injection Raise(error=ValueError('x')) on Increment: 1 struck, 0 left>"
    assert counter.statistics().failed == 1


async def test_a_fault_ends_with_its_block(counter):
    """Without times= it strikes until then."""
    with faults.inject(counter, faults.Raise(ValueError("x"))) as injection:
        for _ in range(3):
            with pytest.raises(ValueError, match="x"):
                await counter.ask(Get())
    assert await counter.ask(Get()) == 0
    assert injection.struck == 3


@pytest.mark.usefixtures("virtual_clock")
async def test_hang_lasts_until_the_asker_gives_up(counter):
    """The actor goes on then."""
    faults.inject(counter, faults.Hang(), times=1)
    with pytest.raises(CallTimeout) as caught:
        await counter.ask(Increment(), timeout=0.05)
    assert caught.value.started
    assert await counter.ask(Increment()) == 1


@pytest.mark.usefixtures("virtual_clock")
async def test_drop_loses_a_message_and_the_mailbox_goes_on(counter):
    """Its asker hears nothing until its deadline; a tell is just lost."""
    faults.inject(counter, faults.Drop(), kind=Increment, times=2)
    await counter.tell(Increment())
    async with anyio.create_task_group() as tasks:

        async def ask() -> None:
            with pytest.raises(CallTimeout):
                await counter.ask(Increment(), timeout=0.2)

        tasks.start_soon(ask)
        await anyio.lowlevel.checkpoint()
        assert await counter.ask(Get()) == 0
    assert counter.statistics().deferred == 0
    assert await counter.ask(Increment()) == 1


async def test_delay_is_of_the_systems_clock():
    """The message is handled after it."""
    async with ActorSystem(clock=VirtualClock()) as system:
        counter = await system.spawn(Counter)
        faults.inject(counter, faults.Delay(20.0), kind=Increment)
        assert await counter.ask(Increment()) == 1
        assert system.now() == 20.0


async def test_die_ends_an_actor_that_nobody_supervises(counter):
    """Who asked hears of it at once, with what it died of."""
    faults.inject(counter, faults.Die(RuntimeError("boom")), kind=Increment)
    with pytest.raises(ActorDied, match="boom"):
        await counter.ask(Increment())
    assert not counter.is_alive


async def test_die_is_a_matter_for_the_supervisor(system):
    """A restarted actor has its faults still."""
    counter = await system.using(supervision=QUICK).spawn(Counter)
    faults.inject(counter, faults.Die(), kind=Increment, times=2)
    for _ in range(2):
        with pytest.raises(ActorRestarted):
            await counter.ask(Increment())
    assert await counter.ask(Increment()) == 1
    assert counter.statistics().restarts == 2


async def test_a_stream_may_be_struck(counter):
    """Before its first item."""
    faults.inject(counter, faults.Raise(ValueError("x")), kind=Count, times=1)
    with pytest.raises(ValueError, match="x"):
        async with counter.stream(Count()) as items:
            [item async for item in items]
    async with counter.stream(Count()) as items:
        assert [item async for item in items] == [1, 2, 3]


async def test_a_fault_of_ones_own(counter):
    """It may look at the message, handle it, and change the reply."""

    class Twice(faults.Fault):
        async def strike(self, hit: faults.Hit) -> int:
            await hit.proceed()
            return await hit.proceed()

    faults.inject(counter, Twice(), kind=Increment, times=1)
    assert await counter.ask(Increment()) == 2


async def test_what_cannot_be_struck_is_said_at_once(counter):
    """An actor that has ended, a message it has no handler for, a number of times and a fault that are none."""
    with pytest.raises(ConfigError, match="times is 0"):
        faults.inject(counter, faults.Hang(), times=0)
    with pytest.raises(ConfigError, match=r"fault is ValueError\(.x.\): expected one as faults.Raise\(error\)"):
        faults.inject(counter, ValueError("x"))

    class Other(Message[None], frozen=True):
        pass

    with pytest.raises(ConfigError, match="has no handler for Other; it handles Increment, Get"):
        faults.inject(counter, faults.Hang(), kind=Other)
    await counter.stop()
    with pytest.raises(ConfigError, match="has ended"):
        faults.inject(counter, faults.Hang())
