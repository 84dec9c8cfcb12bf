from __future__ import annotations

import asyncio
import gc
import time
import weakref
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from aexec.actor import Actor, ActorSystem, handles
from aexec.actor._asyncio import AsyncioRuntime
from aexec.errors import ActorDied, ActorError, CallTimeout
from aexec.messages.base import Message

pytestmark = pytest.mark.anyio
on_asyncio = pytest.mark.parametrize(
    "anyio_backend", [("asyncio", {"debug": True}), ("asyncio", {"use_uvloop": True})], ids=["asyncio", "uvloop"]
)


class Work(Message[str], frozen=True):
    """Awaits ``gates[key]``, unless it is open."""

    key: str = ""


class Shielded(Message[str], frozen=True):
    key: str = ""


class Parallel(Message[str], frozen=True):
    key: str = ""


class Ping(Message[str], frozen=True):
    pass


class SlowPing(Message[str], frozen=True):
    key: str = ""


class Payload(Message[int], frozen=True):
    body: Any


class Raise(Message[None], frozen=True):
    error: BaseException


class RaiseAtOnce(Message[None], frozen=True):
    error: BaseException


class RaiseAside(Message[None], frozen=True):
    error: BaseException


class Gates:
    """Lets a test hold the handlers of an actor, and see what they do."""

    def __init__(self) -> None:
        self.gates: dict[str, anyio.Event] = {}
        self.begun: list[str] = []
        self.ended: list[str] = []
        self.cancelled: list[str] = []

    def open(self, *keys: str) -> None:
        for key in keys:
            self.gates.setdefault(key, anyio.Event()).set()

    async def begun_all(self, *keys: str) -> None:
        with anyio.fail_after(5):
            while not set(keys) <= set(self.begun):
                await anyio.lowlevel.checkpoint()

    async def ended_all(self, *keys: str) -> None:
        with anyio.fail_after(5):
            while not set(keys) <= {*self.ended, *self.cancelled}:
                await anyio.lowlevel.checkpoint()

    async def cancel_when_begun(self, ref: Any, message: Any) -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ref.ask, message)
            await self.begun_all(message.key)
            tasks.cancel_scope.cancel()

    async def work(self, key: str) -> str:
        self.begun.append(key)
        try:
            if key:
                await self.gates.setdefault(key, anyio.Event()).wait()
        except BaseException:
            self.cancelled.append(key)
            raise
        self.ended.append(key)
        return key


class Worker(Actor):
    def __init__(self, gates: Gates) -> None:
        self.gates = gates

    @handles(Work)
    async def work(self, message: Work) -> str:
        return await self.gates.work(message.key)

    @handles(Shielded, shield=True)
    async def shielded(self, message: Shielded) -> str:
        return await self.gates.work(message.key)

    @handles(Parallel, concurrent=2)
    async def parallel(self, message: Parallel) -> str:
        return await self.gates.work(message.key)

    @handles(Ping, lane="urgent")
    def ping(self, message: Ping) -> str:
        self.gates.begun.append("ping")
        return "pong"

    @handles(SlowPing, lane="urgent")
    async def slow_ping(self, message: SlowPing) -> str:
        return await self.gates.work(message.key)

    @handles(Payload)
    def payload(self, message: Payload) -> int:
        return len(message.body)

    @handles(Raise)
    async def throw(self, message: Raise) -> None:
        raise message.error

    @handles(RaiseAtOnce)
    def throw_at_once(self, message: RaiseAtOnce) -> None:
        raise message.error

    @handles(RaiseAside, concurrent=2)
    async def throw_aside(self, message: RaiseAside) -> None:
        raise message.error


@pytest.fixture
def gates() -> Gates:
    return Gates()


@pytest.fixture
async def worker(system, gates):
    return await system.using(name="worker", mailbox=16).spawn(Worker, gates)


# ---------------------------------------------------------------- one at a time, and the exceptions to it


async def test_messages_are_handled_one_at_a_time(worker, gates):
    """The next message begins when the one before has ended, across its awaits."""
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(worker.ask, Work("a"))
        await gates.begun_all("a")
        tasks.start_soon(worker.ask, Work("b"))
        await anyio.wait_all_tasks_blocked()
        assert gates.begun == ["a"]
        assert worker.statistics().in_hand == 1
        gates.open("a", "b")
    assert gates.ended == ["a", "b"]


async def test_an_urgent_message_is_handled_while_a_handler_awaits(worker, gates):
    """A ping is answered at once although a slow handler is in hand."""
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(worker.ask, Work("slow"))
        await gates.begun_all("slow")
        assert await worker.ask(Ping()) == "pong"
        assert await worker.ask(Ping()) == "pong"
        assert gates.ended == []
        gates.open("slow")


