from __future__ import annotations

import gc
from typing import Any

import anyio
import anyio.lowlevel
import pytest
import structlog

from aexec.actor import Actor, Deferred, handles
from aexec.errors import ActorError, ActorStopped, CallTimeout
from aexec.messages.base import Message

pytestmark = pytest.mark.anyio


class Later(Message[int], frozen=True):
    pass


class Ping(Message[str], frozen=True):
    pass


class Owner(Actor):
    """Puts off its replies, for a test to give."""

    def __init__(self) -> None:
        self.replies: list[Deferred[int]] = []
        self.gone: list[str] = []

    @handles(Later)
    def later(self, message: Later) -> Deferred[int]:
        reply = self.context.defer(message)
        reply.on_cancel(lambda: self.gone.append("gone"))
        self.replies.append(reply)
        return reply

    @handles(Ping)
    def ping(self, message: Ping) -> str:
        return "pong"

    async def owes(self, number: int) -> None:
        with anyio.fail_after(5):
            while len(self.replies) < number:
                await anyio.lowlevel.checkpoint()


@pytest.fixture
async def owner(system):
    made: list[Owner] = []
    ref = await system.using(name="owner").spawn(lambda: made.append(Owner()) or made[0])
    return ref, made[0]


async def cancel_when_begun(ref, actor: Owner) -> None:
    """Ask, and be cancelled as soon as the handler has put off its reply."""
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(ref.ask, Later())
        await actor.owes(1)
        tasks.cancel_scope.cancel()


async def ask(ref, results: list[Any], **options: Any) -> None:
    try:
        results.append(await ref.ask(Later(), **options))
    except Exception as error:
        results.append(error)


async def test_the_mailbox_goes_on_while_a_reply_is_put_off(owner):
    """Other messages are handled meanwhile, and replies may come in any order."""
    ref, actor = owner
    results: list[Any] = []
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(ask, ref, results)
        await actor.owes(1)
        tasks.start_soon(ask, ref, results)
        await actor.owes(2)
        assert await ref.ask(Ping()) == "pong"
        assert ref.statistics().deferred == 2
        actor.replies[1].resolve(2)
        await anyio.wait_all_tasks_blocked()
        actor.replies[0].fail(ValueError("no"))
    assert results[0] == 2
    assert isinstance(results[1], ValueError)
    assert ref.statistics().deferred == 0


async def test_a_reply_is_given_once(owner):
    """The second answer is the actor's mistake, and raises there."""
    ref, actor = owner
    results: list[Any] = []
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(ask, ref, results)
        await actor.owes(1)
        assert repr(actor.replies[0]) == "<Deferred Later to owner: awaited>"
        actor.replies[0].resolve(1)
    with pytest.raises(RuntimeError, match=r"the reply to Later to owner was given already"):
        actor.replies[0].fail(ValueError())
    assert repr(actor.replies[0]) == "<Deferred Later to owner: answered>"
    assert results == [1]


@pytest.mark.usefixtures("virtual_clock")
@pytest.mark.parametrize("how", ["cancelled", "expired"])
async def test_the_owner_is_told_that_the_asker_has_gone(system, owner, how):
    """on_cancel is called when the asker is cancelled or its deadline passes; a late reply is counted."""
    ref, actor = owner
    if how == "cancelled":
        await cancel_when_begun(ref, actor)
    else:
        with pytest.raises(CallTimeout, match="had started"):
            await ref.ask(Later(), timeout=0.25)
    (reply,) = actor.replies
    assert actor.gone == ["gone"]
    assert not reply.is_awaited
    assert repr(reply) == "<Deferred Later to owner: its asker has gone>"
    reply.on_cancel(lambda: actor.gone.append("again"))
    assert actor.gone == ["gone", "again"]
    reply.resolve(1)
    assert system.statistics().late_replies == 1


async def test_a_late_error_is_dropped_too(system, owner):
    """An error that is given after the asker has gone is counted like a late reply."""
    ref, actor = owner
    await cancel_when_begun(ref, actor)
    actor.replies[0].fail(ValueError("late"))
    assert system.statistics().late_replies == 1


