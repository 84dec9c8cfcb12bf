"""Whose answer is it? Deadlines, cancellation and load must never mix up callers."""

from __future__ import annotations

import asyncio
import random
import threading
import time

import anyio
import anyio.lowlevel
import pytest
from stopwatch import Stopwatch

from aexec.errors import AexecError, CallTimeout, ConfigError, RemoteError, UnknownMethod

pytestmark = pytest.mark.anyio

CALLS = 10_000
CALLERS = 8


def nap_and_echo(worker, seconds, value):
    time.sleep(seconds)
    return worker.context.rank, value


async def anap_and_echo(worker, seconds, value):
    await asyncio.sleep(seconds)
    return worker.context.rank, value


class Caller:
    """One of many that call at the same time, each with values of its own."""

    def __init__(self, executor, number, calls):
        self.executor, self.number, self.calls = executor, number, calls
        self.chance = random.Random(number)
        self.right = self.timeouts = 0

    async def run(self):
        for call in range(self.calls):
            await self.one((self.number, call))

    async def one(self, value):
        chance = self.chance
        ranks = sorted(chance.sample(range(self.executor.world_size), chance.randint(1, self.executor.world_size)))
        method = chance.choice((nap_and_echo, anap_and_echo, "echo", "async_echo"))
        nap = chance.choice((0.0, 0.0, 0.0, 0.001))
        named = isinstance(method, str)
        wanted = [value if named else (rank, value) for rank in ranks]
        limit = chance.choice((None, None, None, 5.0, 0.05, 0.004))
        try:
            args = (value,) if named else (nap, value)
            found = await self.executor.collective_rpc(method, args, timeout=limit, ranks=ranks)
        except CallTimeout:
            self.timeouts += 1
        else:
            assert [tuple(item) if isinstance(item, list) else item for item in found] == wanted
            self.right += 1


@pytest.mark.timeout(150)
async def test_ten_thousand_calls_never_get_another_callers_answer(mp):
    """G05: eight callers, tasks and threads, random delays, ranks, kinds of method and time limits."""
    loop = asyncio.get_running_loop()
    callers = [Caller(mp, number, CALLS // CALLERS) for number in range(CALLERS)]
    failures: list[BaseException] = []

    def from_a_thread(caller):
        async def one(value):
            await caller.one(value)

        try:
            for call in range(caller.calls):
                asyncio.run_coroutine_threadsafe(one((caller.number, call)), loop).result(60)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=from_a_thread, args=(caller,)) for caller in callers[:4]]
    for thread in threads:
        thread.start()
    await asyncio.gather(*(caller.run() for caller in callers[4:]))
    for thread in threads:
        await asyncio.to_thread(thread.join, 60)
    assert failures == []
    assert sum(caller.right + caller.timeouts for caller in callers) == CALLS
    assert sum(caller.right for caller in callers) > CALLS // 2
    assert sum(caller.timeouts for caller in callers) > 0
    assert await mp.collective_rpc("echo", ("end",)) == ["end"] * mp.world_size


async def test_a_missed_deadline_costs_one_call(executor):
    """G02: it ends soon after its limit with the answers that came and the ranks that are missing; the next works."""
    last = executor.world_size - 1
    with (
        Stopwatch() as watch,
        pytest.raises(CallTimeout, match=r"block on rank.*limit of 0\.8 s \(it had started") as caught,
    ):
        await executor.collective_rpc("block", (2.5, last), timeout=0.8)
    assert watch.seconds < 1.5
    notes = "\n".join(caught.value.__notes__)
    assert all(f"rank {rank}: answered" in notes for rank in range(last))
    assert f"rank {last}:" in notes
    assert "in block" in notes
    assert await executor.collective_rpc("echo", (1,), timeout=10.0) == [1] * executor.world_size


async def test_one_budget_covers_ranks_that_are_slow_one_after_the_other(mp):
    """G03: not one budget for each rank."""
    with Stopwatch() as watch, pytest.raises(CallTimeout):
        await mp.collective_rpc("block_in_turn", (0.5,), timeout=0.8)
    assert watch.seconds < 1.2
    await mp.collective_rpc("echo", (1,), timeout=10.0)


async def test_a_call_whose_deadline_passes_in_the_queue_never_runs(executor):
    """G04: it fails when its limit is over, not when its turn comes."""
    entry = f"never {time.monotonic()}"
    ahead = asyncio.ensure_future(executor.collective_rpc("block", (1.5,)))
    await anyio.lowlevel.checkpoint()
    with Stopwatch() as watch, pytest.raises(CallTimeout, match="it never started"):
        await executor.collective_rpc("note", (entry,), timeout=0.2)
    assert watch.wall > 0.19
    assert watch.seconds < 0.55
    await ahead
    assert all(entry not in log for log in await executor.collective_rpc("read_log"))
    with pytest.raises(CallTimeout, match="it never started"):
        await executor.collective_rpc("note", (entry,), timeout=-1.0)
    with pytest.raises(ConfigError):
        await executor.collective_rpc("note", (entry,), timeout=float("inf"))