def run_at_once(loop, coroutine, *, context, **options):
    """Does with what awaits nothing what ``asyncio.eager_task_factory`` does, which came with Python 3.12."""
    with pytest.raises(StopIteration):
        context.run(coroutine.send, None)
    return asyncio.Task(asyncio.sleep(0), loop=loop)


@on_asyncio
async def test_an_ask_may_be_answered_while_it_is_made(worker, gates):
    """Where the loop's tasks are eager, an urgent message is handled before its asker awaits the reply."""
    loop = asyncio.get_running_loop()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(worker.ask, Work("slow"))
        await gates.begun_all("slow")
        loop.set_task_factory(run_at_once)
        try:
            assert await worker.ask(Ping()) == "pong"
        finally:
            loop.set_task_factory(None)
        gates.open("slow")
    assert gates.begun == ["slow", "ping"]


@on_asyncio
async def test_a_message_for_which_the_loop_makes_no_task_fails(worker, gates, no_more_tasks):
    """Its asker gets the error, its slot is free again, and the actor lives on."""
    with no_more_tasks():
        for _ in range(3):
            with pytest.raises(RuntimeError, match="no more tasks") as caught:
                await worker.ask(Parallel("a"), timeout=1.0)
    assert caught.value.__notes__ == ["raised by actor worker while it handled Parallel"]
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(worker.ask, Parallel("b"))
        tasks.start_soon(worker.ask, Parallel("c"))
        await gates.begun_all("b", "c")
        gates.open("b", "c")
    assert (worker.statistics().failed, worker.statistics().in_hand) == (3, 0)


@on_asyncio
async def test_an_urgent_message_for_which_the_loop_makes_no_task_fails(worker, gates, no_more_tasks):
    """It is not handled later either, and the next one is handled beside the handler in hand as ever."""
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(worker.ask, Work("slow"))
        await gates.begun_all("slow")
        with no_more_tasks(), pytest.raises(RuntimeError, match="no more tasks"):
            await worker.ask(Ping(), timeout=1.0)
        assert await worker.ask(Ping(), timeout=1.0) == "pong"
        gates.open("slow")
    assert gates.begun == ["slow", "ping"]


async def test_an_urgent_message_goes_before_those_that_wait(worker, gates):
    """An urgent message is begun before normal ones that were sent earlier."""
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(worker.ask, Work("a"))
        await gates.begun_all("a")
        worker.tell_nowait(Work("b"))
        worker.tell_nowait(Ping())
        gates.open("a", "b")
    await gates.ended_all("b")
    assert gates.begun == ["a", "ping", "b"]


async def test_the_urgent_lane_is_serial_too(worker, gates):
    """While an urgent handler awaits beside a normal one, normal messages go on and urgent ones wait."""
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(worker.ask, Work("a"))
        await gates.begun_all("a")
        tasks.start_soon(worker.ask, SlowPing("urgent"))
        await gates.begun_all("urgent")
        tasks.start_soon(worker.ask, SlowPing("second"))
        tasks.start_soon(worker.ask, Work("b"))
        gates.open("a")
        await gates.begun_all("b")
        assert "second" not in gates.begun
        gates.open("b", "urgent", "second")
    assert set(gates.ended) == {"a", "b", "urgent", "second"}


async def test_concurrent_handlers_run_side_by_side_up_to_their_number(worker, gates):
    """concurrent=2 lets two run beside other messages; the third begins when one has ended."""
    async with anyio.create_task_group() as tasks:
        for key in "abc":
            tasks.start_soon(worker.ask, Parallel(key))
            await anyio.wait_all_tasks_blocked()
        assert gates.begun == ["a", "b"]
        assert await worker.ask(Work()) == ""
        assert worker.statistics().mailbox.queued == 1
        gates.open("b")
        await gates.begun_all("c")
        assert gates.ended == ["", "b"]
        gates.open("a", "c")


@on_asyncio
async def test_concurrent_handlers_begin_in_the_order_of_their_messages(system):
    """A message that gets a slot as another ends begins after those whose tasks have not run yet."""
    begun: list[str] = []

    class Pair(Actor):
        @handles(Parallel, concurrent=2)
        async def parallel(self, message: Parallel) -> str:
            begun.append(message.key)
            await asyncio.sleep(0)
            return message.key

    ref = await system.spawn(Pair)
    first = asyncio.create_task(ref.ask(Parallel("a")))
    await asyncio.sleep(0)
    others = [asyncio.create_task(ref.ask(Parallel(key))) for key in "bcd"]
    assert await asyncio.gather(first, *others) == ["a", "b", "c", "d"]
    assert begun == ["a", "b", "c", "d"]


