"""Promises of an executor about its life: start, health, death, close, good manners."""

from __future__ import annotations

import asyncio
import signal
import time
from typing import Any

from aexec.errors import AexecError, CallTimeout, ConfigError, ExecutorClosed, RemoteError, WorkerDied
from aexec.executor.base import Executor
from aexec.messages.lifecycle import SlowCall
from aexec.messages.step import ExecuteModel, StepId
from aexec.testing.expect import (
    PATIENCE,
    SOON,
    MakeExecutor,
    all_are_in,
    all_have_come,
    equal,
    eventually,
    holds,
    let_go,
    raising,
    within,
)
from aexec.testing.leaks import belongings
from aexec.testing.workers import ProbeError, ProbeWorker, StepProbeWorker

__all__ = ("LIFE_CHECKS",)


async def hooks_run_in_order_and_share_the_least_memory(make: MakeExecutor) -> None:
    """Each rank allocates what the poorest can."""
    async with make(ProbeWorker) as executor:
        wanted = [
            "__init__",
            "init_device",
            "load_model",
            "determine_available_memory",
            "initialize_cache 1000",
            "compile_or_warm_up",
        ]
        logs = await executor.collective_rpc("read_log")
        equal(logs, [wanted] * executor.world_size, "the hooks ran in order")
        equal([info.state for info in executor.ranks], ["ready"] * executor.world_size, "all ranks are ready")
        equal(executor.generation, 1, "the first generation is 1")


async def a_start_that_fails_raises_the_cause(make: MakeExecutor) -> None:
    """G32, promise 5: with rank, type and text, and nothing is left behind."""
    before = await _belongings()
    for where in ("__init__", "load_model"):
        with raising(ProbeError, f"a failure in {where} is raised as what it is") as caught:
            async with make(ProbeWorker, worker_kwargs={"fail_in": where}):
                pass
        holds(isinstance(caught.error, RemoteError), "it is a RemoteError")
        holds(where in str(caught.error), "it says what failed")
    with raising(ConfigError, "wrong worker arguments are a ConfigError") as wrong:
        async with make(ProbeWorker, worker_kwargs={"no_such_argument": 1}):
            pass
    holds("no_such_argument" in str(wrong.error) and "fail_in" in str(wrong.error), "it shows given and wanted")
    await _nothing_is_left(before)


async def a_start_that_takes_too_long_names_the_phase(make: MakeExecutor) -> None:
    """G33: each rank's phase is in the notes; the limit counts from the last progress, as processes take time."""
    began = time.monotonic()
    async with make(ProbeWorker):
        took = time.monotonic() - began
    limit = max(2.0, min(3.0, 10 * took), 2 * took)  # a start that is no slower than this one is in time
    slow = {"hang_in": "load_model", "seconds": limit + 1.0}
    with raising(CallTimeout, "a start has a limit") as caught:
        async with make(ProbeWorker, worker_kwargs=slow, start_timeout=limit, close_grace=limit + 1.5):
            pass
    holds("load_model" in caught.notes, "the error says what was going on")


async def a_cancelled_start_leaves_nothing_behind(make: MakeExecutor) -> None:
    """Promise 5."""
    before = await _belongings()

    async def start() -> None:
        async with make(ProbeWorker, worker_kwargs={"hang_in": "load_model", "seconds": 0.3}):
            await asyncio.sleep(PATIENCE)  # a machine that stands still lets a start win the race
            raise AssertionError("it was to be cancelled")

    for pause in (0.0, 0.02, 0.15):
        starting = asyncio.ensure_future(start())
        await asyncio.sleep(pause)
        starting.cancel()
        await asyncio.wait([starting])
        holds(starting.cancelled(), "a cancelled start ends as cancelled")
    await _nothing_is_left(before)


async def health_is_answered_while_a_worker_is_busy(make: MakeExecutor) -> None:
    """The liveness lane: phase and age; past the step limit a rank is stuck; never an exception."""
    async with make(ProbeWorker, step_timeout=0.2) as executor:

        async def all_are_healthy() -> bool:
            return bool(await executor.check_health())

        await eventually(all_are_healthy, "idle workers are healthy")
        await all_have_come(executor)
        held = asyncio.ensure_future(executor.collective_rpc("hold"))
        await all_are_in(executor, "hold")

        async def all_are_stuck() -> bool:
            report = await executor.check_health()
            stuck = [rank.age for rank in report.ranks if rank.state == "stuck"]
            holds(all(age > 0.2 for age in stuck), "busy is not stuck")
            return len(stuck) == executor.world_size

        await eventually(all_are_stuck, "past the step limit they are stuck")
        holds("hold" in executor.dump(), "a dump shows the pending call")
        await let_go(executor)
        await held
        await eventually(all_are_healthy, "and then they are healthy again")
        await all_have_come(executor)


async def slow_calls_are_reported(make: MakeExecutor) -> None:
    """G01: with method, age, and the ranks that are missing."""
    async with make(ProbeWorker, slow_call=0.1) as executor:
        events = executor.events()
        last = executor.world_size - 1
        call = asyncio.ensure_future(executor.collective_rpc("hold", (last,)))
        missing: list[int] = []
        while missing != [last]:  # a machine that stands still holds up the others as well: until the next report
            event = await asyncio.wait_for(anext(events), PATIENCE)
            holds(isinstance(event, SlowCall), "a slow call is an event")
            assert isinstance(event, SlowCall)
            missing = list(event.missing)
            equal((event.method, missing[-1]), ("hold", last), "it names the call and who is missing")
            holds(event.age >= 0.1, "and its age")
        await let_go(executor, last)
        await call


