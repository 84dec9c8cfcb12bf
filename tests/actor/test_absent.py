from __future__ import annotations

import pickle
import time
import typing

import pytest

from aexec.actor import Actor, ActorSystem, Ref, handles
from aexec.actor.ref import ref_to
from aexec.errors import ActorDied, ConfigError
from aexec.messages.base import Message

pytestmark = pytest.mark.anyio


class Ping(Message[str], frozen=True):
    pass


class Pinged(Actor):
    @handles(Ping)
    def ping(self, message: Ping) -> str:
        return "pong"


class Other(Actor):
    pass


async def send(ref: Ref[Pinged], verb: str) -> None:
    if verb == "tell_nowait":
        ref.tell_nowait(Ping())
    else:
        await getattr(ref, verb)(Ping())


def copy(ref: Ref[Pinged]) -> Ref[Pinged]:
    return typing.cast("Ref[Pinged]", pickle.loads(pickle.dumps(ref)))


async def test_a_pickled_ref_leads_to_the_same_actor(system):
    """It equals the one it was made of, and reaches the same mailbox."""
    ref = await system.using(name="a/b c").spawn(Pinged)
    assert copy(ref) == ref
    assert len({ref, copy(ref), system.ref(ref.address), system.find("a/b c")}) == 1
    assert await copy(ref).ask(Ping()) == "pong"


async def test_a_ref_is_of_one_actor_and_not_of_a_name(system):
    """Another actor that is given the name later has another address."""
    first = await system.using(name="it").spawn(Pinged)
    address = first.address
    await first.stop()
    second = await system.using(name="it").spawn(Pinged)
    assert first != second
    assert not ref_to(address).is_alive


@pytest.mark.parametrize("verb", ["ask", "tell", "tell_nowait"])
async def test_a_ref_to_an_ended_actor_says_so(system, verb):
    """A ref that is unpickled too late fails at once."""
    ref = await system.using(name="it").spawn(Pinged)
    await ref.stop()
    late = copy(ref)
    assert late == ref
    assert not late.is_alive
    with pytest.raises(ActorDied, match=r"actor it is dead: test-.*/it has ended; its system test is open"):
        await send(late, verb)
    assert (await late.stop()).kind == (await late.closed()).kind == "killed"


async def test_a_ref_into_a_closed_system_says_so(anyio_backend):
    """So does one from another process, whose system was never open here."""
    async with ActorSystem(name="gone") as system:
        data = pickle.dumps(await system.using(name="it").spawn(Pinged))
    late = pickle.loads(data)
    with pytest.raises(ActorDied, match="is in a system that was closed, or that lives in another process"):
        await late.ask(Ping())
    assert repr(late) == "<Ref it: 0/1 queued, dead>"
    assert late.statistics().handled == 0


async def test_an_ask_to_a_dead_actor_ends_at_once(system):
    """Nobody waits for a deadline to learn of a death."""
    ref = await system.spawn(Pinged)
    await ref.stop()
    taken: list[float] = []
    for _ in range(20):
        before = time.perf_counter()
        with pytest.raises(ActorDied, match="it was told to stop"):
            await ref.ask(Ping())
        taken.append(time.perf_counter() - before)
    assert min(taken) < 0.005


async def test_an_actor_is_found_by_its_name(system):
    """None when there is none; a wrong class is refused by name."""
    ref = await system.using(name="it").spawn(Pinged)
    assert system.find("it") == system.find("it", Pinged) == ref
    assert system.find("nobody") is None
    with pytest.raises(ConfigError, match="actor it is a Pinged: expected a Other"):
        system.find("it", Other)


async def test_an_address_of_another_system_is_refused(system):
    """A mix-up of systems is an error where it happens."""
    async with ActorSystem(name="other") as other:
        ref = await other.spawn(Pinged)
        with pytest.raises(ConfigError, match="is no address in system test: its addresses begin with test-"):
            system.ref(ref.address)
