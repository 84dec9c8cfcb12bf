"""What structured output costs on SmolLM2: steps of a mixed batch, masks, compilation; prints JSON.

The step time of eight plain requests and eight with a JSON schema against that of sixteen
plain ones, in one engine, in rounds that alternate and swap who goes first: this machine's
speed drifts by more than what is measured, so only the ratio of neighbours means something.
Step time is that of the median step from the moment when every request has its first token. Besides: eight
schemas that come to their end, whose outputs are validated; the time to fill one row of the
bitmask at each token of such an output; and how long a request waits for a new grammar.

``python benches/bench_structured.py [--rounds 7] [--new-tokens 24] [--check]``; with
``--check`` it exits with 1 when a goal is missed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
from itertools import pairwise
from time import perf_counter
from typing import Any

import jsonschema
import numpy as np

from aexec import AsyncLLM, SamplingParams, StructuredOutput
from aexec.engine.grammar.base import GrammarSpec, Vocabulary
from aexec.engine.grammar.llguidance_backend import LLGuidanceBackend
from measure import machine

MOST = 1.15  # the step time of the mixed batch, in that of the plain one
NUM_REQUESTS = 16
PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 16},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
#: Longer than any run, so that the batch keeps its size.
PEOPLE = {"type": "array", "items": PERSON, "minItems": 1000}


def prompts() -> list[str]:
    """One for each request."""
    return [f"Describe person number {number}, who lives by the sea, as JSON:" for number in range(NUM_REQUESTS)]


async def step_ms(llm: AsyncLLM, num_constrained: int, num_new: int) -> float:
    """Milliseconds per step of sixteen requests, the last ``num_constrained`` of them under a schema."""

    async def read(prompt: str, structured: StructuredOutput | None) -> list[float]:
        sampling = SamplingParams(max_tokens=num_new, temperature=0.0, ignore_eos=True, structured=structured)
        moments: list[float] = []
        async for chunk in llm.generate(prompt, sampling):
            moments += [perf_counter()] * len(chunk.token_ids)
        return moments

    wish = StructuredOutput(json_schema=PEOPLE)
    wishes = [None] * (NUM_REQUESTS - num_constrained) + [wish] * num_constrained
    runs = await asyncio.gather(*map(read, prompts(), wishes))
    begin = max(each[0] for each in runs)
    # The median step: on a machine with other work some steps take many times as long.
    return (
        statistics.median(after - before for each in runs for before, after in pairwise(each) if before >= begin) * 1e3
    )


async def compare(llm: AsyncLLM, rounds: int, num_new: int) -> dict[str, Any]:
    """Rounds of both batches."""
    pairs: list[tuple[float, float]] = []
    for turn in range(-1, rounds):  # the first round only warms up
        order = (0, 8, 8, 0) if turn % 2 else (8, 0, 0, 8)
        times = [(await step_ms(llm, constrained, num_new), constrained) for constrained in order]
        plain, mixed = (statistics.mean(ms for ms, each in times if each == number) for number in (0, 8))
        if turn >= 0:
            pairs.append((plain, mixed))
    ratio = statistics.median(mixed / plain for plain, mixed in pairs)
    return {
        "plain_step_ms": round(statistics.median(plain for plain, _ in pairs), 2),
        "mixed_step_ms": round(statistics.median(mixed for _, mixed in pairs), 2),
        "ratio": round(ratio, 3),
        "ratios": [round(mixed / plain, 3) for plain, mixed in pairs],
        "goal": MOST,
        "reached": ratio <= MOST,
    }


async def validated(llm: AsyncLLM) -> dict[str, Any]:
    """Eight plain requests and eight schemas that come to their end; the plain ones again without the others."""
    plain = [SamplingParams(max_tokens=24, temperature=0.0)] * 8
    begin = perf_counter()
    await llm.complete("A:", SamplingParams(max_tokens=1, structured=StructuredOutput(json_schema=PERSON)))
    first_seconds = perf_counter() - begin
    forms = [SamplingParams(max_tokens=96, temperature=0.0, structured=StructuredOutput(json_schema=PERSON))] * 8
    mixed = await asyncio.gather(*map(llm.complete, prompts(), plain + forms))
    alone = await asyncio.gather(*map(llm.complete, prompts()[:8], plain))
    for answer in mixed[8:]:
        jsonschema.validate(json.loads(answer.text), PERSON)
    return {
        "valid": len(mixed[8:]),
        "plain_unchanged": [each.token_ids for each in mixed[:8]] == [each.token_ids for each in alone],
        "first_request_seconds": round(first_seconds, 3),
        "example": mixed[8].text,
    }


def fill_times(llm: AsyncLLM) -> dict[str, Any]:
    """Microseconds to fill a row at each token of one output, on this thread."""
    vocabulary = Vocabulary(llm.model_info.vocab_size, (2,), llm.tokenizer.to_json())
    begin = perf_counter()
    backend = LLGuidanceBackend(vocabulary)
    opened = perf_counter()
    prepared = backend.prepare(GrammarSpec("json_schema", json.dumps(PERSON)))
    compiled = perf_counter()
    text = '{"name": "Alice the sailor", "age": 42, "tags": ["red", "blue"]}'
    times: list[float] = []
    for _ in range(5):
        grammar = backend.load(prepared)
        for token in llm.tokenizer.encode(text):
            row = np.zeros(vocabulary.num_words, dtype=np.int32)
            start = perf_counter()
            grammar.fill(row)
            times.append((perf_counter() - start) * 1e6)
            if grammar.accept([token]) != 1:
                raise RuntimeError(f"the grammar refused token {token} of its own text")
    times.sort()
    return {
        "vocab_size": vocabulary.size,
        "fill_us": {"p50": round(statistics.median(times), 1), "p99": round(times[int(len(times) * 0.99)], 1)},
        "open_library_ms": round((opened - begin) * 1e3, 1),
        "compile_ms": round((compiled - opened) * 1e3, 2),
    }


async def main(args: argparse.Namespace) -> dict[str, Any]:
    """Everything, on one engine."""
    async with AsyncLLM("smollm2", num_blocks=512) as llm:
        outputs = await validated(llm)
        steps = await compare(llm, args.rounds, args.new_tokens)
        masks = fill_times(llm)
    return {
        "bench": "structured",
        "model": "smollm2",
        "machine": machine(),
        "steps": steps,
        "outputs": outputs,
        "masks": masks,
        "reached": steps["reached"] and outputs["plain_unchanged"],
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--new-tokens", type=int, default=24)
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    report = asyncio.run(main(options))
    print(json.dumps(report, indent=2))
    sys.exit(int(options.check and not report["reached"]))