async def test_cancelling_one_of_twenty_callers_leaves_the_others_alone(executor):
    """G28: by asyncio.timeout, by move_on_after, by Task.cancel, and by two of them in one turn of the loop."""

    async def call(number):
        return await executor.collective_rpc("async_echo" if number % 2 else "echo", (number,))

    async def slow():
        return await executor.collective_rpc("async_block", (30.0,))

    async def under_timeout():
        async with asyncio.timeout(0.05):
            await slow()

    async def under_scope():
        with anyio.move_on_after(0.05) as scope:
            await slow()
        return scope.cancelled_caught

    gone = [asyncio.ensure_future(slow()) for _ in range(2)]
    limited, scoped = asyncio.ensure_future(under_timeout()), asyncio.ensure_future(under_scope())
    others = [asyncio.ensure_future(call(number)) for number in range(20)]
    await anyio.sleep(0.02)
    gone[0].cancel()
    gone[1].cancel()
    gone[1].cancel()
    results = await asyncio.gather(*others)
    assert results == [[number] * executor.world_size for number in range(20)]
    with pytest.raises(TimeoutError):
        await limited
    assert await scoped
    await asyncio.wait(gone)
    assert all(task.cancelled() for task in gone)


async def test_a_cancelled_call_gives_its_place_to_the_next(executor):
    """G29: one that has not begun never runs, on no rank, and the counters return to nothing."""
    mark = f"call {time.monotonic()}"
    first = asyncio.ensure_future(executor.collective_rpc("block", (2.0,), kwargs={"entry": f"{mark} first"}))
    second = asyncio.ensure_future(executor.collective_rpc("note", (f"{mark} second",)))
    third = asyncio.ensure_future(executor.collective_rpc("note", (f"{mark} third",)))
    while {rank.phase for rank in (await executor.check_health()).ranks} != {"block"}:
        pass
    second.cancel()
    first.cancel()
    await third
    for log in await executor.collective_rpc("read_log"):
        assert [entry for entry in log if mark in str(entry)] == [f"{mark} first", f"{mark} third"]
    assert executor.statistics().open == 0


async def test_many_calls_at_once_wait_their_turn(executor):
    """G43: fifty callers of a worker that does one thing at a time all get theirs, in the order of their asking."""
    ends: list[int] = []

    async def call(number):
        assert await executor.collective_rpc("echo", (number,)) == [number] * executor.world_size
        ends.append(number)

    await asyncio.gather(*(call(number) for number in range(50)))
    assert ends == list(range(50))


async def test_what_cannot_travel_is_an_error_of_that_call_alone(mp):
    """G51: an argument, an answer; and the line goes on."""
    with pytest.raises(Exception, match="lock") as caught:
        await mp.collective_rpc("echo", (threading.Lock(),), timeout=5.0)
    assert isinstance(caught.value, AexecError)
    with pytest.raises(Exception, match="lock") as caught:
        await mp.collective_rpc("unportable", timeout=5.0)
    assert isinstance(caught.value, AexecError)
    assert await mp.collective_rpc("echo", (1,), timeout=5.0) == [1, 1, 1]


async def test_every_call_gets_an_answer(executor):
    """G52: an unknown method, wrong arguments, ranks that do not exist: soon, and by name."""
    with Stopwatch() as watch:
        with pytest.raises(UnknownMethod, match="nope"):
            await executor.collective_rpc("nope", timeout=300.0)
        with pytest.raises(TypeError) as caught:
            await executor.collective_rpc("echo", (1, 2, 3), timeout=300.0)
        assert isinstance(caught.value, RemoteError)
        with pytest.raises(ConfigError, match="99"):
            await executor.collective_rpc("echo", (1,), ranks=[99])
    assert watch.seconds < 1.0


async def test_no_message_is_lost_doubled_or_out_of_order(mp):
    """G14: thousands of them to readers of random speed, through a line that fills up."""

    def take(worker, number, data):
        if not hasattr(worker, "taken"):
            worker.taken, worker.chance = [], random.Random(worker.context.rank)
        if worker.chance.random() < 0.02:
            time.sleep(0.003)
        assert len(data) == number % 5000
        worker.taken.append(number)

    def hand_over(worker):
        return worker.taken

    async with asyncio.TaskGroup() as tasks:
        for number in range(2000):
            tasks.create_task(mp.collective_rpc(take, (number, bytes(number % 5000))))
    assert await mp.collective_rpc(hand_over) == [list(range(2000))] * 3
