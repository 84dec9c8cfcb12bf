"""Several steps in flight on pipeline stages: their order, their pairs, and their rate."""

from __future__ import annotations

import asyncio
import random
import time

import pytest

from aexec import AsyncLLM, ExecutorConfig, ParallelConfig, SamplingParams
from aexec.worker.model_worker import ModelWorker

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(120)]

STAGES, STAGE_SECONDS = 4, 0.01


class LoggingWorker(ModelWorker):
    """Writes down what it is told, and takes a different time over each step."""

    def __init__(self, context, **settings):
        super().__init__(context, **settings)
        self.log = []

    def execute_model(self, step):
        self.log.append(("execute", step.step))
        time.sleep(random.Random(1000 * step.step + self.context.rank).random() * 0.004)
        return super().execute_model(step)

    def sample_tokens(self, step_id, grammar):
        self.log.append(("sample", step_id))
        return super().sample_tokens(step_id, grammar)


def staged(stages, worker_cls=ModelWorker):
    layout = ParallelConfig(pipeline_parallel_size=stages)
    return ExecutorConfig(backend="mp", parallel=layout, worker_cls=worker_cls)


async def read(llm, number, params, leaves_after):
    """The tokens of one request, whose reader may leave it, or be cancelled while it waits."""
    tokens = ()
    async for chunk in llm.generate([65 + number] * (1 + 5 * number), params):
        tokens += chunk.token_ids
        if len(tokens) > leaves_after:
            if number % 2:
                break
            asyncio.current_task().cancel()
            await asyncio.sleep(0)
    return tokens


async def test_all_stages_see_one_order_and_each_step_keeps_its_tokens():
    """G60: readers leave and are cancelled while stages take their time; no stage sees another order, no token moves."""
    chance = random.Random(60)
    params = [SamplingParams(max_tokens=30, seed=number) for number in range(16)]
    never = [1000] * len(params)
    async with AsyncLLM("dummy") as llm:
        alone = [await read(llm, number, each, never[number]) for number, each in enumerate(params)]
    leaves = [chance.randrange(20) if number % 3 == 0 else 1000 for number in range(len(params))]
    async with AsyncLLM("dummy", executor=staged(3, LoggingWorker), max_num_batched_tokens=24) as llm:
        tasks = [asyncio.create_task(read(llm, number, each, leaves[number])) for number, each in enumerate(params)]
        await asyncio.wait(tasks)
        counts = await llm.statistics()
        logs = await llm.executor.collective_rpc(lambda worker: worker.log)
    for number, task in enumerate(tasks):
        if not task.cancelled():
            tokens = task.result()
            assert tokens == alone[number][: len(tokens)]
            assert len(tokens) > min(leaves[number], 29)
    assert sum(task.cancelled() for task in tasks) >= 2
    assert logs[0] == logs[1] == logs[2]
    executed = [step for kind, step in logs[0] if kind == "execute"]
    sampled = [step for kind, step in logs[0] if kind == "sample"]
    assert executed == sorted(set(executed))
    assert sampled == [step for step in executed if step in set(sampled)]
    assert counts.blocks.num_free_blocks == counts.blocks.num_blocks


async def test_four_stages_work_at_the_same_time():
    """G61: steps follow each other by the time of one stage, not of all four; 90 % is the goal on a quiet machine.

    The best of three: a machine that stands still for a moment makes one of them slow.
    """
    params = SamplingParams(max_tokens=40, temperature=0.0)
    model = f"dummy:forward_seconds={STAGES * STAGE_SECONDS}"
    async with AsyncLLM(model, executor=staged(STAGES)) as llm:
        shares = []
        while len(shares) < 3 and min(shares, default=2.0) >= 2.0:
            before, began = (await llm.statistics()).num_steps, time.monotonic()
            await asyncio.gather(*(llm.complete([65 + number] * 3, params) for number in range(8)))
            seconds = time.monotonic() - began
            shares.append(seconds / ((await llm.statistics()).num_steps - before) / STAGE_SECONDS)
    assert 1.0 <= min(shares) < 2.0
