"""Field cases G28 and G29, and what the issue asks of a call that ends early."""

from __future__ import annotations

import asyncio
import statistics
import time

import anyio
import anyio.lowlevel
import pytest

from aexec.actor import Actor, handles
from aexec.errors import CallCycle
from aexec.messages.base import Message

pytestmark = pytest.mark.anyio
on_asyncio = pytest.mark.parametrize(
    "anyio_backend", [("asyncio", {"debug": True}), ("asyncio", {"use_uvloop": True})], ids=["asyncio", "uvloop"]
)


class Serial(Message[int, "Server"], frozen=True):
    number: int


class Aside(Message[int, "Server"], frozen=True):
    number: int


class Ping(Message[str, "Server"], frozen=True):
    pass


class Forward(Message[int, "Relay"], frozen=True):
    number: int


class Server(Actor):
    def __init__(self) -> None:
        self.gate = anyio.Event()
        self.begun: list[int] = []
        self.cancelled: list[int] = []

    @handles(Serial)
    async def serial(self, message: Serial) -> int:
        return await self.work(message.number)

    @handles(Aside, concurrent=20)
    async def aside(self, message: Aside) -> int:
        return await self.work(message.number)

    @handles(Ping, lane="urgent")
    def ping(self, message: Ping) -> str:
        return "pong"

    async def work(self, number: int) -> int:
        self.begun.append(number)
        try:
            await self.gate.wait()
        except BaseException:
            self.cancelled.append(number)
            raise
        return number


class Relay(Actor):
    def __init__(self, server) -> None:
        self.server = server

    @handles(Forward)
    async def forward(self, message: Forward) -> int:
        return await self.server.ask(Serial(message.number))


@pytest.fixture
async def server(system):
    made: list[Server] = []
    ref = await system.using(name="server").spawn(lambda: made.append(Server()) or made[0])
    return ref, made[0]


async def until(condition) -> None:
    with anyio.fail_after(5):
        while not condition():
            await anyio.lowlevel.checkpoint()


@on_asyncio
@pytest.mark.parametrize("kind", [Serial, Aside])
async def test_of_twenty_callers_only_those_end_that_are_cancelled(server, kind):
    """G28: one by each of Task.cancel, asyncio.timeout and move_on_after, two in one turn; the rest are served."""
    ref, actor = server

    limits: list[asyncio.Timeout] = []
    scope = anyio.CancelScope()

    async def timed(number: int) -> int:
        async with asyncio.timeout(None) as limit:
            limits.append(limit)
            return await ref.ask(kind(number))

    async def scoped(number: int) -> int | str:
        with scope:
            return await ref.ask(kind(number))
        return "moved on"

    tasks = [asyncio.create_task(ref.ask(kind(number))) for number in range(18)]
    by_timeout, by_scope = asyncio.create_task(timed(18)), asyncio.create_task(scoped(19))
    await until(lambda: len(actor.begun) == (1 if kind is Serial else 20))
    in_one_turn = (tasks[3], tasks[7])
    for task in in_one_turn:
        task.cancel()
    limits[0].reschedule(asyncio.get_running_loop().time() + 0.01)  # not before all are where they are to be
    scope.deadline = anyio.current_time() + 0.01
    await asyncio.wait(in_one_turn)
    assert [task.cancelled() for task in in_one_turn] == [True, True]
    with pytest.raises(TimeoutError):
        await by_timeout
    assert await by_scope == "moved on"
    actor.gate.set()
    others = [task for task in tasks if task not in in_one_turn]
    assert await asyncio.gather(*others) == [number for number in range(18) if number not in {3, 7}]
    gone = {3, 7, 18, 19}
    assert set(actor.cancelled) == (set() if kind is Serial else gone)
    assert not gone & set(actor.begun) if kind is Serial else gone <= set(actor.begun)
    assert ref.statistics().mailbox.queued == 0


@on_asyncio
async def test_the_caller_in_hand_and_one_that_waits_are_cancelled_in_one_turn(server):
    """G29: the running handler is cancelled, the waiting one never runs, and the slot is free for the next."""
    ref, actor = server
    tasks = [asyncio.create_task(ref.ask(Serial(number))) for number in range(3)]
    await until(lambda: actor.begun == [0])
    tasks[0].cancel()
    tasks[1].cancel()
    await asyncio.wait(tasks[:2])
    await until(lambda: actor.begun == [0, 2])
    actor.gate.set()
    assert await tasks[2] == 2
    assert [task.cancelled() for task in tasks] == [True, True, False]
    assert (actor.begun, actor.cancelled) == ([0, 2], [0])
    now = ref.statistics()
    assert (now.in_hand, now.mailbox.queued, now.cancelled, now.handled) == (0, 0, 1, 1)


async def test_callers_under_scopes_end_alone_on_every_loop(server):
    """G28: 20 callers in one task group; those whose scope is cancelled end, the others are served."""
    ref, actor = server
    scopes = [anyio.CancelScope() for _ in range(20)]
    served: list[int] = []

    async def call(number: int) -> None:
        with scopes[number]:
            served.append(await ref.ask(Aside(number)))

    async with anyio.create_task_group() as tasks:
        for number in range(20):
            tasks.start_soon(call, number)
        await until(lambda: len(actor.begun) == 20)
        for number in (0, 5, 19):
            scopes[number].cancel()
        await until(lambda: len(actor.cancelled) == 3)
        actor.gate.set()
    assert sorted(served) == [number for number in range(20) if number not in {0, 5, 19}]
    assert sorted(actor.cancelled) == [0, 5, 19]


async def test_cancelling_the_caller_cancels_the_callee_of_its_callee(system, server):
    """A cancelled ask ends the handler, and the ask that this one waits for."""
    ref, actor = server
    relay = await system.spawn(Relay, ref)
    with anyio.CancelScope() as scope:
        async with anyio.create_task_group() as tasks:

            async def cancel() -> None:
                await until(lambda: actor.begun == [1])
                scope.cancel()

            tasks.start_soon(cancel)
            await relay.ask(Forward(1))
    await until(lambda: actor.cancelled == [1])
    assert relay.statistics().cancelled == 1


async def test_a_ping_is_answered_while_a_handler_awaits(server):
    """The urgent lane does not wait for a handler that takes its time."""
    ref, actor = server
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(ref.ask, Serial(1))
        await until(lambda: actor.begun == [1])
        assert await ref.ask(Ping()) == "pong"
        assert ref.statistics().in_hand == 1
        actor.gate.set()


async def test_a_call_cycle_is_found_in_no_time(system):
    """A asks B, B asks A: CallCycle comes at once (measured well below 1 ms), and both live on."""

    class Hop(Actor):
        other: object = None

        @handles(Ping)
        async def ping(self, message: Ping) -> str:
            began = time.monotonic()
            try:
                return await self.other.ask(Ping())
            finally:
                took.append(time.monotonic() - began)

    took: list[float] = []
    first, second = Hop(), Hop()
    first_ref = await system.spawn(lambda: first)
    first.other = second_ref = await system.spawn(lambda: second)
    second.other = first_ref
    for _ in range(20):
        with pytest.raises(CallCycle):
            await first_ref.ask(Ping())
    assert min(took) < 0.001
    assert statistics.median(took) < 0.01
    assert first_ref.is_alive
    assert second_ref.is_alive
