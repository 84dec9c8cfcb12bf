"""Promises of an executor about steps: two phases, their order, their errors."""

from __future__ import annotations

import asyncio
import math
import time
from typing import Any

import numpy as np

from aexec.errors import RemoteError, StepStateError, UnknownMethod
from aexec.executor.base import Executor
from aexec.messages.batch import GrammarOutput
from aexec.messages.step import ExecuteModel, ForwardLaunched, StepId, StepResult
from aexec.testing.expect import SOON, MakeExecutor, equal, holds, log_of, new_steps, raising, within
from aexec.testing.workers import ProbeError, ProbeWorker, StepProbeWorker

__all__ = ("STEP_CHECKS",)


async def a_step_is_launched_then_sampled(make: MakeExecutor) -> None:
    """The reply says that the forward pass is queued; the result is the output rank's."""
    async with make(StepProbeWorker) as executor:
        quickest = math.inf  # of several: a machine that stands still makes one of them slow
        *others, step = new_steps(executor, 3)
        for number in (*others, step):
            began = time.monotonic()
            launched = await _execute(executor, number, seconds=0.3)
            quickest = min(quickest, time.monotonic() - began)
            equal(launched, ForwardLaunched(number), "a step with tokens is launched")
            if number is not step:
                await executor.sample_tokens(number)
        holds(quickest < 0.25, f"the launch does not wait for the device: it took {quickest:.3g} s")
        mask = np.array([[5]], dtype=np.int32)
        grammar = GrammarOutput(request_ids=["r"], bitmask=mask)
        sampling = asyncio.ensure_future(executor.sample_tokens(step, grammar))
        await asyncio.sleep(0.05)
        mask[:] = 0  # the driver fills its buffer for the next step
        wanted = StepResult(step, (step, executor.output_rank, [[5]]))
        equal(_plain(await sampling), wanted, "the result is the output rank's, under the bitmask as it was sent")


async def a_step_without_tokens_runs_whole(make: MakeExecutor) -> None:
    """Its reply is its result, and there is nothing to sample."""
    async with make(StepProbeWorker) as executor:
        (step,) = new_steps(executor, 1)
        whole = await _execute(executor, step, tokens=0, value="done")
        equal(whole, StepResult(step, "done"), "a step without tokens has its result at once")
        with raising(StepStateError, "it cannot be sampled"):
            await executor.sample_tokens(step)


async def a_step_in_the_wrong_state_is_refused(make: MakeExecutor) -> None:
    """Duplicate, unknown, sampled already: the error names the step and those that wait."""
    async with make(StepProbeWorker) as executor:
        passed_by, step, unknown = new_steps(executor, 3)
        await _execute(executor, step)
        with raising(StepStateError, "a step is sent once") as caught, within(SOON, "at once"):
            await _execute(executor, step)
        found = (caught.error.step, caught.error.pending)
        equal(found, (step, (step,)), "the error carries the step and what is pending")
        with raising(StepStateError, "step ids increase"):
            await _execute(executor, passed_by)
        with raising(StepStateError, "an unknown step is not sampled"):
            await executor.sample_tokens(unknown)
        await executor.sample_tokens(step)
        with raising(StepStateError, "a step is sampled once"):
            await executor.sample_tokens(step)


async def results_come_in_step_order(make: MakeExecutor) -> None:
    """Several steps are in flight, whatever order they are asked for in."""
    async with make(StepProbeWorker) as executor:
        steps = first, second, third = new_steps(executor, 3)
        for step in steps:
            await _execute(executor, step, seconds=0.02)
        arrived: list[StepId] = []

        async def sample(step: StepId) -> None:
            result = await executor.sample_tokens(step)
            equal(_plain(result).output[0], step, "each step has its own result")
            arrived.append(step)

        await asyncio.gather(sample(third), sample(first), sample(second))
        equal(arrived, steps, "results come in step order")


async def a_failed_forward_pass_surfaces_at_its_sampling(make: MakeExecutor) -> None:
    """On whatever rank it was; the step is dropped, and the next one goes on."""
    async with make(StepProbeWorker) as executor:
        step, following = new_steps(executor, 2)
        await _execute(executor, step, fail="no memory", rank=executor.world_size - 1)
        await _execute(executor, following)
        with raising(ProbeError, "the forward pass's error is the sampling's") as caught:
            await executor.sample_tokens(step)
        holds(isinstance(caught.error, RemoteError), "it is a RemoteError")
        equal(getattr(caught.error, "rank", None), executor.world_size - 1, "it names its rank")
        with raising(StepStateError, "a failed step is dropped"):
            await executor.sample_tokens(step)
        equal(_plain(await executor.sample_tokens(following)).output[0], following, "the next step is sampled")


async def control_calls_take_their_turn_between_steps(make: MakeExecutor) -> None:
    """Never ahead of a step that was accepted before, async methods included."""
    async with make(StepProbeWorker) as executor:
        (step,) = new_steps(executor, 1)
        await _execute(executor, step, seconds=0.15)
        noted = asyncio.ensure_future(executor.collective_rpc("note", ("plain",)))
        waited = asyncio.ensure_future(executor.collective_rpc("async_block", (0.0, "async")))
        await asyncio.gather(noted, waited)
        log = list(await log_of(executor))
        equal(log[:2], [("execute", step), ("executed", step)], "no control call is ahead of an accepted step")
        equal(sorted(log[2:]), ["async", "plain"], "control calls follow")
        await executor.sample_tokens(step)


async def a_dropped_waiter_leaves_the_step_alone(make: MakeExecutor) -> None:
    """Cancelling an await does not pretend to stop the device: the pairing of steps survives (G60)."""
    async with make(StepProbeWorker) as executor:
        step, following = new_steps(executor, 2)
        await _execute(executor, step, seconds=0.15)
        sampling = asyncio.ensure_future(executor.sample_tokens(step))
        await asyncio.sleep(0.02)
        sampling.cancel()
        await asyncio.wait([sampling])
        await _execute(executor, following)
        result = _plain(await executor.sample_tokens(following))
        equal(result.output[0], following, "the next step has its own result")
        with raising(StepStateError, "the cancelled sampling was spent"):
            await executor.sample_tokens(step)


async def a_worker_without_steps_says_so(make: MakeExecutor) -> None:
    """Before anything is sent."""
    async with make(ProbeWorker) as executor:
        with raising(UnknownMethod, "a worker class without execute_model runs no steps"), within(SOON, "at once"):
            await _execute(executor, StepId(1))


async def _execute(
    executor: Executor, step: StepId, *, tokens: int | None = None, **order: Any
) -> ForwardLaunched | StepResult:
    return await executor.execute_model(ExecuteModel(step, order, tokens))


def _plain(result: StepResult) -> StepResult:
    """Some transports bring a tuple back as a list."""
    return StepResult(result.step, tuple(result.output))


STEP_CHECKS = (
    a_step_is_launched_then_sampled,
    a_step_without_tokens_runs_whole,
    a_step_in_the_wrong_state_is_refused,
    results_come_in_step_order,
    a_failed_forward_pass_surfaces_at_its_sampling,
    control_calls_take_their_turn_between_steps,
    a_dropped_waiter_leaves_the_step_alone,
    a_worker_without_steps_says_so,
)
