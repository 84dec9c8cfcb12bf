"""Promises of an executor about operations: sleep, pause, drain, the bound of steps, and what all ranks report."""

from __future__ import annotations

import asyncio
import time
from typing import Any, cast

from aexec.errors import (
    CallTimeout,
    ConfigError,
    ExecutorClosed,
    ExecutorPaused,
    ExecutorUnavailable,
    ModelNotReady,
    RemoteError,
    UnknownMethod,
)
from aexec.executor.base import Executor
from aexec.messages.batch import KVConnectorOutput, ModelRunnerOutput
from aexec.messages.operations import PauseMode
from aexec.messages.step import ExecuteModel, StepId, StepResult
from aexec.testing.expect import SOON, MakeExecutor, equal, eventually, holds, let_go, log_of, raising, within
from aexec.testing.workers import ConnectorProbeWorker, ProbeError, ProbeWorker, SleepProbeWorker, StepProbeWorker

__all__ = ("OPERATION_CHECKS",)


async def a_model_that_is_not_whole_runs_no_step(make: MakeExecutor) -> None:
    """G55: asleep, partly awake, or without weights, a step is refused with what to do; calls go on."""
    async with make(SleepProbeWorker) as executor:
        size = executor.world_size
        await _run(executor, 1)
        equal(await executor.sleep(1), ["asleep at level 1"] * size, "sleep replies in rank order")
        await _is_refused(executor, 2, "call wake_up")
        equal(await executor.collective_rpc("echo", (1,)), [1] * size, "calls go on")
        await executor.wake_up()
        await _run(executor, 2)
        await executor.sleep(2)
        await executor.wake_up(["weights"])
        await _is_refused(executor, 3, "call load_weights")
        await executor.collective_rpc("update_weights", (7,))
        await _is_refused(executor, 3, "call wake_up(['kv_cache'])")
        await executor.wake_up(["kv_cache"])
        await _run(executor, 3)
        told = [entry for entry in map(tuple, await log_of(executor, size - 1)) if entry[0] in ("sleep", "wake_up")]
        wanted = [("sleep", 1), ("wake_up", None), ("sleep", 2), ("wake_up", ("weights",)), ("wake_up", ("kv_cache",))]
        equal([(what, _tuple(value)) for what, value in told], wanted, "each rank was told")
        with raising(ConfigError, "there is no third level"):
            await executor.sleep(3)
    async with make(StepProbeWorker) as executor:
        with raising(UnknownMethod, "a worker class without sleep says so"):
            await executor.sleep()
        await _run(executor, 1)


async def sleep_waits_for_steps_in_flight(make: MakeExecutor) -> None:
    """G55: a launched step is sampled before anything is let go of; no new one comes between."""
    async with make(SleepProbeWorker) as executor:
        await executor.execute_model(ExecuteModel(StepId(1)))
        with raising(CallTimeout, "sleep waits for the sampling") as caught:
            await executor.sleep(1, timeout=0.1)
        holds(not caught.error.started, "it says that nothing was done")
        sleeping = asyncio.ensure_future(executor.sleep(1))
        await asyncio.sleep(0.02)
        with raising(ModelNotReady, "no step comes between"):
            await executor.execute_model(ExecuteModel(StepId(2)))
        await executor.sample_tokens(StepId(1))
        await sleeping
        entries = [entry[0] for entry in await log_of(executor)]
        holds(entries.index("sample") < entries.index("sleep"), "the sampling came first")


async def a_pause_keeps_steps_and_lets_calls_through(make: MakeExecutor) -> None:
    """G56: under ``keep`` steps wait for the resume, in order; weights may be replaced meanwhile."""
    async with make(SleepProbeWorker, step_timeout=1.5) as executor:
        await executor.execute_model(ExecuteModel(StepId(1)))
        await executor.pause("keep")
        await executor.sample_tokens(StepId(1))
        steps = [asyncio.ensure_future(_run(executor, number)) for number in (2, 3, 4)]
        await executor.collective_rpc("update_weights", (1,))
        await asyncio.sleep(1.6)
        holds(not any(step.done() for step in steps), "no step runs, and none passes its limit")
        await executor.resume()
        await asyncio.gather(*steps)
        order = [tuple(entry)[:2] for entry in await log_of(executor) if entry[0] in ("execute", "weights")]
        equal(order, [("execute", 1), ("weights", 1), ("execute", 2), ("execute", 3), ("execute", 4)], "in order")


