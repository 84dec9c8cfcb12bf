from __future__ import annotations

import anyio
import pytest

from aexec.actor import Actor, ActorSystem, Message, Ref, handles
from aexec.testing import VirtualClock, spawn_probe

pytestmark = pytest.mark.anyio


class Hello(Message[str], frozen=True):
    """A greeting."""

    name: str = "rose"


class Bye(Message[None], frozen=True):
    """The end of it."""


class Greeter(Actor):
    def __init__(self, other: Ref) -> None:
        self.other = other

    @handles(Hello)
    async def hello(self, message: Hello) -> str:
        return await self.other.ask(message) + "!"


async def test_a_probe_stands_in_for_an_actor(system):
    """It takes what it is sent, says who sent it, and answers as the test wants."""
    probe = await spawn_probe(system)
    greeter = await system.spawn(Greeter, probe.ref)
    replies: list[str] = []
    async with anyio.create_task_group() as tasks:

        async def ask() -> None:
            replies.append(await greeter.ask(Hello("lily")))

        tasks.start_soon(ask)
        assert (await probe.expect(Hello)).name == "lily"
        probe.reply("good day")
    assert replies == ["good day!"]
    assert probe.received[0].sender == greeter
    await probe.expect_nothing(0.01)


async def test_a_probe_fails_an_ask(system):
    """fail() raises at the asker."""
    probe = await spawn_probe(system, name="stand-in")
    async with anyio.create_task_group() as tasks:

        async def ask() -> None:
            with pytest.raises(ValueError, match="no"):
                await probe.ref.ask(Hello())

        tasks.start_soon(ask)
        await probe.expect(Hello, where=lambda message: message.name == "rose")
        probe.fail(ValueError("no"))
    assert probe.ref.name == "stand-in"


async def test_messages_are_expected_in_the_order_they_came(system):
    """One that is not the next one fails the test, with a list of all that came."""
    probe = await spawn_probe(system)
    await probe.ref.tell(Hello("a"))
    await probe.ref.tell(Hello("b"))
    assert (await probe.expect(Hello)).name == "a"
    with pytest.raises(AssertionError) as caught:
        await probe.expect(Bye)
    text = str(caught.value)
    assert text.startswith("expected Bye, and Hello(name='b') came; probe-1 has received\n  1. at ")
    assert "Hello(name='a') from outside, told, expected" in text


async def test_nothing_that_comes_is_a_failure_after_the_time(system):
    """The text says that nothing came at all."""
    async with ActorSystem(clock=VirtualClock()) as virtual:
        probe = await spawn_probe(virtual)
        with pytest.raises(AssertionError, match=r"Hello within 30 s, and nothing came; .* nothing at all"):
            await probe.expect(Hello, timeout=30.0)
        assert virtual.now() == 30.0
        await probe.ref.tell(Bye())  # what was given up does not take it
        await probe.expect(Bye)


async def test_something_where_nothing_was_expected_is_a_failure(system):
    """expect_nothing() shows it."""
    probe = await spawn_probe(system)
    await probe.ref.tell(Bye())
    with pytest.raises(AssertionError, match=r"expected nothing within 0.1 s, and Bye\(\) came"):
        await probe.expect_nothing()


async def test_a_tell_has_no_reply(system):
    """reply() says so, for what was answered already and before anything was expected as well."""
    probe = await spawn_probe(system)
    with pytest.raises(AssertionError, match="expect a message first"):
        probe.reply()
    await probe.ref.tell(Bye())
    await probe.expect(Bye)
    with pytest.raises(AssertionError, match=r"no reply to be given to Bye\(\) from outside, told"):
        probe.reply()


async def test_a_probe_that_has_ended_fails_what_is_expected_of_it(system):
    """The text says that it has stopped."""
    probe = await spawn_probe(system)
    await probe.ref.stop()
    with pytest.raises(AssertionError, match="told to stop"):
        await probe.expect(Hello)


async def test_a_probe_prints_what_it_has(system):
    """Its repr counts what was received."""
    probe = await spawn_probe(system)
    await probe.ref.tell(Bye())
    await probe.expect(Bye)
    assert repr(probe) == "<Probe probe-1: 1 received, 0 not expected yet>"
