"""Requests that begin alike share KV, and nobody sees it but in the statistics."""

from __future__ import annotations

import asyncio

import anyio
import pytest

from aexec import AsyncLLM, SamplingParams
from aexec.errors import RequestFailed
from aexec.testing.tiny_models import save_tiny_model

pytestmark = pytest.mark.anyio

GREEDY = SamplingParams(max_tokens=8, temperature=0.0)
SHARED = [65 + place * 7 % 90 for place in range(300)]
FIRST, SECOND = [*SHARED, 70, 71, 72], [*SHARED, 80, 81]


@pytest.fixture(scope="module")
def tiny_llama(tmp_path_factory):
    """A random Llama of a few hundred thousand parameters."""
    return str(save_tiny_model("llama", tmp_path_factory.mktemp("llama")))


async def num_computed(llm, *prompts, **options):
    """Tokens that steps run for these prompts, and what each says."""
    before = (await llm.statistics()).scheduler.num_scheduled_tokens
    said = [(await llm.complete(prompt, GREEDY, **options)).token_ids for prompt in prompts]
    return (await llm.statistics()).scheduler.num_scheduled_tokens - before, said


@pytest.mark.parametrize("model", ["dummy", "tiny llama"])
@pytest.mark.parametrize("settings", [{}, {"async_scheduling": False}, {"max_num_batched_tokens": 48}])
async def test_a_second_request_with_a_long_shared_prompt_computes_little_of_it(model, settings, tiny_llama):
    """Of 302 prompt tokens fewer than 32 are computed, and the answer is that of an engine without the cache."""
    model = tiny_llama if model == "tiny llama" else model
    limits = {"max_model_len": 512, "num_blocks": 128}
    async with AsyncLLM(model, prefix_caching=False, **limits, **settings) as llm:
        uncached, wanted = await num_computed(llm, FIRST, SECOND)
        assert (await llm.statistics()).prefix == (0, 0, 0, 0, 0)
    async with AsyncLLM(model, **limits, **settings) as llm:
        _, first = await num_computed(llm, FIRST)
        computed, second = await num_computed(llm, SECOND)
        prefix = (await llm.statistics()).prefix
    new_tokens = len(second[0])
    assert computed - new_tokens + 1 < 32  # the last new token is not run
    assert uncached >= len(FIRST) + len(SECOND)
    assert [*first, *second] == wanted
    assert (prefix.num_queried_tokens, prefix.num_hit_tokens) == (len(FIRST) + len(SECOND), 288)
    assert prefix.hit_rate == pytest.approx(288 / 605)


async def test_a_conversation_goes_on_from_what_the_model_said(engine):
    """New tokens are cached as well as the prompt's."""
    async with engine() as (llm, _):
        said = await llm.complete(SHARED, SamplingParams(max_tokens=40, temperature=0.0))
        computed, _ = await num_computed(llm, [*SHARED, *said.token_ids, 66])
        assert computed < 16 + 8


async def test_requests_of_another_salt_share_nothing(engine):
    """Nobody can learn from the speed of an answer what others have asked."""
    async with engine() as (llm, _):
        await num_computed(llm, FIRST, cache_salt="mine")
        assert (await num_computed(llm, FIRST, cache_salt="yours"))[0] >= len(FIRST)
        assert (await num_computed(llm, FIRST))[0] >= len(FIRST)
        assert (await num_computed(llm, FIRST, cache_salt="mine"))[0] < 32


@pytest.mark.parametrize("event", ["reset", "new weights", "sleep"])
async def test_nothing_is_shared_after(event, tiny_llama):
    """A reset, new weights and a lost KV cache: the next request computes all of its prompt, and says what is right."""
    async with AsyncLLM(tiny_llama, max_model_len=512, num_blocks=128) as llm:
        await num_computed(llm, FIRST)
        if event == "reset":
            assert await llm.reset_prefix_cache()
        elif event == "sleep":
            await llm.sleep()
            await llm.wake_up()
        else:
            await llm.load_weights()
        computed, (again,) = await num_computed(llm, FIRST)
        assert computed >= len(FIRST)
        assert (await llm.complete(FIRST, GREEDY)).token_ids == again


