"""Engines of several ranks decide alike, whatever the timing of their loops."""

from __future__ import annotations

import asyncio

import pytest

from aexec.errors import InvalidRequest, QueueFull
from aexec.messages.request import SamplingParams

pytestmark = pytest.mark.anyio

GREEDY = SamplingParams(max_tokens=12, temperature=0.0)
DRAWN = SamplingParams(max_tokens=9)
PROMPTS = [[65 + number] * (3 + 4 * number) for number in range(8)]
KINDS = [
    pytest.param({"async_scheduling": True}, 1, id="overlapped"),
    pytest.param({"async_scheduling": False}, 1, id="normal"),
    pytest.param({}, 2, id="two stages"),
]


@pytest.mark.parametrize(("settings", "stages"), KINDS)
@pytest.mark.parametrize("seed", range(6))
async def test_requests_that_come_in_any_order_run_in_the_same_steps(
    world_class, ranks, engine, settings, stages, seed
):
    """Tokens are those of one engine alone, and the ranks make the same calls in the same order."""
    async with engine() as (alone, _):
        expected = [(await alone.complete(prompt, GREEDY)).token_ids for prompt in PROMPTS]
    world = world_class(2, seed, stages=stages, num_blocks=22, block_size=4)
    async with ranks(world, max_num_seqs=5, max_num_batched_tokens=16, **settings) as llms:

        async def program(rank, llm):
            async def one(number):
                await world.jitter()
                await world.jitter()
                return (await llm.complete(PROMPTS[number], GREEDY, request_id=f"r{number}")).token_ids

            return await asyncio.gather(*map(one, range(len(PROMPTS))))

        results = await world.on_all(llms, program)
        counts = await llms[0].statistics()
    assert results == [expected, expected]
    assert counts.num_preemptions > 0
    world.assert_alike()


@pytest.mark.parametrize(("settings", "stages"), KINDS)
@pytest.mark.parametrize("seed", range(6))
async def test_streams_left_aborts_samples_and_refusals_stay_in_lockstep(world_class, ranks, settings, stages, seed):
    """A request that all ranks leave ends on all of them at the same step; errors of one harm no other."""
    world = world_class(2, seed, stages=stages, num_blocks=60, block_size=4)
    async with ranks(world, max_num_waiting=6, **settings) as llms:

        async def program(rank, llm):
            async def leave(number, after):
                tokens = ()
                async for chunk in llm.generate(
                    [70 + number] * 5, SamplingParams(max_tokens=200), request_id=f"left{number}"
                ):
                    tokens += chunk.token_ids
                    if len(tokens) >= after:
                        break
                    await world.jitter()
                return tokens[:after]

            async def abort():
                generation = llm.generate(
                    [90, 91], SamplingParams(max_tokens=200, temperature=0.0), request_id="aborted"
                )
                await anext(generation)
                await llm.abort("aborted")
                async for chunk in generation:
                    last = chunk
                return last.finish_reason

            async def refused():
                with pytest.raises(InvalidRequest):
                    await llm.complete([], GREEDY, request_id="empty")
                with pytest.raises(InvalidRequest):
                    await llm.complete([65], SamplingParams(max_tokens=100_000, temperature=0.0), request_id="huge")
                return "refused"

            async def samples():
                answer = await llm.complete([80, 81, 82], SamplingParams(n=3, max_tokens=5), request_id="three")
                return [each.token_ids for each in answer.samples]

            async def given_up():
                task = asyncio.create_task(llm.complete([60], GREEDY, request_id="given up"))
                await asyncio.sleep(0)
                task.cancel()
                return "given up"

            return await asyncio.gather(leave(1, 3), leave(2, 7), abort(), refused(), samples(), given_up())

        first, second = await world.on_all(llms, program)
        counts = [await llm.statistics() for llm in llms]
    assert first == second
    assert first[2] == "abort"
    world.assert_alike()
    assert counts[0].blocks.num_free_blocks == counts[0].blocks.num_blocks or counts[0].num_streams


@pytest.mark.parametrize("seed", range(4))
async def test_counted_ids_and_drawn_seeds_are_equal(world_class, ranks, seed):
    """The n-th request of each rank is the same, and so is what is drawn for it."""
    world = world_class(3, seed)
    async with ranks(world) as llms:

        async def program(rank, llm):
            return [(await llm.complete(prompt, DRAWN)).token_ids for prompt in PROMPTS[:3]]

        first, second, third = await world.on_all(llms, program)
    assert first == second == third
    assert len(set(first)) == 3
    world.assert_alike()


async def test_a_full_queue_turns_the_same_requests_away(world_class, ranks):
    """Which requests are too many is decided once all ranks have them."""
    world = world_class(2, 5)
    async with ranks(world, max_num_waiting=3, max_num_seqs=2) as llms:

        async def program(rank, llm):
            requests = [llm.complete([65 + number], GREEDY, request_id=f"r{number}") for number in range(9)]
            results = await asyncio.gather(*requests, return_exceptions=True)
            return [isinstance(result, QueueFull) for result in results]

        first, second = await world.on_all(llms, program)
    assert first == second
    assert any(first)
    world.assert_alike()