async def a_pause_ends_steps(make: MakeExecutor) -> None:
    """G56: ``finish`` waits for those in flight; ``abort`` ends them, and the next ones go on."""
    async with make(StepProbeWorker) as executor:
        await executor.execute_model(ExecuteModel(StepId(1), {"seconds": 0.05}))
        finishing = asyncio.ensure_future(executor.pause("finish"))
        await asyncio.sleep(0.02)
        holds(not finishing.done(), "finish waits for the step in flight")
        await executor.sample_tokens(StepId(1))
        await finishing
        await executor.resume()
        await executor.execute_model(ExecuteModel(StepId(2)))
        await executor.execute_model(ExecuteModel(StepId(3), {"seconds": 1.0}))
        sampling = asyncio.ensure_future(executor.sample_tokens(StepId(2)))
        await asyncio.sleep(0.02)
        await executor.pause("abort")
        with raising(ExecutorPaused, "who waits for a step is told") as caught:
            await sampling
        holds(isinstance(caught.error, ExecutorUnavailable), "it is retryable")
        with raising(ExecutorPaused, "who comes for a step is told as well"):
            await executor.sample_tokens(StepId(3))
        await executor.resume()
        await _run(executor, 4)
        with raising(ConfigError, "there is no other mode"):
            await executor.pause(cast("PauseMode", "stop"))


async def a_close_may_drain(make: MakeExecutor) -> None:
    """G36: new calls are refused at once, running ones end, and what has not at the limit fails."""
    async with make(StepProbeWorker) as executor:
        calls = [asyncio.ensure_future(executor.collective_rpc("block", (0.1,))) for _ in range(3)]
        await executor.execute_model(ExecuteModel(StepId(1)))
        await asyncio.sleep(0.02)
        closing = asyncio.ensure_future(executor.close(drain=20.0))
        await asyncio.sleep(0.02)
        with raising(ExecutorClosed, "a new call is refused"), within(SOON, "at once"):
            await executor.collective_rpc("echo", (1,))
        with raising(ExecutorClosed, "a new step too"):
            await executor.execute_model(ExecuteModel(StepId(2)))
        equal((await executor.sample_tokens(StepId(1))).step, 1, "a launched step may be sampled")
        equal(await asyncio.gather(*calls), [list(range(executor.world_size))] * 3, "running calls end")
        with within(10.0, "it closes when nothing is left"):
            await closing
    async with make(ProbeWorker) as executor:
        endless = asyncio.ensure_future(executor.collective_rpc("async_block", (60.0,)))
        await asyncio.sleep(0.05)
        with within(10.0, "a drain has a limit"):
            await executor.close(drain=0.2)
        with raising(ExecutorClosed, "what has not ended by then fails"):
            await endless


async def steps_beyond_the_bound_wait_their_turn(make: MakeExecutor) -> None:
    """G43: in order, cancellably, and the bound can be seen."""
    async with make(StepProbeWorker, max_concurrent_steps=2) as executor:
        holds("max_concurrent_steps  2  (argument)" in _narrow(str(executor.describe())), "the bound can be read back")
        for number in (1, 2):
            await executor.execute_model(ExecuteModel(StepId(number)))
        waiting = [asyncio.ensure_future(executor.execute_model(ExecuteModel(StepId(n)))) for n in (3, 4, 5)]
        await asyncio.sleep(0.05)
        holds(not any(step.done() for step in waiting), "steps beyond the bound wait")
        holds("step 4: waits to be sent" in executor.dump(), "a dump shows them")
        waiting[1].cancel()
        for number in (1, 2, 3, 5):
            await executor.sample_tokens(StepId(number))
        await asyncio.wait(waiting)
        equal([step.cancelled() for step in waiting], [False, True, False], "one that is cancelled never runs")
        executed = [entry[1] for entry in map(tuple, await log_of(executor)) if entry[0] == "execute"]
        equal(executed, [1, 2, 3, 5], "the others ran in order")


async def the_earliest_error_is_the_cause(make: MakeExecutor) -> None:
    """G32: errors that follow on other ranks are notes of it, and do not delay it."""
    async with make(ProbeWorker) as executor:
        last = executor.world_size - 1
        found = ""
        for _ in range(5):  # a busy machine may hold up a rank for longer than the others' errors are waited for
            with raising(RemoteError, "an error is raised") as caught, within(SOON, "soon"):
                await executor.collective_rpc(_fail_in_turn, (last,))
            found = f"{caught.error!r}\n{caught.notes}"
            is_cause = isinstance(caught.error, ValueError) and "the cause" in str(caught.error)
            if is_cause and all(f"rank {rank}: raised as well" in caught.notes for rank in range(last)):
                return
        holds(False, f"the earliest is raised, and what follows is in its notes: {found}")


