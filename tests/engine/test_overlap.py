"""The two loops: which one an engine has, and that the overlapped one gives the same."""

from __future__ import annotations

import asyncio

import anyio
import pytest
import structlog

from aexec.engine.inflight import InFlight
from aexec.engine.overlap import Demand, StepLoop, choose_loop, num_stages, share
from aexec.errors import ConfigError, RequestFailed
from aexec.messages.batch import PLACEHOLDER, ModelRunnerOutput, SchedulerOutput
from aexec.messages.request import SamplingParams

pytestmark = pytest.mark.anyio

GREEDY = SamplingParams(max_tokens=12, temperature=0.0)


@pytest.mark.parametrize(
    ("wanted", "stages", "resolves", "loop", "reason"),
    [
        (None, 1, True, (2, True), "resolve placeholders"),
        (True, 1, True, (2, True), "resolve placeholders"),
        (False, 1, True, (1, False), "async_scheduling=False"),
        (None, 4, True, (4, False), "the first of 4 pipeline stages would need tokens that only the last one has"),
        (False, 4, True, (4, False), "async_scheduling=False"),
        (None, 1, False, (1, False), "does not say that it resolves placeholders"),
    ],
)
def test_steps_overlap_where_that_is_possible_and_it_is_said_why_not(wanted, stages, resolves, loop, reason):
    """A pipeline has a step in flight for each stage, and needs the tokens on the host."""
    chosen = choose_loop(wanted, stages=stages, resolves_placeholders=resolves)
    assert chosen[:2] == loop
    assert reason in chosen.reason
    assert chosen.async_scheduling == (loop[1], chosen.reason)


@pytest.mark.parametrize(
    ("stages", "resolves", "reason"),
    [
        (4, True, "the first of 4 pipeline stages would need tokens that only the last one has"),
        (1, False, "the worker class does not say that it resolves placeholders"),
    ],
)
def test_steps_that_must_overlap_and_cannot_are_refused(stages, resolves, reason):
    """True is no wish: it says why it cannot be, and what to write instead."""
    with pytest.raises(ConfigError, match=rf"async_scheduling is True and cannot be: {reason}.*; leave it out"):
        choose_loop(True, stages=stages, resolves_placeholders=resolves)


@pytest.mark.parametrize(("tensor", "pipeline"), [(1, 1), (2, 1), (1, 4), (2, 3), (8, 2)])
def test_the_stages_follow_from_the_output_rank(tensor, pipeline):
    """It is the first rank of the last stage."""
    assert num_stages(tensor * pipeline, tensor * (pipeline - 1)) == pipeline


@pytest.mark.parametrize("overlaps", [False, True])
def test_a_step_is_launched_behind_the_sampling_of_the_one_before(overlaps):
    """Ranks work in order: told to sample later, they would sample after the next forward pass."""
    loop, flights = StepLoop(2, overlaps), InFlight(2, lambda: 0.0)
    assert loop.may_launch(flights)
    flights.take_off(1, SchedulerOutput())
    assert not loop.may_launch(flights)
    flights.launched(1)
    flights.due_samples()
    assert loop.may_launch(flights)
    flights.take_off(2, SchedulerOutput())
    assert not loop.may_launch(flights)


@pytest.mark.parametrize("overlaps", [False, True])
def test_a_step_that_waits_for_its_bitmask_is_not_overtaken(overlaps):
    """Its forward pass runs meanwhile; the next step's would run before its sampling, and delay it by as much."""
    loop, flights = StepLoop(4, overlaps), InFlight(4, lambda: 0.0)
    flights.take_off(1, SchedulerOutput(), frozenset("a"))
    flights.launched(1)
    assert flights.due_samples() == []
    assert not loop.may_launch(flights)
    flights.unmask(1)
    flights.due_samples()
    assert loop.may_launch(flights)


@pytest.mark.parametrize("num_requests", [1, 2, 4, 7, 8, 9, 64])
@pytest.mark.parametrize("depth", [2, 3, 4])
def test_requests_are_dealt_out_so_that_no_stage_stands_still(num_requests, depth):
    """All places are taken as long as there are as many requests, and no step has two more than another."""
    left, shares = num_requests, []
    for place in range(depth):
        if left:
            shares.append(min(left, share(Demand(left, num_requests), depth=depth, num_free=depth - place)))
            left -= shares[-1]
    assert left == 0
    assert len(shares) == min(num_requests, depth)
    assert max(shares) - min(shares) <= 1