async def test_a_held_back_message_can_be_cancelled(worker, gates):
    """A message that waits for a concurrent= slot is taken back like any other."""
    async with anyio.create_task_group() as tasks:
        for key in "ab":
            tasks.start_soon(worker.ask, Parallel(key))
        await gates.begun_all("a", "b")
        with anyio.move_on_after(0.01):
            await worker.ask(Parallel("c"))
        with pytest.raises(CallTimeout) as caught:
            await worker.ask(Parallel("d"), timeout=0.01)
        gates.open("a", "b")
    assert not caught.value.started
    assert set(gates.begun) == {"a", "b"}
    assert worker.statistics().mailbox.queued == 0


async def test_who_waits_for_room_comes_in_when_a_slot_is_free(system, gates):
    """A mailbox full of messages that wait for a slot lets the next sender in as soon as one begins."""
    ref = await system.using(mailbox=1).spawn(Worker, gates)
    async with anyio.create_task_group() as tasks:
        for key in "abc":
            tasks.start_soon(ref.ask, Parallel(key))
            await anyio.wait_all_tasks_blocked()
        tasks.start_soon(ref.ask, Work("other"))
        await anyio.wait_all_tasks_blocked()
        assert ref.statistics().mailbox == (1, 0, 0, 1, 1, 0)
        gates.open("a", "other")
        await gates.ended_all("other")
        gates.open("b", "c")


async def test_plain_handlers_do_not_keep_the_loop(system, gates):
    """An actor with much to do lets other tasks run in between."""

    class Endless(Actor):
        @handles(Ping)
        def ping(self, message: Ping) -> str:
            self.context.ref.tell_nowait(Ping())
            return ""

    ref = await system.spawn(Endless)
    await ref.tell(Ping())
    gaps = []
    for _ in range(20):
        before = time.monotonic()
        await anyio.lowlevel.checkpoint()
        gaps.append(time.monotonic() - before)
    assert min(gaps) < 0.05
    assert ref.statistics().handled > 20


# ---------------------------------------------------------------- cancellation


async def test_cancelling_the_asker_cancels_the_handler(worker, gates):
    """The handler is cancelled where it awaits, and the actor goes on."""
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(worker.ask, Work("a"))
        await gates.begun_all("a")
        tasks.cancel_scope.cancel()
    await gates.ended_all("a")
    assert gates.cancelled == ["a"]
    assert await worker.ask(Work()) == ""
    assert worker.statistics().cancelled == 1


async def test_cancellation_goes_down_a_chain_of_asks(system, worker, gates):
    """The handler of a handler's ask is cancelled as well."""

    class Outer(Actor):
        @handles(Work)
        async def work(self, message: Work) -> str:
            return await worker.ask(message)

    outer = await system.spawn(Outer)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(outer.ask, Work("a"))
        await gates.begun_all("a")
        tasks.cancel_scope.cancel()
    await gates.ended_all("a")
    assert gates.cancelled == ["a"]


async def test_a_shielded_handler_runs_to_its_end(worker, gates):
    """With shield=True the asker goes, the handler stays, and its late reply is counted and dropped."""
    await gates.cancel_when_begun(worker, Shielded("a"))
    with pytest.raises(CallTimeout, match="never started"):
        await worker.ask(Work(), timeout=0.01)
    gates.open("a")
    assert await worker.ask(Work()) == ""
    assert gates.ended == ["a", ""]


@pytest.mark.usefixtures("virtual_clock")
async def test_a_late_reply_is_counted_and_dropped(system, worker, gates):
    """A reply that comes after its asker's deadline goes nowhere."""
    with pytest.raises(CallTimeout, match="had started"):
        await worker.ask(Shielded("a"), timeout=0.25)
    gates.open("a")
    assert await worker.ask(Work()) == ""
    assert system.statistics().late_replies == 1


async def test_a_concurrent_handler_is_cancelled_alone(worker, gates):
    """Of two that run side by side, only the one whose asker has gone is cancelled."""
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(worker.ask, Parallel("a"))
        await gates.begun_all("a")
        await gates.cancel_when_begun(worker, Parallel("b"))
        await gates.ended_all("b")
        assert (gates.cancelled, gates.ended) == (["b"], [])
        gates.open("a")
    assert gates.ended == ["a"]


