"""Decode throughput of AsyncLLM on SmolLM2 against transformers' generate; prints JSON.

Both sides run in one process, on the same prompts, in rounds that alternate and swap who
goes first: this machine's speed drifts by more than what is measured, so only the ratio of
neighbours means something. Decode throughput is tokens per second from the moment when
every request has its first token. On our side that is the whole way: scheduler, actors,
compute thread, sampling, detokenisation, one stream per request. On the other it is a
static batch of ``generate``, called on the engine's own compute thread: each thread that
computes has a pool of OpenMP threads, and two pools that take turns slow each other down.

``python benches/bench_engine.py [--rounds 9] [--new-tokens 17] [--dtypes float32,bfloat16]
[--batches 1,8] [--check]``; with ``--check`` it exits with 1 when a ratio misses its goal.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
import transformers

from aexec import AsyncLLM, SamplingParams
from aexec.model.sources.resolve import resolve_model
from aexec.model.transformer.hooks import silent

T = TypeVar("T")
GOALS = {1: 1.0, 8: 1.1}  # least median ratio, by batch size
PROMPT_TOKENS = 48


@dataclass
class Run:
    """One run of one side: seconds since its start at which tokens came, and the tokens."""

    arrivals: list[list[float]]
    tokens: list[list[int]]

    @property
    def decode_rate(self) -> float:
        """Tokens per second after every request has its first one."""
        begin = max(each[0] for each in self.arrivals)
        end = max(each[-1] for each in self.arrivals)
        return sum(moment > begin for each in self.arrivals for moment in each) / (end - begin)

    @property
    def whole_rate(self) -> float:
        """Tokens per second from the start, prompts included."""
        return sum(map(len, self.tokens)) / max(each[-1] for each in self.arrivals)


class Clock(transformers.StoppingCriteria):
    """Notes when each step of generate ends; stops nothing."""

    def __init__(self) -> None:
        self.start = time.perf_counter()
        self.moments: list[float] = []

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:  # noqa: ARG002
        """Go on."""
        self.moments.append(time.perf_counter() - self.start)
        return torch.zeros(len(input_ids), dtype=torch.bool)


def load_reference(directory: Path, dtype: str) -> Any:
    """The same weights in transformers' own model."""
    with silent():
        model: Any = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=getattr(torch, dtype))
    model.generation_config.eos_token_id = None
    return model


@torch.inference_mode()
def run_generate(model: Any, prompts: list[list[int]], num_new: int) -> Run:
    """A static batch; all prompts are of one length, so nothing is padded."""
    ids = torch.tensor(prompts)
    clock = Clock()
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=num_new,
        do_sample=False,
        pad_token_id=0,
        stopping_criteria=transformers.StoppingCriteriaList([clock]),
    )
    return Run([clock.moments] * len(prompts), out[:, PROMPT_TOKENS:].tolist())


async def on_compute_thread(llm: AsyncLLM, function: Callable[[], T]) -> T:
    """Call a function where the model runner runs."""
    (result,) = await llm.executor.collective_rpc(lambda _worker: function())
    found: T = result
    return found


async def run_aexec(llm: AsyncLLM, prompts: list[list[int]], num_new: int) -> Run:
    """One stream per prompt, all at once."""
    sampling = SamplingParams(max_tokens=num_new, temperature=0.0, ignore_eos=True)
    start = time.perf_counter()

    async def read(prompt: list[int]) -> tuple[list[float], list[int]]:
        moments: list[float] = []
        tokens: list[int] = []
        async for chunk in llm.generate(prompt, sampling):
            moments += [time.perf_counter() - start] * len(chunk.token_ids)
            tokens += chunk.token_ids
        return moments, tokens

    streams = await asyncio.gather(*map(read, prompts))
    return Run([moments for moments, _ in streams], [tokens for _, tokens in streams])


async def measure(llm: AsyncLLM, model: Any, batch: int, args: argparse.Namespace) -> dict[str, Any]:
    """Rounds of both sides for one batch size."""
    generator = np.random.default_rng(1)
    prompts: list[list[int]] = generator.integers(5, 40_000, (batch, PROMPT_TOKENS)).tolist()
    ours: list[Run] = []
    theirs: list[Run] = []
    for turn in range(-1, args.rounds):  # the first round only warms up
        if turn % 2:
            mine = await run_aexec(llm, prompts, args.new_tokens)
        their = await on_compute_thread(llm, lambda: run_generate(model, prompts, args.new_tokens))
        if not turn % 2:
            mine = await run_aexec(llm, prompts, args.new_tokens)
        if turn >= 0:
            ours.append(mine)
            theirs.append(their)
    pairs = list(zip(ours, theirs, strict=True))
    ratio = spread([mine.decode_rate / their.decode_rate for mine, their in pairs])
    return {
        "batch": batch,
        "rounds": args.rounds,
        "prompt_tokens": PROMPT_TOKENS,
        "new_tokens": args.new_tokens,
        "aexec_decode_tokens_per_s": spread([run.decode_rate for run in ours]),
        "generate_decode_tokens_per_s": spread([run.decode_rate for run in theirs]),
        "decode_ratio": ratio,
        "whole_ratio": spread([mine.whole_rate / their.whole_rate for mine, their in pairs]),
        "same_tokens": all(mine.tokens == their.tokens for mine, their in pairs),
        "goal": GOALS.get(batch),
        "reached": ratio["median"] >= GOALS.get(batch, 0.0),
    }


def spread(values: list[float]) -> dict[str, float]:
    """Median and range."""
    named = {"median": statistics.median(values), "min": min(values), "max": max(values)}
    return {name: round(value, 3) for name, value in named.items()}


async def main(args: argparse.Namespace) -> dict[str, Any]:
    """All settings, one after the other."""
    directory = resolve_model("smollm2").directory
    results: list[dict[str, Any]] = []
    for dtype in args.dtypes.split(","):
        async with AsyncLLM("smollm2", dtype=dtype, num_blocks=256) as llm:
            model = await on_compute_thread(llm, lambda: load_reference(directory, dtype))  # noqa: B023  # called here
            results += [
                {"dtype": dtype, **await measure(llm, model, int(batch), args)} for batch in args.batches.split(",")
            ]
    return {
        "bench": "engine",
        "model": "smollm2",
        "machine": {"processor": platform.machine(), "cores": os.cpu_count(), "torch_threads": torch.get_num_threads()},
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "load_average": [round(load, 2) for load in os.getloadavg()],
        "results": results,
        "reached": all(result["reached"] for result in results),
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--new-tokens", type=int, default=17)
    parser.add_argument("--dtypes", default="float32,bfloat16")
    parser.add_argument("--batches", default="1,8")
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    report = asyncio.run(main(options))
    print(json.dumps(report, indent=2))
    sys.exit(int(options.check and not report["reached"]))