async def test_an_engine_without_prefix_caching_has_nothing_to_reset(engine):
    """The answer says so."""
    async with engine(prefix_caching=False) as (llm, _):
        assert not await llm.reset_prefix_cache()


async def test_prompt_logprobs_are_computed_and_not_taken_from_the_cache(engine):
    """Each prompt token has its entry, whatever is cached."""
    async with engine() as (llm, _):
        params = SamplingParams(max_tokens=2, temperature=0.0, prompt_logprobs=1)
        first, second = [await llm.complete(FIRST, params) for _ in range(2)]
        assert second.prompt_logprobs == first.prompt_logprobs
        assert len(second.prompt_logprobs) == len(FIRST)


async def test_many_requests_in_a_small_cache_say_what_they_say_alone():
    """Shared, evicted, preempted and shared again."""
    prompts = [[*SHARED[: 8 * (1 + number % 6)], 65 + number] for number in range(24)]
    async with AsyncLLM("dummy", prefix_caching=False) as llm:
        wanted = [(await llm.complete(prompt, GREEDY)).token_ids for prompt in prompts]
    async with AsyncLLM("dummy", num_blocks=30, block_size=4, max_num_batched_tokens=32) as llm:
        for _ in range(2):
            results = await asyncio.gather(*(llm.complete(prompt, GREEDY) for prompt in prompts))
            assert [result.token_ids for result in results] == wanted
        counts = (await llm.statistics()).scheduler
    assert counts.prefix.num_hit_tokens > 0
    assert counts.prefix.num_evictions > 0
    assert counts.num_preemptions > 0
    assert counts.blocks.num_free_blocks == counts.blocks.num_blocks


async def test_a_failed_step_voids_what_it_may_not_have_computed(engine):
    """The next request of the same prompt computes it."""
    async with engine() as (llm, executor):
        executor.fail_sample = RuntimeError("lost")
        with pytest.raises(RuntimeError, match="lost"):
            await llm.complete(FIRST, GREEDY)
        executor.fail_sample = None
        executor.runner._launched.clear()
        assert (await num_computed(llm, FIRST))[0] >= len(FIRST)


async def test_a_request_that_the_model_fails_leaves_nothing_to_share(engine):
    """What it computed may be as wrong as its logits."""
    async with engine("dummy:poison_token_id=300") as (llm, _):
        results = await asyncio.gather(llm.complete([*SHARED, 300], GREEDY), return_exceptions=True)
        assert "poisons" in str(results[0])
        assert (await num_computed(llm, [*SHARED, 98]))[0] >= len(SHARED)


async def test_a_request_that_the_model_fails_takes_nothing_from_those_it_shared_with(engine):
    """Whoever sends poison behind a common prompt does not make others compute that again."""
    async with engine("dummy:poison_token_id=300") as (llm, _):
        await llm.complete([*SHARED, 97], GREEDY)
        with pytest.raises(RequestFailed, match="poisons"):
            await llm.complete([*SHARED, 300], GREEDY)
        assert (await num_computed(llm, [*SHARED, 98]))[0] < len(SHARED) // 2


async def test_blocks_of_a_step_in_flight_are_shared(engine):
    """A request that comes while the first one's prompt is being computed does not compute it again."""
    async with engine() as (llm, executor):
        executor.hold()
        first = asyncio.create_task(llm.complete(FIRST, GREEDY))
        await executor.held.wait()
        second = asyncio.create_task(llm.complete(SECOND, GREEDY))
        await anyio.wait_all_tasks_blocked()
        executor.release()
        await asyncio.gather(first, second)
        assert executor.steps[1].payload.new[0].num_computed_tokens == 288
