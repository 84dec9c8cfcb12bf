"""What the engine costs around a model step with 256 running requests; prints JSON.

``schedule_ms`` and ``update_ms`` are the two pure halves alone. ``driver`` runs requests of
the dummy model on ``uni``: ``step_ms`` is a whole step, ``runner_ms`` the model runner's
part of it, ``overhead_ms`` all the rest (driver, executor, worker, 256 reading tasks), and
``driver_ms`` the driver's own handlers. Of several rounds the median and the range are
given, for machines are noisy.

``python benches/bench_scheduler.py [--requests 256] [--steps 400] [--rounds 5]``
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from typing import Any

from aexec import AsyncLLM, ExecutorConfig, SamplingParams, StepId
from aexec.config import SchedulerConfig
from aexec.engine.blocks import BlockPool
from aexec.engine.request import Request
from aexec.engine.scheduler import Scheduler
from aexec.messages import ExecuteModel, GrammarOutput, ModelRunnerOutput, SchedulerOutput
from aexec.worker.model_worker import ModelWorker

PROMPT_TOKENS, BLOCK_SIZE = 64, 16


def full_scheduler(num_requests: int, num_steps: int) -> Scheduler:
    """Return a scheduler with ``num_requests`` requests that outlive the bench."""
    tokens = PROMPT_TOKENS + num_steps + 8
    blocks = BlockPool(num_requests * (tokens // BLOCK_SIZE + 1) + 1, BLOCK_SIZE)
    config = SchedulerConfig(max_num_batched_tokens=8192, max_num_seqs=num_requests, max_num_waiting=num_requests)
    scheduler = Scheduler(config, blocks, draw_seed=lambda: 0)
    for number in range(num_requests):
        scheduler.add(
            Request(f"request-{number}", [1] * PROMPT_TOKENS, PROMPT_TOKENS, SamplingParams(), frozenset(), tokens)
        )
    return scheduler


def answer(batch: SchedulerOutput) -> ModelRunnerOutput:
    """Sample one token for each request of the batch."""
    ids = list(batch.num_scheduled_tokens)
    return ModelRunnerOutput(request_ids=ids, sampled_token_ids=[[7]] * len(ids))


def measure_scheduler(num_requests: int, num_steps: int) -> dict[str, Any]:
    """Milliseconds of ``schedule`` and ``update``, over decode steps of all requests."""
    scheduler = full_scheduler(num_requests, num_steps)
    while scheduler.statistics().num_waiting:
        batch = scheduler.schedule()
        scheduler.update(batch, answer(batch))
    schedule_ms: list[float] = []
    update_ms: list[float] = []
    for _ in range(num_steps):
        begin = time.perf_counter()
        batch = scheduler.schedule()
        middle = time.perf_counter()
        output = answer(batch)
        ready = time.perf_counter()
        scheduler.update(batch, output)
        schedule_ms.append((middle - begin) * 1e3)
        update_ms.append((time.perf_counter() - ready) * 1e3)
    return {"schedule_ms": percentiles(schedule_ms), "update_ms": percentiles(update_ms)}


class TimedWorker(ModelWorker):
    """Adds up the seconds that its model runner takes."""

    busy_seconds = 0.0

    def execute_model(self, step: ExecuteModel) -> ModelRunnerOutput | None:
        """Run the forward pass."""
        begin = time.perf_counter()
        reply = super().execute_model(step)
        self.busy_seconds += time.perf_counter() - begin
        return reply

    def sample_tokens(self, step_id: StepId, grammar: GrammarOutput | None) -> ModelRunnerOutput:
        """Sample it."""
        begin = time.perf_counter()
        reply = super().sample_tokens(step_id, grammar)
        self.busy_seconds += time.perf_counter() - begin
        return reply


async def one_round(num_requests: int, num_steps: int) -> dict[str, float]:
    """Milliseconds per step of all requests at once."""
    params = SamplingParams(max_tokens=num_steps, temperature=0.0)
    settings: dict[str, Any] = {"num_blocks": num_requests * (num_steps // 16 + 2), "max_num_batched_tokens": 8192}
    executor = ExecutorConfig(backend="uni", worker_cls=TimedWorker)
    async with AsyncLLM("dummy", executor=executor, max_num_seqs=num_requests, **settings) as llm:
        begin = time.perf_counter()
        await asyncio.gather(*(llm.complete([65, number % 256], params) for number in range(num_requests)))
        seconds = time.perf_counter() - begin
        (runner,) = await llm.executor.collective_rpc(lambda worker: worker.busy_seconds)
        driver = llm.driver_statistics().busy_seconds
        steps = (await llm.statistics()).num_steps
    parts = {"step_ms": seconds, "runner_ms": runner, "overhead_ms": seconds - runner, "driver_ms": driver}
    return {name: value / steps * 1e3 for name, value in parts.items()}


def measure_driver(num_requests: int, num_steps: int, num_rounds: int) -> dict[str, Any]:
    """Median and range over rounds."""
    rounds = [asyncio.run(one_round(num_requests, num_steps)) for _ in range(num_rounds)]
    return {
        name: {
            "median": round(statistics.median(each[name] for each in rounds), 3),
            "min": round(min(each[name] for each in rounds), 3),
            "max": round(max(each[name] for each in rounds), 3),
        }
        for name in rounds[0]
    }


def percentiles(samples: list[float]) -> dict[str, float]:
    """50th, 99th and last."""
    cuts = statistics.quantiles(samples, n=100)
    return {"p50": round(cuts[49], 4), "p99": round(cuts[98], 4), "max": round(max(samples), 4)}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    facts = {"requests": options.requests, "steps": options.steps, "rounds": options.rounds}
    halves = measure_scheduler(options.requests, options.steps)
    driver = measure_driver(options.requests, options.steps, options.rounds)
    print(json.dumps({"bench": "scheduler", **facts, **halves, "driver": driver}, indent=2))


if __name__ == "__main__":
    main()
