from __future__ import annotations

from collections.abc import AsyncIterator

import anyio
import anyio.lowlevel
import pytest

from aexec.actor import Actor, StreamMessage, handles
from aexec.errors import ActorDied, ActorStopped, CallCycle, CallTimeout, ConfigError, UnhandledMessage
from aexec.messages.base import Message

pytestmark = pytest.mark.anyio


class Tokens(StreamMessage[int, "Model"], frozen=True):
    count: int


class Silent(StreamMessage[int, "Model"], frozen=True):
    """Yields one item, and then waits for ``gate``."""


class Faulty(StreamMessage[int, "Model"], frozen=True):
    """Yields one item, and raises."""


class Bad(StreamMessage[int, "Model"], frozen=True):
    """Raises when it is closed."""


class Ping(Message[str, "Model"], frozen=True):
    pass


class Relay(Message[list[int], "Model"], frozen=True):
    pass


class Model(Actor):
    def __init__(self) -> None:
        self.yielded = 0
        self.closed = 0
        self.gate = anyio.Event()

    @handles(Tokens)
    async def tokens(self, message: Tokens) -> AsyncIterator[int]:
        try:
            for number in range(message.count):
                self.yielded += 1
                yield number
        finally:
            self.closed += 1

    @handles(Silent, concurrent=2)
    async def silent(self, message: Silent) -> AsyncIterator[int]:
        try:
            yield 0
            await self.gate.wait()
            yield 1
        finally:
            self.closed += 1

    @handles(Faulty)
    async def faulty(self, message: Faulty) -> AsyncIterator[int]:
        yield 0
        raise LookupError("no more")

    @handles(Bad)
    async def bad(self, message: Bad) -> AsyncIterator[int]:
        try:
            yield 0
            yield 1
        finally:
            raise LookupError("cannot close")

    @handles(Ping)
    def ping(self, message: Ping) -> str:
        return "pong"

    @handles(Relay)
    async def relay(self, message: Relay) -> list[int]:
        async with self.context.ref.stream(Tokens(3)) as items:
            return [item async for item in items]


@pytest.fixture
async def model(system):
    made: list[Model] = []
    ref = await system.using(name="model").spawn(lambda: made.append(Model()) or made[0])
    return ref, made[0]


async def until(condition) -> None:
    with anyio.fail_after(5):
        while not condition():
            await anyio.lowlevel.checkpoint()


async def test_items_come_in_order_and_end(model):
    """A consumer gets what the generator yields, in order, and the loop ends with it."""
    ref, actor = model
    async with ref.stream(Tokens(100)) as items:
        assert [item async for item in items] == list(range(100))
    assert actor.closed == 1
    assert (ref.statistics().handled, ref.statistics().in_hand) == (1, 0)


@pytest.mark.parametrize("buffer", [1, 3])
async def test_the_generator_waits_for_its_consumer(model, buffer):
    """It is at most ``buffer`` items ahead."""
    ref, actor = model
    async with ref.stream(Tokens(100), buffer=buffer) as items:
        await anyio.wait_all_tasks_blocked()
        assert actor.yielded == buffer
        assert await anext(items) == 0
        await anyio.wait_all_tasks_blocked()
        assert actor.yielded == buffer + 1


@pytest.mark.parametrize("message", [Tokens(100), Silent()])
async def test_leaving_the_block_closes_the_generator(model, message):
    """Its finally has run when the block is left, whether it waited for room or for something else."""
    ref, actor = model
    async with ref.stream(message, buffer=2) as items:
        assert await anext(items) == 0
        await anyio.wait_all_tasks_blocked()
    assert actor.closed == 1
    assert await ref.ask(Ping()) == "pong"
    with pytest.raises(RuntimeError, match="is not open"):
        await anext(items)
    await items.aclose()


async def test_a_stream_that_was_not_begun_never_runs(model):
    """Leaving at once takes the message back."""
    ref, actor = model
    async with ref.stream(Tokens(1)):
        pass
    assert await ref.ask(Ping()) == "pong"
    assert (actor.yielded, ref.statistics().mailbox.queued) == (0, 0)


async def test_an_error_reaches_the_consumer_after_the_items(model):
    """What the generator raises is raised in the consumer's loop, and the actor lives."""
    ref, _ = model
    async with ref.stream(Faulty()) as items:
        assert await anext(items) == 0
        with pytest.raises(LookupError, match="no more") as caught:
            await anext(items)
    assert caught.value.__notes__ == ["raised by actor model while it handled Faulty"]
    assert await ref.ask(Ping()) == "pong"


async def test_an_error_of_the_closing_is_raised_unless_there_is_another(model):
    """What a generator raises as it is closed is not lost, and does not hide the consumer's own error."""
    ref, _ = model

    async def consume(error: Exception | None) -> None:
        async with ref.stream(Bad(), buffer=1) as items:
            await anext(items)
            if error is not None:
                raise error

    with pytest.raises(LookupError, match="cannot close"):
        await consume(None)
    with pytest.raises(KeyError, match="mine") as caught:
        await consume(KeyError("mine"))
    assert "closing the stream Bad to model failed: LookupError('cannot close')" in caught.value.__notes__


async def test_the_time_between_items_has_a_limit(model):
    """An item that does not come in time is a CallTimeout; the stream itself goes on."""
    ref, actor = model
    async with ref.stream(Silent(), timeout=0.01) as items:
        assert await anext(items) == 0
        with pytest.raises(CallTimeout, match=r"Silent to model passed its limit of 0\.01 s") as caught:
            await anext(items)
        assert caught.value.started
        actor.gate.set()
        assert [item async for item in items] == [1]


