from __future__ import annotations

import pytest

from aexec.actor import Actor, ActorSystem, handles
from aexec.errors import ConfigError, UnhandledMessage
from aexec.messages.base import Message

pytestmark = pytest.mark.anyio


class Ping(Message[str], frozen=True):
    pass


class Pinged(Actor):
    @handles(Ping)
    def ping(self, message: Ping) -> str:
        return "pong"


async def test_names_are_made_from_classes(system):
    """Without a name, an actor is called after its class and a number."""
    assert [(await system.spawn(Pinged)).name for _ in range(2)] == ["pinged-1", "pinged-2"]


async def test_a_name_is_unique_among_the_living(system):
    """A name that is taken is refused, also against made-up ones; it is free again after the end."""
    first = await system.using(name="pinged-1").spawn(Pinged)
    with pytest.raises(ConfigError, match="an actor 'pinged-1' is alive in system test"):
        await system.using(name="pinged-1").spawn(Pinged)
    assert (await system.spawn(Pinged)).name == "pinged-2"
    await first.stop()
    assert (await system.using(name="pinged-1").spawn(Pinged)).is_alive


async def test_options_add_up(system):
    """using() sets the bound of the mailbox and the name of what is spawned."""
    ref = await system.using(name="small", mailbox=3).spawn(Pinged)
    assert (ref.name, ref.statistics().mailbox.bound) == ("small", 3)


async def test_there_are_no_unbounded_mailboxes(system):
    """A mailbox without room is refused."""
    with pytest.raises(ConfigError, match="mailbox is 0: expected at least 1"):
        system.using(mailbox=0)


@pytest.mark.parametrize("what", [Pinged(), int, None])
async def test_only_what_makes_actors_is_spawned(system, what):
    """An instance, say, is refused with what to write."""
    for spawn in (system.spawn(what), system.spawn_group(2, what)):
        with pytest.raises(TypeError, match=r"to be spawned is .*: expected a class of actors, .* spawn\(Counter, 5\)"):
            await spawn


async def test_a_class_is_no_message(system):
    """Who forgets to call it is told so."""
    ref = await system.spawn(Pinged)
    with pytest.raises(UnhandledMessage, match=r"the class Ping \(a message is an instance, as in Ping\(...\)\)"):
        await ref.ask(Ping)


async def test_only_an_open_system_spawns():
    """Before open and after aclose, spawning says what to do."""
    system = ActorSystem()
    with pytest.raises(ConfigError, match="is not open: use `async with system:`"):
        await system.spawn(Pinged)
    async with system:
        assert await (await system.spawn(Pinged)).ask(Ping()) == "pong"
    with pytest.raises(ConfigError, match="was closed: open a new one"):
        await system.spawn(Pinged)


async def test_many_actors_live_at_once(system):
    """A thousand actors are spawned, asked and ended."""
    refs = [await system.spawn(Pinged) for _ in range(1000)]
    assert {await ref.ask(Ping()) for ref in refs} == {"pong"}
    assert system.statistics().actors == 1000