async def test_a_callback_that_raises_is_logged(owner):
    """A broken on_cancel callback keeps nobody from being told."""
    ref, actor = owner
    with structlog.testing.capture_logs() as logs:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ref.ask, Later())
            await actor.owes(1)
            actor.replies[0].on_cancel(lambda: 1 / 0)
            actor.replies[0].on_cancel(lambda: actor.gone.append("last"))
            tasks.cancel_scope.cancel()
    assert actor.gone == ["gone", "last"]
    assert [line["event"] for line in logs] == ["callback failed"]


async def test_a_dropped_reply_ends_its_ask_at_once(system, owner):
    """A deferred reply that nobody can give any longer is an error, and a dead letter."""
    ref, actor = owner
    with anyio.fail_after(5):
        async with anyio.create_task_group() as tasks:
            results: list[Any] = []
            tasks.start_soon(ask, ref, results)
            await actor.owes(1)
            await anyio.wait_all_tasks_blocked()
            actor.replies.clear()
            gc.collect()
    assert isinstance(results[0], ActorError)
    assert "owner dropped its deferred reply to Later" in str(results[0])
    assert system.statistics().dead_letters.no_reply == 1


async def test_replies_still_owed_end_with_the_actor(owner):
    """An actor that ends without giving a reply ends the ask."""
    ref, actor = owner
    results: list[Any] = []
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(ask, ref, results)
        await actor.owes(1)
        await ref.stop()
    assert isinstance(results[0], ActorStopped)


async def test_on_stop_may_still_give_replies(system):
    """Replies may be given until on_stop has returned."""

    class Tidy(Owner):
        async def on_stop(self, reason: object) -> None:
            for reply in self.replies:
                reply.resolve(7)

    made: list[Tidy] = []
    ref = await system.spawn(lambda: made.append(Tidy()) or made[0])
    results: list[Any] = []
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(ask, ref, results)
        await made[0].owes(1)
        await ref.stop()
    assert results == [7]


async def test_a_reply_may_be_given_before_the_handler_returns(system):
    """Resolving at once is allowed, also in an async def."""

    class Prompt(Actor):
        @handles(Later)
        async def later(self, message: Later) -> Deferred[int]:
            reply = self.context.defer(message)
            reply.resolve(3)
            await anyio.lowlevel.checkpoint()
            return reply

    ref = await system.spawn(Prompt)
    assert await ref.ask(Later()) == 3
    assert ref.statistics().deferred == 0


async def test_only_the_message_in_hand_can_be_put_off(owner):
    """defer() outside of a handler, or for another message, is refused; so is another's reply."""
    _, actor = owner
    with pytest.raises(RuntimeError, match="no handler of owner runs here"):
        actor.context.defer()


async def test_the_reply_to_another_message_is_refused(system):
    """A handler that returns somebody else's deferred reply fails, legibly."""

    class Mixed(Owner):
        @handles(Later)
        def later(self, message: Later) -> Deferred[int]:
            if self.replies:
                return self.replies[0]
            with pytest.raises(RuntimeError, match="cannot put off a reply to Ping"):
                self.context.defer(Ping())
            return super().later(message)

    made: list[Mixed] = []
    ref = await system.spawn(lambda: made.append(Mixed()) or made[0])
    results: list[Any] = []
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(ask, ref, results)
        await made[0].owes(1)
        with pytest.raises(ActorError, match="the deferred reply to another message"):
            await ref.ask(Later())
        made[0].replies[0].resolve(1)
    assert results == [1]


async def test_a_tell_may_be_put_off_too(owner):
    """Nobody waits for it, so that its reply goes nowhere, and nobody is told of anything."""
    ref, actor = owner
    await ref.tell(Later())
    await actor.owes(1)
    actor.replies[0].resolve(1)
    assert actor.gone == []


async def test_no_ordinary_error_is_presentable(owner):
    """fail() with what an asker must not be raised gives an ActorError that carries it."""
    ref, actor = owner
    results: list[Any] = []
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(ask, ref, results)
        await actor.owes(1)
        actor.replies[0].fail(SystemExit(3))
    assert isinstance(results[0], ActorError)
    assert isinstance(results[0].__cause__, SystemExit)
