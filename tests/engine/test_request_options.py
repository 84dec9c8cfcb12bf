"""Priorities, timeouts, and prompts that are too long."""

from __future__ import annotations

import asyncio
import pickle

import anyio
import pytest

from aexec import AsyncLLM, ExecutorConfig, SamplingParams
from aexec.errors import AexecError, InvalidRequest, RequestTimeout
from aexec.messages.request import RequestOptions

pytestmark = pytest.mark.anyio

GREEDY = SamplingParams(max_tokens=12, temperature=0.0)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"priority": 1.5}, "priority is 1.5: expected an integer"),
        ({"priority": True}, "priority is True"),
        ({"timeout": 0}, "timeout is 0: expected a positive number of seconds"),
        ({"timeout": float("inf")}, "timeout is inf"),
        ({"cache_salt": 3}, "cache_salt is 3: expected text"),
        ({"timeout": "1"}, "timeout is '1': expected a positive number of seconds"),
    ],
)
async def test_options_that_cannot_be_meant_are_refused_at_once(engine, options, words):
    """By name, with what is expected."""
    async with engine() as (llm, _):
        with pytest.raises(InvalidRequest, match=words):
            llm.generate("a", GREEDY, **options)
    with pytest.raises(InvalidRequest, match=words):
        RequestOptions(**options)


async def test_the_more_important_request_is_admitted_first(engine):
    """Of those that wait; equal ones go in order of arrival."""
    async with engine(max_num_seqs=1) as (llm, executor):
        executor.hold()
        priorities = {"first": 0, "low": 5, "next": 0, "urgent": -1}
        tasks = []
        for name, priority in priorities.items():
            tasks.append(asyncio.create_task(llm.complete(name, GREEDY, request_id=name, priority=priority)))
            await anyio.wait_all_tasks_blocked()
        executor.release()
        await asyncio.gather(*tasks)
        order = [new.request_id for step in executor.steps for new in step.payload.new]
        assert order == ["first", "urgent", "next", "low"]


async def test_the_least_important_request_gives_way(engine):
    """When blocks run out; its tokens are those that it has alone."""
    async with engine(num_blocks=9, block_size=4, prefix_caching=False) as (llm, executor):
        alone = [(await llm.complete([65] * 9, GREEDY)).token_ids, (await llm.complete([66] * 9, GREEDY)).token_ids]
        executor.hold()
        low = asyncio.create_task(llm.complete([65] * 9, GREEDY, request_id="low", priority=1))
        await executor.held.wait()
        high = asyncio.create_task(llm.complete([66] * 9, GREEDY, request_id="high"))
        await anyio.wait_all_tasks_blocked()
        executor.release()
        results = await asyncio.gather(low, high)
        assert [result.token_ids for result in results] == alone
        new = [each.request_id for step in executor.steps for each in step.payload.new]
        assert new[2:] == ["low", "high", "low"]


@pytest.mark.parametrize("state", ["running", "waiting"])
async def test_a_request_that_takes_too_long_ends_and_says_how_far_it_came(engine, state):
    """Its blocks are free, others go on, and what it said before was handed out."""
    async with engine(max_num_seqs=1) as (llm, executor):
        executor.hold()
        other = asyncio.create_task(llm.complete("other", GREEDY)) if state == "waiting" else None
        if other is not None:
            await executor.held.wait()
        with pytest.raises(RequestTimeout, match=f"request late took longer than its timeout of 0.5 s: it was {state}, with 0 new") as caught:  # fmt: skip
            await llm.complete("late", GREEDY, request_id="late", timeout=0.5)
        executor.release()
        if other is not None:
            assert len((await other).token_ids) == 12
        error = caught.value
        assert (error.seconds, error.num_tokens, error.status) == (0.5, 0, state)
        assert isinstance(error, TimeoutError)
        assert isinstance(error, AexecError)
        assert str(pickle.loads(pickle.dumps(error))) == str(error)
        await anyio.wait_all_tasks_blocked()
        assert (await llm.statistics()).blocks.num_holders == 0


async def test_what_was_said_before_a_timeout_comes_first():
    """A reader loses no token."""
    async with AsyncLLM("dummy:forward_seconds=0.01", executor=ExecutorConfig(backend="mp")) as llm:
        count = 0
        with pytest.raises(RequestTimeout) as caught:  # noqa: PT012  # the loop is what raises
            async for chunk in llm.generate("a", SamplingParams(max_tokens=1500, temperature=0.0), timeout=1.0):
                count += len(chunk.token_ids)
        assert caught.value.num_tokens == count > 0


async def test_a_request_that_ends_in_time_leaves_no_timer(engine):
    """Nothing fires later."""
    async with engine() as (llm, _):
        await llm.complete("a", GREEDY, timeout=1.0)
        handled = llm._frontend.driver.statistics().handled
        await anyio.sleep(1.1)
        assert llm._frontend.driver.statistics().handled == handled


async def test_a_long_prompt_can_be_cut_to_its_end(engine):
    """The last tokens are kept, so that all new ones fit; by default it is refused, with the remedy."""
    async with engine("dummy:max_model_len=32") as (llm, executor):
        prompt = [65 + place for place in range(100)]
        with pytest.raises(InvalidRequest, match=r'on_overflow="keep_last"'):
            await llm.complete(prompt, GREEDY)
        kept = SamplingParams(max_tokens=12, temperature=0.0, on_overflow="keep_last")
        answer = await llm.complete(prompt, kept)
        assert (answer.num_prompt_tokens, len(answer.token_ids)) == (20, 12)
        assert executor.steps[0].payload.new[0].token_ids == prompt[-20:]
        assert answer.token_ids == (await llm.complete(prompt[-20:], GREEDY)).token_ids
    with pytest.raises(InvalidRequest, match="on_overflow is 'drop'"):
        SamplingParams(on_overflow="drop")


@pytest.mark.parametrize("request_id", [5, ["a"]])
async def test_a_request_id_is_text(engine, request_id):
    """On its way to workers anything else would fail the others of its step."""
    async with engine() as (llm, _):
        with pytest.raises(InvalidRequest, match=r"request_id is .*: expected text, or None"):
            llm.generate("a", GREEDY, request_id=request_id)