def test_requests_that_come_later_do_not_all_join_one_step():
    """A step that lands takes its part of them; the rest waits for the next ones, which are soon."""
    assert share(Demand(num_idle=13, num_all=19), depth=4, num_free=1) == 5
    assert share(Demand(num_idle=0, num_all=0), depth=4, num_free=4) == 1


# ------------------------------------------------------------ the overlapped loop, on an executor that a test holds


async def test_the_next_step_is_launched_before_the_tokens_of_the_last_are_back(engine):
    """It goes on with placeholders, and no third one is launched."""
    async with engine(async_scheduling=True) as (llm, executor):
        executor.hold()
        reader = asyncio.create_task(llm.complete("a", GREEDY))
        await executor.held.wait()
        await anyio.wait_all_tasks_blocked()
        assert [step.payload.cached.new_token_ids for step in executor.steps] == [[], [[PLACEHOLDER]]]
        executor.release()
        assert len((await reader).token_ids) == 12
        assert len(executor.steps) == 12  # how long it will be at most is known
        assert (await llm.statistics()).steps.peak_in_flight == 2


@pytest.mark.parametrize(
    "params",
    [
        GREEDY,
        SamplingParams(max_tokens=30, seed=7),
        SamplingParams(max_tokens=30, seed=8, logprobs=2, prompt_logprobs=1),
        SamplingParams(max_tokens=1, temperature=0.0),
    ],
)
@pytest.mark.parametrize("sizes", [{}, {"max_num_batched_tokens": 7}, {"num_blocks": 24, "block_size": 4}])
async def test_overlapped_steps_give_the_same_tokens(engine, params, sizes):
    """Chunked, preempted or neither."""
    answers = []
    for overlapped in (False, True):
        async with engine(async_scheduling=overlapped, **sizes) as (llm, _):
            assert llm.async_scheduling.is_on is overlapped
            prompts = ([65 + place] * (3 + 2 * place) for place in range(8))
            answers.append(await asyncio.gather(*(llm.complete(prompt, params) for prompt in prompts)))
            blocks = (await llm.statistics()).blocks
            assert blocks.num_free_blocks == blocks.num_blocks
    for normal, overlapped in zip(*answers, strict=True):
        assert (normal.token_ids, normal.text, normal.finish_reason) == (
            overlapped.token_ids, overlapped.text, overlapped.finish_reason,
        )  # fmt: skip
        assert (normal.logprobs, normal.prompt_logprobs) == (overlapped.logprobs, overlapped.prompt_logprobs)


@pytest.mark.parametrize("by", ["token", "text"])
async def test_a_token_behind_a_stop_is_thrown_away(engine, by):
    """The step that samples it was in flight when the stop was found."""
    async with engine(async_scheduling=True) as (llm, executor):
        whole = await llm.complete("x", GREEDY)
        stop = whole.token_ids[5]
        end = whole.token_ids.index(stop) + 1
        how = {"stop_token_ids": (stop,)} if by == "token" else {"stop": (whole.text[end - 1],)}
        before = len(executor.steps)
        cut = await llm.complete("x", SamplingParams(max_tokens=12, temperature=0.0, **how))
        assert (cut.token_ids, cut.finish_reason) == (whole.token_ids[:end], "stop")
        await anyio.wait_all_tasks_blocked()
        assert len(executor.steps) - before == end + 1
        statistics = await llm.statistics()
        assert (statistics.blocks.num_holders, statistics.steps.num_in_flight) == (0, 0)


