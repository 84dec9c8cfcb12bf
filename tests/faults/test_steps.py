"""Steps over many ranks: order, pairs, drift, and work at the same time."""

from __future__ import annotations

import asyncio
import random
import time

import pytest

from aexec import ExecuteModel
from aexec.errors import CallTimeout
from aexec.messages.step import StepId

pytestmark = pytest.mark.anyio


async def test_all_stages_see_the_same_order_and_results_keep_their_pairing(open_faulty):
    """G60: several steps in flight, random delays, random cancellations between the two phases."""
    chance = random.Random(60)
    async with open_faulty() as executor:
        results: list[StepId] = []

        async def step(number):
            payload = {"seconds": chance.random() * 0.004}
            launching = asyncio.ensure_future(executor.execute_model(ExecuteModel(StepId(number), payload)))
            try:
                await asyncio.shield(launching)
            except (
                asyncio.CancelledError
            ):  # a step that is launched holds its place, and others up, until it is sampled
                await launching
                await executor.sample_tokens(StepId(number))
                raise
            result = await executor.sample_tokens(StepId(number))
            assert result.step == number
            assert tuple(result.output)[:2] == (number, executor.output_rank)
            results.append(result.step)

        tasks = []
        for number in range(1, 61):
            task = asyncio.ensure_future(step(number))
            tasks.append(task)
            await asyncio.sleep(0.001)
            if chance.random() < 0.15:
                task.cancel()
            elif chance.random() < 0.5:
                await asyncio.wait([task])
        await asyncio.gather(*tasks, return_exceptions=True)
        cancelled = {number for number, task in enumerate(tasks, start=1) if task.cancelled()}
        assert [task.exception() for task in tasks if not task.cancelled()] == [None] * (60 - len(cancelled))
        assert results == sorted(results)
        logs = await executor.collective_rpc("read_log")
        orders = [[tuple(entry) for entry in log if entry[0] in ("execute", "sample")] for log in logs]
        assert orders[0] == orders[1] == orders[2]
        executed = [number for kind, number in orders[0] if kind == "execute"]
        assert executed == sorted(executed)
        assert set(range(1, 61)) - cancelled <= set(executed)


async def test_a_rank_out_of_step_is_named(open_faulty):
    """G54: rank 1 leaves step 7's collective out; the error says which ranks sit in it, and health at which step."""

    def skipping(worker):
        inner = worker.execute_model

        def execute(step):
            if step.step == 7 and worker.context.rank != 1:
                worker.native_sleep(4.0)
            return inner(step)

        worker.execute_model = execute

    async with open_faulty(step_timeout=1.5, close_grace=1.0) as executor:
        await executor.collective_rpc(skipping)
        for number in range(1, 7):
            await executor.execute_model(ExecuteModel(StepId(number)))
            await executor.sample_tokens(StepId(number))
        await executor.execute_model(ExecuteModel(StepId(7)))
        with pytest.raises(CallTimeout, match="sample_tokens on ranks 0, 1, 2") as caught:
            await executor.sample_tokens(StepId(7))
        notes = "\n".join(caught.value.__notes__)
        assert "rank 1: answered" in notes
        assert "rank 0: answered" not in notes
        assert "in execute" in notes
        report = await executor.check_health()
        assert [rank.state for rank in report.ranks] == ["stuck", "alive", "stuck"]
        assert [rank.step for rank in report.ranks] == [7, 7, 7]
        assert {report.ranks[0].phase, report.ranks[2].phase} == {"execute_model"}


async def test_stages_work_at_the_same_time(open_faulty):
    """G61: four stages of 10 ms, four steps in flight: near the ideal rate, not a quarter of it."""
    async with open_faulty(ranks=4) as executor:
        limit = asyncio.Semaphore(4)

        async def step(number):
            async with limit:
                await executor.execute_model(ExecuteModel(StepId(number), {"seconds": 0.01}))
                await executor.sample_tokens(StepId(number))

        took = []
        for first in (1, 41, 81, 121):  # four times, as others may use the processors in one of them
            began = time.monotonic()
            await asyncio.gather(*(step(number) for number in range(first, first + 40)))
            took.append(time.monotonic() - began)
        ideal = 40 * 0.01
        assert ideal <= min(took) < 2.0 * ideal