@pytest.mark.usefixtures("virtual_clock")
async def test_a_handler_may_clean_up_when_it_is_cancelled(system, gates):
    """An await in the clean-up of a cancelled handler is not cut short by a second cancellation."""

    class Tidy(Actor):
        @handles(Work)
        async def work(self, message: Work) -> str:
            try:
                return await gates.work(message.key)
            finally:
                with anyio.CancelScope(shield=True):
                    await anyio.sleep(0.01)
                gates.ended.append("tidied")

    ref = await system.spawn(Tidy)
    with pytest.raises(CallTimeout):
        await ref.ask(Work("a"), timeout=0.25)
    await gates.ended_all("tidied")
    assert gates.ended == ["tidied"]


async def test_scopes_of_a_handler_and_its_cancellation_do_not_mix(system, gates):
    """A handler's own time limits and task groups work, and so does the next message after each of them."""

    class Scoped(Actor):
        @handles(Work)
        async def work(self, message: Work) -> str:
            with anyio.move_on_after(0.005) as scope:
                await anyio.sleep_forever()
            assert scope.cancelled_caught
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(gates.work, message.key)
            return message.key

    ref = await system.spawn(Scoped)
    for _ in range(3):
        with pytest.raises(CallTimeout):
            await ref.ask(Work("shut"), timeout=0.05)
        gates.open("open")
        assert await ref.ask(Work("open")) == "open"


@on_asyncio
async def test_only_the_cancelled_callers_end(system, gates):
    """G28, G29: of 20 callers some are cancelled in each of asyncio's ways, two of them in one turn; only they end."""
    limits: list[asyncio.Timeout] = []
    scope = anyio.CancelScope()

    async def timed(key: str) -> str:
        async with asyncio.timeout(None) as limit:
            limits.append(limit)
            return await worker.ask(Parallel(key))

    async def scoped(key: str) -> str | None:
        with scope:
            return await worker.ask(Parallel(key))
        return None

    class Wide(Actor):
        @handles(Parallel, concurrent=20)
        async def parallel(self, message: Parallel) -> str:
            return await gates.work(message.key)

    worker = await system.spawn(Wide)
    keys = [f"caller-{number}" for number in range(20)]
    plain = [asyncio.create_task(worker.ask(Parallel(key))) for key in keys[:18]]
    by_timeout = asyncio.create_task(timed(keys[18]))
    by_scope = asyncio.create_task(scoped(keys[19]))
    await gates.begun_all(*keys)
    limits[0].reschedule(asyncio.get_running_loop().time() + 0.01)
    scope.deadline = anyio.current_time() + 0.01
    for task in plain[:2]:
        task.cancel()
    with pytest.raises(TimeoutError):
        await by_timeout
    assert await by_scope is None
    await gates.ended_all(*keys[:2], *keys[18:])
    assert set(gates.cancelled) == {*keys[:2], *keys[18:]}
    assert [task.cancelled() for task in plain[:2]] == [True, True]
    gates.open(*keys)
    assert await asyncio.gather(*plain[2:]) == keys[2:18]


@on_asyncio
async def test_a_cancellation_from_within_is_not_the_askers(system):
    """A handler that awaits what somebody else has cancelled fails; its asker is not cancelled for it."""

    class Unlucky(Actor):
        @handles(Work)
        async def work(self, message: Work) -> str:
            task = asyncio.create_task(asyncio.sleep(10))
            asyncio.get_running_loop().call_soon(task.cancel)
            await task
            return ""

    ref = await system.spawn(Unlucky)
    with pytest.raises(ActorError, match="awaited something that somebody else had cancelled"):
        await ref.ask(Work())
    assert ref.is_alive


@on_asyncio
async def test_a_reply_and_a_cancellation_in_one_turn_leave_nothing_unseen(system):
    """An error that arrives in the very turn in which its asker is cancelled is not reported as never retrieved."""

    class Raising(Actor):
        @handles(Work)
        async def work(self, message: Work) -> str:
            asyncio.get_running_loop().call_soon(asks[0].cancel)
            raise ValueError("unseen")

    seen: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: seen.append(context))
    ref = await system.spawn(Raising)
    asks = [asyncio.create_task(ref.ask(Work()))]
    await asyncio.wait(asks)
    assert asks.pop().cancelled()
    gc.collect()
    asyncio.get_running_loop().set_exception_handler(None)
    assert seen == []