async def a_missed_deadline_is_the_end_of_one_call(make: MakeExecutor) -> None:
    """G02: the next call works once the slow rank is done."""
    async with make(ProbeWorker) as executor:
        last = executor.world_size - 1
        with raising(CallTimeout, "a call past its limit fails") as caught:
            await executor.collective_rpc("hold", (last,), timeout=0.5)
        for rank in range(last):
            holds(f"rank {rank}: answered" in caught.notes, "it tells who has answered")
        await let_go(executor, last)
        equal(await executor.collective_rpc("echo", (1,)), [1] * executor.world_size, "the next call works")


async def connectors_of_all_ranks_make_one_report(make: MakeExecutor) -> None:
    """OUT-05, OUT-06: a request counts as sent when all ranks have sent it; nothing that a rank reports is lost."""
    async with make(ConnectorProbeWorker) as executor:
        size = executor.world_size
        for step in range(1, size + 2):
            result = await _run(executor, step)
            output = result.output
            holds(isinstance(output, ModelRunnerOutput), "the result is the output rank's")
            assert isinstance(output, ModelRunnerOutput)
            equal(output.sampled_token_ids, [[step]], "its tokens are the output rank's")
            report = output.kv_connector_output
            holds(isinstance(report, KVConnectorOutput), "it has a report of the connectors")
            assert isinstance(report, KVConnectorOutput)
            sent = step - size + 1
            equal(sorted(report.finished_sending), [f"r{sent}"][: sent > 0], "sent is what all ranks have sent")
            equal(report.invalid_block_ids, set(range(size)), "blocks that any rank has lost")
            equal(report.stats, {"ranks": float(size)}, "figures are added up")


async def what_an_executor_does_can_be_seen(make: MakeExecutor) -> None:
    """G46, G69: settings with their sources, secrets hidden; stacks of the ranks."""
    async with make(ProbeWorker, worker_kwargs={"seconds": 0.0}, rpc_timeout=20.0) as executor:
        told = executor.describe()
        equal((told["rpc_timeout"].value, told["rpc_timeout"].source), (20.0, "argument"), "what was given")
        equal(told["slow_call"].source, "default", "what was not")
        equal(told["max_concurrent_steps"].source, "chosen", "what was left open")
        call = asyncio.ensure_future(executor.collective_rpc("hold"))

        async def all_are_in_it() -> bool:
            stacks = await executor.stacks()
            return len(stacks) == executor.world_size and all("in hold" in stack for stack in stacks.values())

        await eventually(all_are_in_it, "the stacks show where the ranks are")
        await let_go(executor)
        await call


async def _run(executor: Executor, step: int) -> StepResult:
    await executor.execute_model(ExecuteModel(StepId(step)))
    return await executor.sample_tokens(StepId(step))


async def _is_refused(executor: Executor, step: int, remedy: str) -> None:
    with raising(ModelNotReady, "a step on a model that is not whole is refused") as caught, within(SOON, "at once"):
        await executor.execute_model(ExecuteModel(StepId(step)))
    holds(remedy in str(caught.error), f"it says what to do: {caught.error}")


def _fail_in_turn(worker: ProbeWorker, first: int) -> None:
    if worker.context.rank != first:
        time.sleep(0.015)
        raise ProbeError("what follows", code=1)
    raise ValueError("the cause")


def _tuple(value: Any) -> Any:
    """Some transports bring a tuple back as a list."""
    return tuple(cast("list[str]", value)) if isinstance(value, list) else value


def _narrow(table: str) -> str:
    return "\n".join("  ".join(line.split(maxsplit=2)) for line in table.splitlines())


OPERATION_CHECKS = (
    a_model_that_is_not_whole_runs_no_step,
    sleep_waits_for_steps_in_flight,
    a_pause_keeps_steps_and_lets_calls_through,
    a_pause_ends_steps,
    a_close_may_drain,
    steps_beyond_the_bound_wait_their_turn,
    the_earliest_error_is_the_cause,
    a_missed_deadline_is_the_end_of_one_call,
    connectors_of_all_ranks_make_one_report,
    what_an_executor_does_can_be_seen,
)
