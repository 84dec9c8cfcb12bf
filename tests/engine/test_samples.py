"""``n`` samples of one prompt: streams of their own, seeds of their own, one prompt."""

from __future__ import annotations

import asyncio
import gc
import pickle

import anyio
import msgspec
import pytest

from aexec import AsyncLLM, SamplingParams
from aexec.engine.request import Request
from aexec.engine.samples import give_seed, sample_id, samples_of, seed_of_sample
from aexec.errors import InvalidRequest, QueueFull, RequestFailed, RequestTimeout

pytestmark = pytest.mark.anyio

PROMPT = [65 + place % 50 for place in range(100)]
ONE = SamplingParams(max_tokens=12, seed=7)
FOUR = msgspec.structs.replace(ONE, n=4)


# ---------------------------------------------------------------- what they are


def test_samples_are_requests_of_their_own_that_follow_the_first():
    """They share nothing that changes."""
    first, *others = samples_of(Request("a", [1, 2], 2, FOUR, frozenset(), 14, priority=3, cache_salt="x"))
    assert [other.request_id for other in others] == [sample_id("a", 1), sample_id("a", 2), "a#3"]
    assert all(other.leader is first and other.token_ids is not first.token_ids for other in others)
    assert {(other.priority, other.cache_salt, other.sampling.n) for other in (first, *others)} == {(3, "x", 1)}
    assert samples_of(others[0]) == [others[0]]


@pytest.mark.parametrize("seed", [7, -(2**63), None])
def test_a_seed_decides_all_samples(seed):
    """The first has the seed itself, the others have some that follow from it; one is drawn if there is none."""
    seeds = []
    for _ in range(2):
        samples = samples_of(Request("a", [1], 1, msgspec.structs.replace(FOUR, seed=seed), frozenset(), 14))
        for sample in samples:
            give_seed(sample, lambda: 100)
        seeds.append([sample.sampling.seed for sample in samples])
    first = 100 if seed is None else seed
    assert seeds[0] == seeds[1] == [first, *(seed_of_sample(first, index) for index in (1, 2, 3))]
    assert len(set(seeds[0])) == 4
    assert all(-(2**63) <= each < 2**63 for each in seeds[0])


@pytest.mark.parametrize(("values", "words"), [({"n": 0}, "n is 0: expected an integer of at least 1"), ({"n": 2, "temperature": 0.0}, "all samples would be the same: expected n=1")])  # fmt: skip
def test_samples_that_cannot_be_meant_are_refused(values, words):
    """No samples, or several of what is not drawn."""
    with pytest.raises(InvalidRequest, match=words):
        SamplingParams(**values)


# ---------------------------------------------------------------- what they say


@pytest.mark.parametrize("settings", [{}, {"prefix_caching": False}, {"async_scheduling": False, "max_num_seqs": 2}])
async def test_each_sample_says_what_its_seed_says_and_the_prompt_is_computed_once(settings):
    """The first is what ``n=1`` says; the others differ; four samples of 100 tokens run the prompt once, and some."""
    async with AsyncLLM("dummy", **settings) as llm:
        whole = await llm.complete(PROMPT, FOUR)
        computed = (await llm.statistics()).num_scheduled_tokens
        single = [
            await llm.complete(PROMPT, msgspec.structs.replace(ONE, seed=seed))
            for seed in [7, *(seed_of_sample(7, index) for index in (1, 2, 3))]
        ]
    assert [sample.token_ids for sample in whole.samples] == [each.token_ids for each in single]
    assert len({sample.token_ids for sample in whole.samples}) == 4
    assert whole.samples[0] is whole
    assert {(sample.num_prompt_tokens, sample.finish_reason) for sample in whole.samples} == {(100, "length")}
    assert single[0].samples == (single[0],)
    assert computed <= 100 + 3 * 4 + 4 * 12


