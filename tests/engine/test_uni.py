"""The engine on the real ``uni`` executor, with the dummy model runner: it checks every delta."""

from __future__ import annotations

import asyncio
import statistics

import anyio
import pytest

from aexec import AsyncLLM, RemoteError, SamplingParams, open_executor
from aexec.config import ExecutorConfig, ModelConfig
from aexec.errors import RequestFailed

pytestmark = pytest.mark.anyio

GREEDY = SamplingParams(max_tokens=24, temperature=0.0)
SEEDED = SamplingParams(max_tokens=24, seed=11)
PARAMS = {"greedy": GREEDY, "seeded": SEEDED}
PROMPTS = [[65 + number] * (3 + 5 * number) for number in range(12)]


@pytest.fixture(scope="module")
async def alone():
    """The answers of each prompt when nothing else runs."""
    async with AsyncLLM("dummy") as llm:
        return {
            name: [(await llm.complete(prompt, params)).token_ids for prompt in PROMPTS]
            for name, params in PARAMS.items()
        }


@pytest.mark.parametrize("kind", PARAMS)
@pytest.mark.parametrize(
    ("settings", "preempts"),
    [
        ({}, False),
        ({"max_num_batched_tokens": 8}, False),
        ({"max_num_seqs": 3}, False),
        ({"num_blocks": 24, "block_size": 4}, True),
        ({"num_blocks": 24, "block_size": 4, "max_num_batched_tokens": 8}, True),
    ],
    ids=["roomy", "chunked", "few-at-a-time", "preempting", "preempting-chunked"],
)
async def test_tokens_do_not_depend_on_how_requests_are_scheduled(alone, kind, settings, preempts):
    """Batched, chunked, queued or preempted: the tokens are those of the request alone."""
    async with AsyncLLM("dummy", **settings) as llm:
        results = await asyncio.gather(*(llm.complete(prompt, PARAMS[kind]) for prompt in PROMPTS))
        counts = await llm.statistics()
    assert [result.token_ids for result in results] == alone[kind]
    assert (counts.num_preemptions > 0) == preempts
    assert counts.blocks.num_free_blocks == counts.blocks.num_blocks


async def test_aborting_in_the_middle_leaves_the_others_as_they_are(alone):
    """Every third stream is left after a few tokens; blocks are free, and no other token changes."""
    async with AsyncLLM("dummy", num_blocks=24, block_size=4) as llm:

        async def read(number, prompt):
            tokens = ()
            async for chunk in llm.generate(prompt, GREEDY):
                tokens += chunk.token_ids
                if number % 3 == 0 and len(tokens) > 4:
                    break
            return tokens

        results = await asyncio.gather(*(read(number, prompt) for number, prompt in enumerate(PROMPTS)))
        counts = await llm.statistics()
    for number, tokens in enumerate(results):
        assert tokens == alone["greedy"][number][: len(tokens)]
        assert len(tokens) == 24 or number % 3 == 0
    assert counts.blocks.num_free_blocks == counts.blocks.num_blocks


async def test_a_request_that_the_runner_cannot_sample_fails_alone():
    """Its error names it; its neighbour is unharmed."""
    async with AsyncLLM("dummy:poison_token_id=99") as llm:
        bad, good = await asyncio.gather(llm.complete([99], GREEDY), llm.complete([98], GREEDY), return_exceptions=True)
    assert isinstance(bad, RequestFailed)
    assert good.finish_reason == "length"


async def test_a_forward_pass_that_raises_ends_all_streams_with_its_error_and_the_engine_lives():
    """The type survives, rank and method are named, and the next request runs."""
    async with AsyncLLM("dummy:crash_token_id=99") as llm:
        results = await asyncio.gather(
            *(llm.complete([token], GREEDY) for token in (97, 98, 99)), return_exceptions=True
        )
        assert all(isinstance(result, RemoteError) and isinstance(result, RuntimeError) for result in results)
        assert "token 99, which crashes the dummy" in str(results[0])
        assert len((await llm.complete([97], GREEDY)).token_ids) == 24


async def test_an_open_executor_can_serve_one_engine_after_another():
    """It stays open, and an engine that closes in the middle of a step leaves nothing unfinished in it."""
    config = ExecutorConfig(backend="uni", worker_kwargs={"model_config": ModelConfig(model="dummy")})
    async with open_executor(config) as executor:
        for _ in range(3):
            async with AsyncLLM("dummy", executor=executor) as llm:
                assert len((await llm.complete("a", GREEDY)).token_ids) == 24
                await anext(llm.generate("left", SamplingParams(max_tokens=500)))
        assert (await executor.check_health()).healthy


async def test_the_loop_is_free_while_a_step_runs():
    """A forward pass that blocks its thread for 100 ms stops no other task."""
    async with AsyncLLM("dummy:forward_seconds=0.1") as llm:
        reader = asyncio.create_task(llm.complete("a", SamplingParams(max_tokens=4, temperature=0.0)))
        ticks = 0
        while not reader.done():
            await anyio.sleep(0.002)
            ticks += 1
        assert ticks > 20


async def test_256_requests_cost_the_driver_little_per_step():
    """The driver's own work per step of 256 requests, over some steps; the target is 2 ms on a quiet machine."""
    async with AsyncLLM("dummy", max_num_batched_tokens=4096, async_scheduling=False) as llm:
        spent = []
        for _ in range(3):
            busy, steps = llm.driver_statistics().busy_seconds, (await llm.statistics()).num_steps
            params = SamplingParams(max_tokens=40, temperature=0.0)
            await asyncio.gather(*(llm.complete([65, number % 256], params) for number in range(256)))
            spent.append((llm.driver_statistics().busy_seconds - busy) / ((await llm.statistics()).num_steps - steps))
    assert statistics.median(spent) < 0.02