async def test_an_abort_with_two_steps_in_flight_leaves_the_others_as_they_are(engine):
    """Its id may be used again at once, and its tokens on the way are nobody's."""
    async with engine(async_scheduling=True) as (llm, executor):
        alone = await llm.complete("kept", GREEDY)
        again = await llm.complete("again", GREEDY)
        executor.hold()
        kept = asyncio.create_task(llm.complete("kept", GREEDY))
        gone = asyncio.create_task(llm.complete("gone", GREEDY, request_id="id"))
        await executor.held.wait()
        await anyio.wait_all_tasks_blocked()
        assert await llm.abort("id")
        assert (await gone).token_ids == ()
        second = asyncio.create_task(llm.complete("again", GREEDY, request_id="id"))
        await anyio.wait_all_tasks_blocked()
        executor.release()
        assert [(await kept).token_ids, (await second).token_ids] == [alone.token_ids, again.token_ids]


async def test_a_pause_waits_for_both_steps(engine):
    """Then nothing is in flight, and after it the request goes on where it was."""
    async with engine(async_scheduling=True) as (llm, executor):
        alone = await llm.complete("a", GREEDY)
        executor.hold()
        reader = asyncio.create_task(llm.complete("a", GREEDY))
        await executor.held.wait()
        pausing = asyncio.create_task(llm.pause())
        await anyio.wait_all_tasks_blocked()
        assert not pausing.done()
        executor.release()
        await pausing
        steps = len(executor.steps)
        assert (await llm.statistics()).steps.num_in_flight == 0
        await llm.resume()
        assert (await reader).token_ids == alone.token_ids
        assert len(executor.steps) > steps


async def test_a_request_that_cannot_be_sampled_fails_alone_with_a_step_behind_it(engine):
    """The step behind it goes on with whatever token, and nobody sees what comes of it."""
    async with engine("dummy:poison_token_id=99", async_scheduling=True) as (llm, _):
        alone = await llm.complete("good", GREEDY)
        good, bad = await asyncio.gather(
            llm.complete("good", GREEDY), llm.complete([99], GREEDY), return_exceptions=True
        )
        assert good.token_ids == alone.token_ids
        assert isinstance(bad, RequestFailed)


async def test_a_step_that_fails_ends_its_requests_and_the_step_behind_it_nobody(engine):
    """Who comes after is served; who was only in the step behind computes its tokens again."""
    async with engine(async_scheduling=True, max_num_batched_tokens=8) as (llm, executor):
        alone = await llm.complete([66] * 20, GREEDY)
        outputs = iter([ModelRunnerOutput(request_ids=["?"], sampled_token_ids=[])])
        executor.spoil = lambda output: next(outputs, output)
        results = await asyncio.gather(
            llm.complete([65] * 8, GREEDY), llm.complete([66] * 20, GREEDY), return_exceptions=True
        )
        assert "have lengths [0, 1]" in str(results[0])
        assert results[1].token_ids == alone.token_ids
        assert (await llm.complete([66] * 20, GREEDY)).token_ids == alone.token_ids


async def test_a_step_behind_one_that_failed_is_no_error_of_its_own(engine, monkeypatch):
    """The worker refuses it, as tokens are missing that never came; with no request in it there is nothing to report."""
    async with engine(async_scheduling=True) as (llm, executor):
        executor.hold()
        with structlog.testing.capture_logs() as lines:
            reader = asyncio.create_task(llm.complete("a", GREEDY))
            await executor.held.wait()
            await anyio.wait_all_tasks_blocked()
            monkeypatch.setattr(executor.runner, "sample_tokens", refuse)
            executor.release()
            with pytest.raises(RequestFailed):
                await reader
            await llm.statistics()
        failures = [(line["log_level"], line["num_requests"]) for line in lines if line["event"] == "a step failed"]
        assert failures == [("error", 1), ("debug", 0)]


def refuse(*_):
    raise RequestFailed("it cannot be sampled")


async def test_the_driver_says_how_steps_follow_each_other(engine):
    """In its statistics and its repr."""
    async with engine(async_scheduling=True) as (llm, executor):
        executor.hold()
        reader = asyncio.create_task(llm.complete("a", GREEDY))
        await executor.held.wait()
        await anyio.wait_all_tasks_blocked()
        statistics = await llm.statistics()
        assert (statistics.async_scheduling, statistics.steps.depth) == (llm.async_scheduling, 2)
        assert "step 2 the last of 2 in flight" in repr(llm._frontend.driver._cell.actor)
        executor.release()
        await reader