async def test_chunks_say_of_which_sample_they_are(engine):
    """Each sample's chunks come in order, and its last one has its reason."""
    async with engine() as (llm, _):
        chunks = [chunk async for chunk in llm.generate("Hello", FOUR, request_id="a")]
    assert {chunk.request_id for chunk in chunks} == {"a"}
    for index in range(4):
        own = [chunk for chunk in chunks if chunk.index == index]
        assert [chunk.finish_reason for chunk in own] == [None] * (len(own) - 1) + ["length"]
        assert [chunk.num_completion_tokens for chunk in own][-1] == 12


async def leave(llm, stream):
    await stream.aclose()


async def drop(llm, stream):
    del stream
    gc.collect()


async def abort(llm, stream):
    assert await llm.abort("a")


@pytest.mark.parametrize("way", [leave, abort])
async def test_all_samples_end_together(engine, way):
    """Whoever leaves, or aborts the request by its id, ends all that go on."""
    async with engine() as (llm, _):
        stream = llm.generate("Hello", msgspec.structs.replace(FOUR, max_tokens=500), request_id="a")
        await anext(stream)
        await way(llm, stream)
        await anyio.wait_all_tasks_blocked()
        statistics = await llm.statistics()
        assert (statistics.num_running, statistics.num_waiting, statistics.num_finished) == (0, 0, 4)
        assert not await llm.abort("a")


async def test_samples_go_on_when_the_one_that_computes_their_prompt_ends(engine):
    """The next one computes it."""
    async with engine(max_num_batched_tokens=16) as (llm, executor):
        executor.hold()
        stream = llm.generate(PROMPT, FOUR, request_id="a")
        reader = asyncio.create_task(anext(stream))
        await executor.held.wait()
        first = stream._stream.streams[0]
        llm._frontend.leave(first)
        executor.release()
        await reader
        rest = [chunk async for chunk in stream]
        assert {chunk.index for chunk in rest if chunk.finish_reason == "length"} == {1, 2, 3}


async def test_samples_count_in_the_queue_and_come_all_or_none(engine):
    """Four do not fit where three may wait, and nothing of them is left."""
    async with engine(max_num_waiting=3) as (llm, _):
        with pytest.raises(QueueFull):
            await llm.complete("Hello", FOUR)
        assert (await llm.statistics()).num_waiting == 0


async def test_more_samples_than_may_ever_wait_cost_nothing(engine):
    """They are refused before anything is made for each of them, and told from a queue that is full just now."""
    async with engine() as (llm, _):
        with pytest.raises(QueueFull, match=r"each of its n=1000000000 samples .* at most 4096 may wait") as caught:
            llm.generate("Hello", SamplingParams(n=10**9), request_id="a")
        assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


async def test_a_sample_that_fails_ends_the_request(engine):
    """The error is raised once the reader has what came before it."""
    async with engine("dummy:poison_token_id=300") as (llm, _):
        with pytest.raises(RequestFailed, match="poisons"):
            await llm.complete([65, 300], FOUR)
        await anyio.wait_all_tasks_blocked()
        assert (await llm.statistics()).num_running == 0


async def test_a_deadline_is_for_all_samples(engine):
    """Those that wait for the prompt, too."""
    async with engine() as (llm, executor):
        executor.hold()
        with pytest.raises(RequestTimeout):
            await llm.complete(PROMPT, FOUR, timeout=0.05)
        executor.release()
        await anyio.wait_all_tasks_blocked()
        assert (await llm.statistics()).num_finished == 4


async def test_samples_are_streamed_fairly(engine):
    """A reader that takes one chunk at a time sees all of them before any a second time, if all have news."""
    async with engine() as (llm, _):
        stream = llm.generate("Hello", FOUR)
        await anext(stream)
        await llm.complete("other", SamplingParams(max_tokens=30))
        indices = [chunk.index async for chunk in stream]
        assert sorted(indices[:4]) == [0, 1, 2, 3]
