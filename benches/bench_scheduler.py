"""What the engine costs around a model step with 256 running requests; prints JSON.

``schedule_ms`` and ``update_ms`` are the two pure halves alone. ``driver`` runs requests of
the dummy model on ``uni``, once read to their end by ``complete`` and once chunk by chunk:
``step_ms`` is a whole step, ``runner_ms`` the model runner's part of it, ``overhead_ms`` all
the rest (``overhead_p50_ms`` that of the median step, ``loop_cpu_ms`` the CPU time of the
event loop's thread, which a busy machine distorts least). Of it, ``driver_ms`` are the
driver's own handlers (``schedule_ms`` and ``update_ms`` of these the scheduler's), and
``other_ms`` the executor, the worker, the loop and 256 tasks that read. One step is in
flight, so that nothing hides behind the runner; ``overlapped`` is the same with async
scheduling, where the two share one interpreter lock.
``pipeline`` runs four stages of 10 ms in processes of their own: ``of_ideal`` is the share
of one step every 10 ms, ``bubble`` the engine's own statistic. Of several rounds the median
and the range are given, for machines are noisy.

``python benches/bench_scheduler.py [--requests 256] [--steps 400] [--rounds 5] [--check]``;
with ``--check`` it exits with 1 when a goal is missed.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import statistics
import sys
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any

from aexec import AsyncLLM, ExecutorConfig, ParallelConfig, SamplingParams, StepId
from aexec.config import SchedulerConfig
from aexec.engine.blocks import BlockPool
from aexec.engine.request import Request
from aexec.engine.scheduler import Scheduler
from aexec.messages import ExecuteModel, GrammarOutput, ModelRunnerOutput, SchedulerOutput
from aexec.worker.model_worker import ModelWorker
from measure import Goal, machine, rounded, spread

PROMPT_TOKENS, BLOCK_SIZE = 64, 16
STAGES, STAGE_SECONDS = 4, 0.01


def full_scheduler(num_requests: int, num_steps: int) -> Scheduler:
    """Return a scheduler with ``num_requests`` requests that outlive the bench."""
    tokens = PROMPT_TOKENS + num_steps + 8
    blocks = BlockPool(num_requests * (tokens // BLOCK_SIZE + 1) + 1, BLOCK_SIZE)
    config = SchedulerConfig(max_num_batched_tokens=8192, max_num_seqs=num_requests, max_num_waiting=num_requests)
    scheduler = Scheduler(config, blocks, draw_seed=lambda: 0, prefix_caching=True)
    for number in range(num_requests):
        prompt = [(number + place) % 500 for place in range(PROMPT_TOKENS)]
        scheduler.add(Request(f"request-{number}", prompt, PROMPT_TOKENS, SamplingParams(), frozenset(), tokens))
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


def percentiles(samples: list[float]) -> dict[str, float]:
    """50th, 99th and last."""
    cuts = statistics.quantiles(samples, n=100)
    return {"p50": cuts[49], "p99": cuts[98], "max": max(samples)}


class TimedWorker(ModelWorker):
    """Adds up the seconds that its model runner takes, and notes when each step begins."""

    busy_seconds = 0.0

    def init_device(self) -> None:
        """Have a place for the notes."""
        self.begun: list[tuple[float, float]] = []
        super().init_device()

    def execute_model(self, step: ExecuteModel) -> ModelRunnerOutput | None:
        """Run the forward pass."""
        begin = time.perf_counter()
        self.begun.append((begin, self.busy_seconds))
        reply = super().execute_model(step)
        self.busy_seconds += time.perf_counter() - begin
        return reply

    def sample_tokens(self, step_id: StepId, grammar: GrammarOutput | None) -> ModelRunnerOutput | None:
        """Sample it."""
        begin = time.perf_counter()
        reply = super().sample_tokens(step_id, grammar)
        self.busy_seconds += time.perf_counter() - begin
        return reply


@contextmanager
def timed(owner: type[Any], *names: str) -> Iterator[dict[str, float]]:
    """Seconds spent in methods of ``owner``, by name, while the block runs."""
    spent = dict.fromkeys(names, 0.0)
    originals: dict[str, Callable[..., Any]] = {name: getattr(owner, name) for name in names}

    def wrap(name: str) -> Callable[..., Any]:
        original = originals[name]

        def call(*args: Any, **kwargs: Any) -> Any:
            begin = time.perf_counter()
            try:
                return original(*args, **kwargs)
            finally:
                spent[name] += time.perf_counter() - begin

        return call

    try:
        for name in names:
            setattr(owner, name, wrap(name))
        yield spent
    finally:
        for name, original in originals.items():
            setattr(owner, name, original)


Read = Callable[[AsyncLLM, list[int], SamplingParams], Awaitable[object]]


async def read_whole(llm: AsyncLLM, prompt: list[int], params: SamplingParams) -> None:
    """Wait for the end."""
    await llm.complete(prompt, params)


async def read_chunks(llm: AsyncLLM, prompt: list[int], params: SamplingParams) -> None:
    """Take each chunk as it comes."""
    async for _ in llm.generate(prompt, params):
        pass


async def one_round(options: argparse.Namespace, read: Read, model: str, *, overlapped: bool) -> dict[str, float]:
    """Milliseconds per step of all requests at once."""
    params = SamplingParams(max_tokens=options.steps, temperature=0.0)
    settings: dict[str, Any] = {
        "num_blocks": options.requests * (options.steps // 16 + 2),
        "max_num_batched_tokens": 8192,
        "max_num_seqs": options.requests,
        "async_scheduling": overlapped,
    }
    executor = ExecutorConfig(backend="uni", worker_cls=TimedWorker)
    async with AsyncLLM(model, executor=executor, **settings) as llm:
        with timed(Scheduler, "schedule", "update") as spent:
            begin, cpu = time.perf_counter(), time.thread_time()
            await asyncio.gather(*(read(llm, [65, number % 256], params) for number in range(options.requests)))
            seconds, cpu = time.perf_counter() - begin, time.thread_time() - cpu
        ((runner, begun),) = await llm.executor.collective_rpc(lambda worker: (worker.busy_seconds, worker.begun))
        driver = llm.driver_statistics().busy_seconds
        steps = (await llm.statistics()).num_steps
    parts = {
        "step_ms": seconds,
        "runner_ms": runner,
        "overhead_ms": seconds - runner,
        "loop_cpu_ms": cpu,
        "driver_ms": driver,
        "schedule_ms": spent["schedule"],
        "update_ms": spent["update"],
        "other_ms": seconds - runner - driver,
    }
    mean = {name: value / steps * 1e3 for name, value in parts.items()}
    return {"overhead_p50_ms": p50_overhead(begun) * 1e3, **mean}


def p50_overhead(begun: list[tuple[float, float]]) -> float:
    """Seconds from the beginning of one step to that of the next, without those of the runner."""
    return statistics.median(
        later - earlier - (busy - busy_before) for (earlier, busy_before), (later, busy) in itertools.pairwise(begun)
    )


async def pipeline_round(options: argparse.Namespace) -> dict[str, float]:
    """Steps of four sleeping stages against one step per stage time, from the first token to the last."""
    params = SamplingParams(max_tokens=options.pipeline_tokens, temperature=0.0)
    layout = ParallelConfig(pipeline_parallel_size=STAGES)
    model = f"dummy:forward_seconds={STAGES * STAGE_SECONDS}"
    async with AsyncLLM(model, executor=ExecutorConfig(backend="mp", parallel=layout)) as llm:
        begin = time.perf_counter()
        prompts = [[65 + number] * 3 for number in range(options.pipeline_requests)]
        await asyncio.gather(*(llm.complete(prompt, params) for prompt in prompts))
        seconds = time.perf_counter() - begin
        counts = await llm.statistics()
    return {
        "of_ideal": counts.num_steps * STAGE_SECONDS / seconds,
        "bubble": counts.steps.bubble,
        "requests_per_step": options.pipeline_requests * options.pipeline_tokens / counts.num_steps,
    }


def rounds_of(number: int, one: Callable[[], Coroutine[Any, Any, dict[str, float]]]) -> dict[str, Any]:
    """Median and range of each figure."""
    rounds = [asyncio.run(one()) for _ in range(number)]
    return {name: spread([each[name] for each in rounds]) for name in rounds[0]}


def goals(found: dict[str, Any]) -> list[Goal]:
    """What the issue asks for; ``complete`` is how its requests are read."""
    whole = found["driver"]["whole"]
    return [
        Goal("a call of schedule(), p50, ms", found["schedule_ms"]["p50"], at_most=1),
        Goal("overhead of a step, mean, ms", whole["overhead_ms"]["median"], at_most=2),
        Goal("rate of four stages, of the ideal", found["pipeline"]["of_ideal"]["median"], at_least=0.9),
    ]


def main() -> int:
    """Measure, print, and check when asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--pipeline-requests", type=int, default=8)
    parser.add_argument("--pipeline-tokens", type=int, default=100)
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    found = measure_scheduler(options.requests, options.steps)
    found["driver"] = {
        "whole": rounds_of(options.rounds, lambda: one_round(options, read_whole, "dummy", overlapped=False)),
        "chunks": rounds_of(options.rounds, lambda: one_round(options, read_chunks, "dummy", overlapped=False)),
        "overlapped": rounds_of(options.rounds, lambda: one_round(options, read_chunks, "dummy", overlapped=True)),
    }
    found["pipeline"] = rounds_of(options.rounds, lambda: pipeline_round(options))
    reached = goals(found)
    report = {"bench": "scheduler", "machine": machine(), "settings": vars(options)}
    report |= {"goals": [goal.as_json() for goal in reached], **found}
    print(json.dumps(rounded(report), indent=1))
    return int(options.check and not all(goal.is_met for goal in reached))


if __name__ == "__main__":
    sys.exit(main())