async def a_death_ends_all_waiters_at_once(make: MakeExecutor) -> None:
    """Promise 3, G07, G63: WorkerDied with rank, exit code and phase; then the executor has failed, and says so."""
    heard: list[AexecError] = []

    async def hear(error: AexecError) -> None:
        await asyncio.sleep(0)
        heard.append(error)

    async with make(StepProbeWorker) as executor:
        last = executor.world_size - 1
        events = executor.events()
        executor.add_failure_callback(hear)
        executor.add_failure_callback(heard.append)
        await executor.execute_model(ExecuteModel(StepId(1)))
        await executor.sample_tokens(StepId(1))
        waiting = [
            asyncio.ensure_future(executor.collective_rpc("end", (7,), kwargs={"rank": last})),
            asyncio.ensure_future(executor.collective_rpc("async_block", (30.0,))),
            asyncio.ensure_future(executor.collective_rpc("echo", (1,))),
        ]
        with within(SOON, "all waiters end at once"):
            results = await asyncio.gather(*waiting, return_exceptions=True)
        for result in results:
            holds(isinstance(result, WorkerDied), f"a waiter ends with WorkerDied, and not with {result!r}")
        assert isinstance(results[0], WorkerDied)
        equal((results[0].rank, results[0].exit_code), (last, 7), "it carries rank and exit code")
        await _has_failed(executor, last, heard)
        holds(isinstance(await asyncio.wait_for(anext(events), PATIENCE), WorkerDied), "a death is an event")


async def _has_failed(executor: Executor, rank: int, heard: list[AexecError]) -> None:
    with raising(WorkerDied, "a call after the failure says why"), within(SOON, "at once"):
        await executor.collective_rpc("echo", (1,))
    report = await executor.check_health()
    equal(report.ranks[rank].state, "dead", "health knows who is dead")

    async def all_were_told() -> bool:
        return len(heard) == 2

    await eventually(all_were_told, "plain and async callbacks are called")
    executor.add_failure_callback(heard.append)

    async def the_late_one_too() -> bool:
        return len(heard) == 3

    await eventually(the_late_one_too, "a callback that comes late is called as well")


async def closing_ends_everything_once(make: MakeExecutor) -> None:
    """Promise 8, G34: pending calls end, the method that runs is told, later ones are refused; all closes are one."""
    async with make(ProbeWorker, close_grace=20.0) as executor:  # which a method that is not told would use up
        calls = [asyncio.ensure_future(executor.collective_rpc("block_until_cancelled", (30.0,)))]
        calls += [asyncio.ensure_future(executor.collective_rpc("block", (0.2,))) for _ in range(4)]
        calls.append(asyncio.ensure_future(executor.collective_rpc("async_block", (30.0,))))
        await asyncio.sleep(0.05)
        with within(10.0, "closing keeps its budget"):
            await asyncio.gather(*(executor.close() for _ in range(5)))
        for result in await asyncio.gather(*calls, return_exceptions=True):
            holds(isinstance(result, ExecutorClosed), f"a pending call ends with ExecutorClosed, not {result!r}")
        equal({info.state for info in executor.ranks}, {"stopped"}, "all ranks have stopped")
        with raising(ExecutorClosed, "a call after the close is refused"):
            await executor.collective_rpc("echo", (1,))
        with raising(ExecutorClosed, "health after the close is refused"):
            await executor.check_health()
        equal([event async for event in executor.events()], [], "no event follows")


async def it_is_a_library(make: MakeExecutor) -> None:
    """Promise 6, G20, G26: no signal handler is touched; any thread, any loop, several at once."""
    before, handlers = await _belongings(), _handlers()

    async def use() -> None:
        async with make(ProbeWorker) as one, make(ProbeWorker) as two:
            equal(await one.collective_rpc("echo", (1,)), [1] * one.world_size, "the first works")
            equal(await two.collective_rpc("echo", (2,)), [2] * two.world_size, "and so does the second")
            equal(_handlers(), handlers, "signal handlers are as they were")

    await use()
    for _ in range(2):
        await asyncio.to_thread(asyncio.run, use())
    equal(_handlers(), handlers, "signal handlers are as they were")
    await _nothing_is_left(before)


def _handlers() -> list[Any]:
    return [signal.getsignal(number) for number in signal.valid_signals()]


async def _belongings() -> dict[object, str]:
    """On a thread, as looking at processes reads files."""
    return await asyncio.to_thread(belongings)


async def _nothing_is_left(before: dict[object, str]) -> None:
    async def is_gone() -> bool:
        return not (await _belongings()).keys() - before.keys()

    await eventually(is_gone, "no thread, process, descriptor or shared memory is left behind")


LIFE_CHECKS = (
    hooks_run_in_order_and_share_the_least_memory,
    a_start_that_fails_raises_the_cause,
    a_start_that_takes_too_long_names_the_phase,
    a_cancelled_start_leaves_nothing_behind,
    health_is_answered_while_a_worker_is_busy,
    slow_calls_are_reported,
    a_death_ends_all_waiters_at_once,
    closing_ends_everything_once,
    it_is_a_library,
)