@on_asyncio
@pytest.mark.parametrize("message", [Ping(), Parallel()])
async def test_a_caller_who_goes_in_the_same_turn_is_not_served(system, worker, gates, message):
    """A message whose asker is cancelled before the actor has its turn is never started."""
    ask = asyncio.create_task(worker.ask(message))
    await asyncio.sleep(0)
    ask.cancel()
    await asyncio.wait([ask])
    assert ask.cancelled()
    assert await worker.ask(Work()) == ""
    assert gates.begun == [""]
    assert system.statistics().dead_letters.cancelled == 1
    assert worker.statistics().mailbox.queued == 0


async def test_a_deadline_that_passes_while_the_loop_is_busy_counts(system):
    """A message whose deadline passed during a long plain handler is not started after it."""
    begun: list[str] = []

    class Busy(Actor):
        @handles(Work)
        def work(self, message: Work) -> str:
            begun.append(message.key)
            until = time.monotonic() + 0.03
            while time.monotonic() < until:
                pass
            return message.key

    ref = await system.spawn(Busy)
    ref.tell_nowait(Work("first"))
    with pytest.raises(CallTimeout, match="it never started"):
        await ref.ask(Work("second"), timeout=0.01)
    assert begun == ["first"]
    assert system.statistics().dead_letters.expired == 1


@on_asyncio
async def test_an_urgent_handler_may_be_concurrent(worker, gates, system):
    """Urgent messages with slots of their own run side by side while a normal handler awaits."""

    class Both(Worker):
        @handles(Ping, lane="urgent", concurrent=2)
        async def ping(self, message: Ping) -> str:
            return await gates.work("urgent")

    ref = await system.spawn(Both, gates)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(ref.ask, Work("a"))
        await gates.begun_all("a")
        for _ in range(3):
            tasks.start_soon(ref.ask, Ping())
        await anyio.wait_all_tasks_blocked()
        assert gates.begun == ["a", "urgent", "urgent"]
        gates.open("a", "urgent")
    assert gates.ended.count("urgent") == 3


# ---------------------------------------------------------------- what is left


async def test_an_idle_actor_holds_on_to_no_message(worker):
    """Once it is answered, neither message nor reply is kept alive by the actor."""

    class Body(list):
        pass

    body = Body("abc")
    gone = weakref.ref(body)
    assert await worker.ask(Payload(body)) == 3
    del body
    gc.collect()
    assert gone() is None


async def test_statistics_say_what_was_done(worker, gates):
    """Counts and seconds of an actor are typed and right."""
    await worker.ask(Ping())
    await worker.ask(Work())
    with pytest.raises(ValueError, match="x"):
        await worker.ask(Raise(ValueError("x")))
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(worker.ask, Work("a"))
        await gates.begun_all("a")
        worker.tell_nowait(Work())
        await anyio.sleep(0.01)
        now = worker.statistics()
        assert (now.handled, now.failed, now.cancelled, now.in_hand) == (2, 1, 0, 1)
        assert (now.state, now.generation, now.mailbox.queued) == ("running", 1, 1)
        assert now.oldest_seconds >= 0.005
        gates.open("a")
    await gates.ended_all("a")
    assert worker.statistics().busy_seconds >= 0.005


@on_asyncio
@pytest.mark.parametrize("kind", [Raise, RaiseAtOnce, RaiseAside])
async def test_what_nobody_may_swallow_ends_the_actor(gates, kind, monkeypatch):
    """A BaseException of a handler is not swallowed: the asker gets ActorDied, and the error leaves the task."""

    class Fatal(BaseException):
        pass

    tasks: list[asyncio.Task[None]] = []
    start = AsyncioRuntime.start
    monkeypatch.setattr(AsyncioRuntime, "start", lambda *args: tasks.append(start(*args)) or tasks[-1])
    async with ActorSystem() as system:
        ref = await system.spawn(Worker, gates)
        with pytest.raises(ActorDied, match="Fatal: no") as caught:
            await ref.ask(kind(Fatal("no")))
        assert isinstance(caught.value.__cause__, Fatal)
        assert not ref.is_alive
    await asyncio.wait(tasks)
    assert any(isinstance(task.exception(), Fatal) for task in tasks)
    assert ref.statistics().state == "dead"


@pytest.mark.parametrize("anyio_backend", ["trio"])
async def test_what_nobody_may_swallow_is_raised_on_close_under_trio():
    """Under trio the error would be an internal one of the run; the system raises it when it is closed."""

    class Fatal(BaseException):
        pass

    system = ActorSystem()
    await system.open()
    ref = await system.spawn(Worker, Gates())
    with pytest.raises(ActorDied, match="Fatal: no"):
        await ref.ask(Raise(Fatal("no")))
    with pytest.raises(Fatal):
        await system.aclose()
    assert "closed" in repr(system)