async def test_a_second_reader_is_refused_and_the_first_goes_on(model):
    """Of two tasks that wait for an item one would never be told of it, so the later one hears so at once."""
    ref, actor = model
    async with ref.stream(Silent()) as items, anyio.create_task_group() as tasks:
        assert await anext(items) == 0
        got: list[int] = []

        async def read() -> None:
            got.extend([item async for item in items])

        tasks.start_soon(read)
        await anyio.wait_all_tasks_blocked()
        with pytest.raises(anyio.BusyResourceError, match="already waiting for the items"):
            await anext(items)
        actor.gate.set()
        await until(lambda: got == [1])


async def test_a_reader_is_told_when_another_task_leaves_the_block(model):
    """Closing a stream ends the wait of whoever still reads it."""
    ref, actor = model
    with anyio.fail_after(5):
        async with anyio.create_task_group() as tasks, ref.stream(Silent()) as items:
            assert await anext(items) == 0

            async def read() -> None:
                with pytest.raises(RuntimeError, match="is not open"):
                    await anext(items)

            tasks.start_soon(read)
            await anyio.wait_all_tasks_blocked()
    assert actor.closed == 1


@pytest.mark.parametrize("how", ["stop", "fail"])
async def test_the_end_of_the_actor_ends_the_stream(model, how):
    """A stream whose actor ends raises ActorDied in its consumer, and its generator is closed."""
    ref, actor = model
    async with ref.stream(Silent()) as items:
        assert await anext(items) == 0
        if how == "stop":
            ref._cell.request_stop("test", 0.0)
        else:
            ref._cell.broke(ValueError("broken"))
        with pytest.raises(ActorDied, match="still ran" if how == "stop" else "broken"):
            await anext(items)
    assert actor.closed == 1


async def test_streams_run_beside_the_mailbox_up_to_their_number(model):
    """Messages are handled while streams are open; with ``concurrent=2`` a third one waits for its turn."""
    ref, _ = model
    async with ref.stream(Silent()) as first, ref.stream(Silent()) as second:
        assert [await anext(first), await anext(second)] == [0, 0]
        async with ref.stream(Silent(), timeout=0.01) as third:
            with pytest.raises(CallTimeout) as caught:
                await anext(third)
            assert not caught.value.started
            assert await ref.ask(Ping()) == "pong"
            await first.aclose()
            assert await anext(third) == 0


async def test_a_cancelled_consumer_closes_the_stream(model):
    """Cancelling whoever consumes it ends the generator."""
    ref, actor = model
    with anyio.move_on_after(0.01) as scope:
        async with ref.stream(Silent()) as items:
            async for _ in items:
                pass
    assert scope.cancelled_caught
    await until(lambda: actor.closed == 1)


async def test_a_stream_from_an_actor_that_waits_for_you_is_a_cycle(model):
    """A handler that streams from its own actor is told so, as with an ask."""
    ref, _ = model
    with pytest.raises(CallCycle):
        await ref.ask(Relay())


async def test_a_stream_is_no_ask_and_an_ask_is_no_stream(model):
    """Each verb refuses the other's messages, by name."""
    ref, _ = model
    with pytest.raises(
        UnhandledMessage, match=r"no handler for Tokens; it handles Ping, Relay, Tokens \(a stream\)"
    ) as no:
        await ref.ask(Tokens(1))
    assert str(no.value).endswith(": what is a stream is opened by `async with ref.stream(...)`")
    with pytest.raises(
        UnhandledMessage, match=r"no handler for Ping; .*: what is no stream is sent by ask\(\) or tell"
    ):
        async with ref.stream(Ping()):
            pass


async def test_a_dead_actor_has_no_streams(model):
    """Opening a stream of an actor that has ended fails at once."""
    ref, _ = model
    await ref.stop()
    with pytest.raises(ActorStopped):
        async with ref.stream(Tokens(1)):
            pass


async def test_a_stream_is_entered_once_and_prints_its_state(model):
    """Its repr tells how far it is; it cannot be entered twice, nor read before."""
    ref, _ = model
    stream = ref.stream(Tokens(5), buffer=2)
    assert repr(stream) == "<Stream Tokens to model: 0 items taken, not entered>"
    with pytest.raises(RuntimeError, match="is not open"):
        await anext(stream)
    async with stream:
        await anext(stream)
        await anyio.wait_all_tasks_blocked()
        assert repr(stream) == "<Stream Tokens to model: 1 items taken, channel 2/2, open>"
        with pytest.raises(RuntimeError, match="entered before"):
            await stream.__aenter__()
    with pytest.raises(ConfigError, match="buffer is 0"):
        ref.stream(Tokens(1), buffer=0)


async def test_a_generator_may_be_read_without_a_system():
    """The handler is a method like any other."""
    assert [item async for item in Model().tokens(Tokens(2))] == [0, 1]


def test_a_handler_of_a_stream_has_to_be_a_generator():
    """A coroutine function is refused where it is written, and as an override."""
    with pytest.raises(TypeError, match="no async generator"):

        @handles(Tokens)
        async def tokens(self, message: Tokens) -> int:
            return 1

    with pytest.raises(TypeError, match="no async generator"):

        class Derived(Model):
            async def tokens(self, message: Tokens) -> int:
                return 1


def test_a_stream_is_not_shielded():
    """It ends with its consumer."""
    with pytest.raises(TypeError, match="shield=True is for other handlers"):

        @handles(Tokens, shield=True)
        async def tokens(self, message: Tokens) -> AsyncIterator[int]:
            yield 1


async def test_an_overridden_stream_is_the_subclasss(system):
    """A subclass's generator takes the place of its base's."""

    class Derived(Model):
        async def tokens(self, message: Tokens) -> AsyncIterator[int]:
            yield 42

    ref = await system.spawn(Derived)
    async with ref.stream(Tokens(3)) as items:
        assert [item async for item in items] == [42]
