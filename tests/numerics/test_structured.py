"""Structured output on SmolLM2: what constrained requests say, and what they cost those beside them."""

from __future__ import annotations

import asyncio
import json
import time

import jsonschema
import pytest

from aexec import AsyncLLM, SamplingParams, StructuredOutput

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(300)]

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tag": {"enum": ["red", "green", "blue"]},
    },
    "required": ["name", "age", "tag"],
    "additionalProperties": False,
}
PEOPLE = {"type": "array", "items": PERSON, "minItems": 1000}
PLAIN = SamplingParams(max_tokens=10, temperature=0.0, ignore_eos=True)
MOST = 2.0  # a mixed step in plain ones; the goal, 1.15, is measured by benches/bench_structured.py


@pytest.fixture
def anyio_backend():
    """The engine is asyncio's."""
    return "asyncio"


def prompt(number):
    return f"Person {number} lives by the sea. As JSON:"


async def test_eight_schemas_beside_eight_plain_requests():
    """Each constrained output parses and validates, and the plain ones are what they are without them."""
    form = SamplingParams(max_tokens=64, temperature=0.0, structured=StructuredOutput(json_schema=PERSON))
    async with AsyncLLM("smollm2", num_blocks=256) as llm:
        mixed = await asyncio.gather(
            *(llm.complete(prompt(place), form if place >= 8 else PLAIN) for place in range(16))
        )
        alone = await asyncio.gather(*(llm.complete(prompt(place), PLAIN) for place in range(8)))
        plain_seconds, mixed_seconds = [await best_of_two(llm, constrained) for constrained in (0, 8)]
    assert [each.token_ids for each in mixed[:8]] == [each.token_ids for each in alone]
    for each in mixed[8:]:
        assert each.finish_reason == "stop"
        jsonschema.validate(json.loads(each.text), PERSON)
    assert mixed_seconds < MOST * plain_seconds


async def best_of_two(llm, num_constrained):
    """Seconds of a few steps of sixteen requests, the last so many of them under a schema."""
    endless = SamplingParams(
        max_tokens=6, temperature=0.0, ignore_eos=True, structured=StructuredOutput(json_schema=PEOPLE)
    )
    times: list[float] = []
    for _ in range(2):
        plain = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
        begin = time.perf_counter()
        wishes = (endless if place >= 16 - num_constrained else plain for place in range(16))
        await asyncio.gather(*(llm.complete(prompt(place), wish) for place, wish in enumerate(wishes)))
        times.append(time.perf_counter() - begin)
    return min(times)
