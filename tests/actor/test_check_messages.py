from __future__ import annotations

import threading
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest

from aexec.actor import Actor, ActorSystem, Message, Ref, handles
from aexec.errors import MessageNotPortable
from aexec.messages.base import StreamMessage

pytestmark = pytest.mark.anyio


class Keep(Message[list[Any]], frozen=True):
    """Keep something; the reply is all that is kept."""

    thing: Any


class Lend(Message[Any], frozen=True):
    """The reply cannot travel."""


class All(StreamMessage[Any], frozen=True):
    """All that is kept, one by one."""


class Keeper(Actor):
    def __init__(self) -> None:
        self.kept: list[Any] = []

    @handles(Keep)
    def keep(self, message: Keep) -> list[Any]:
        self.kept.append(message.thing)
        return self.kept

    @handles(All)
    async def all(self, message: All) -> AsyncIterator[Any]:
        for thing in self.kept:
            yield thing
        yield threading.Lock()

    @handles(Lend)
    def lend(self, message: Lend) -> Any:
        return threading.Lock()


@pytest.fixture
async def checked():
    async with ActorSystem(name="checked", check_messages=True) as system:
        yield system


async def test_neither_messages_nor_replies_are_shared(checked):
    """What one side changes later, the other one does not see."""
    keeper = await checked.spawn(Keeper)
    thing = [1]
    kept = await keeper.ask(Keep(thing))
    thing.append(2)
    kept.clear()
    assert await keeper.ask(Keep(None)) == [[1], None]


async def test_arrays_and_refs_travel(checked):
    """An array is copied; a ref leads to the same actor."""
    keeper: Ref[Keeper] = await checked.spawn(Keeper)
    await keeper.tell(Keep(keeper))
    ref, array = await keeper.ask(Keep(np.ones(3)))
    assert ref == keeper
    assert array.tolist() == [1.0, 1.0, 1.0]


async def test_every_verb_refuses_what_cannot_travel(checked):
    """At the sender, with the field named; the actor sees nothing of it."""
    keeper = await checked.spawn(Keeper)
    bad = Keep({"lock": threading.Lock()})
    for send in (keeper.ask, keeper.tell):
        with pytest.raises(MessageNotPortable, match=r"its thing\['lock'\] is a lock"):
            await send(bad)
    with pytest.raises(MessageNotPortable, match="Keep cannot travel"):
        keeper.tell_nowait(bad)
    assert keeper.statistics().handled == 0


async def test_a_reply_that_cannot_travel_is_the_askers_error(checked):
    """With a note that names the actor, which lives on."""
    keeper = await checked.using(name="keeper").spawn(Keeper)
    with pytest.raises(MessageNotPortable, match="lock cannot travel") as caught:
        await keeper.ask(Lend())
    assert caught.value.__notes__ == ["replied by actor keeper"]
    assert await keeper.ask(Keep(1)) == [1]


async def test_items_of_a_stream_are_copied_and_checked(checked):
    """One that cannot travel ends the stream, after those before it."""
    keeper, got = await checked.spawn(Keeper), []
    thing = (await keeper.ask(Keep([1])))[0]

    async def read() -> None:
        async with keeper.stream(All()) as items:
            async for item in items:
                got.append(item)  # noqa: PERF401 - what came before the error counts

    with pytest.raises(MessageNotPortable, match="lock cannot travel"):
        await read()
    assert (got, got[0] is thing) == ([[1]], False)


async def test_a_timer_refuses_what_cannot_travel_when_it_is_set(checked):
    """Nobody would hear of it later."""

    class Setter(Actor):
        async def on_start(self) -> None:
            self.context.after(0.0, Keep(threading.Lock()))

        @handles(Keep)
        def keep(self, message: Keep) -> list[Any]:
            return []

    with pytest.raises(MessageNotPortable):
        await checked.spawn(Setter)


async def test_without_it_the_very_object_arrives(system):
    """Nothing is copied in one process."""
    keeper, thing = await system.spawn(Keeper), threading.Lock()
    assert (await keeper.ask(Keep(thing)))[0] is thing
