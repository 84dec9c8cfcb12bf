"""The step loop: requests come and go between its phases, and every stream ends once."""

from __future__ import annotations

import asyncio

import anyio
import pytest

from aexec.engine.calls import Abort
from aexec.errors import (
    EngineDraining,
    InvalidRequest,
    ProtocolError,
    QueueFull,
    RequestAborted,
    RequestFailed,
    WorkerDied,
)
from aexec.messages.batch import ModelRunnerOutput
from aexec.messages.request import SamplingParams
from aexec.messages.step import StepResult

pytestmark = pytest.mark.anyio

GREEDY = SamplingParams(max_tokens=12, temperature=0.0)


async def test_requests_that_come_together_share_their_first_step(engine):
    """Whatever is in the mailbox when the loop starts is in the first batch."""
    async with engine() as (llm, executor):
        await asyncio.gather(*(llm.complete([65, number], GREEDY) for number in range(8)))
        assert len(executor.steps[0].payload.new) == 8
        assert len(executor.steps) == 12


async def test_a_request_that_comes_during_a_step_is_in_the_next(engine):
    """Nobody waits for others to finish."""
    async with engine() as (llm, executor):
        executor.hold()
        first = asyncio.create_task(llm.complete("first", GREEDY))
        await executor.held.wait()
        second = asyncio.create_task(llm.complete("second", GREEDY))
        await anyio.wait_all_tasks_blocked()
        executor.release()
        await asyncio.gather(first, second)
        assert [len(step.payload.new) for step in executor.steps[:2]] == [1, 1]


async def test_a_refusal_says_nothing_of_actors(engine):
    """Whose request it is can mend it, and knows no driver."""
    async with engine(max_num_waiting=1) as (llm, executor):
        executor.hold()
        refusals = []
        for prompt, params in (([99_999_999], GREEDY), ("a", SamplingParams(n=2))):
            with pytest.raises((InvalidRequest, QueueFull)) as caught:
                await llm.complete(prompt, params)
            refusals.append(caught.value)
        executor.release()
        await llm.drain()
        with pytest.raises(EngineDraining) as caught:
            await llm.complete("a", GREEDY)
        refusals.append(caught.value)
        assert [type(each) for each in refusals] == [InvalidRequest, QueueFull, EngineDraining]
        assert [getattr(each, "__notes__", []) for each in refusals] == [[], [], []]


async def test_an_idle_driver_does_nothing(engine):
    """Without requests no step runs and no message is handled."""
    async with engine() as (llm, executor):
        await llm.complete("a", GREEDY)
        steps, handled = len(executor.steps), llm._frontend.driver.statistics().handled
        await anyio.wait_all_tasks_blocked()
        await anyio.sleep(0.02)
        assert (len(executor.steps), llm._frontend.driver.statistics().handled) == (steps, handled)


async def test_steps_are_numbered_and_say_how_many_tokens_they_run(engine):
    """Ids increase by one; ``num_tokens`` is what the batch holds."""
    async with engine(max_num_batched_tokens=8) as (llm, executor):
        await llm.complete([65] * 20, SamplingParams(max_tokens=2, temperature=0.0))
        assert [(step.step, step.num_tokens) for step in executor.steps] == [(1, 8), (2, 8), (3, 4), (4, 1)]


async def test_an_abort_during_a_step_frees_the_blocks_before_the_step_ends(engine):
    """The other request goes on, and its tokens are those that it has alone."""
    async with engine() as (llm, executor):
        alone = await llm.complete("kept", GREEDY)
        executor.hold()
        kept = asyncio.create_task(llm.complete("kept", GREEDY))
        gone = llm.generate("gone", GREEDY, request_id="gone")
        reader = asyncio.create_task(anext(gone))
        await executor.held.wait()
        assert await llm.abort("gone")
        assert (await llm.statistics()).blocks.num_holders == 1
        assert (await reader).finish_reason == "abort"
        executor.release()
        assert (await kept).token_ids == alone.token_ids
        assert not await llm.abort("gone")


async def test_an_aborted_stream_keeps_what_it_had(engine):
    """The last chunk says ``abort``, and brings the text that was held back for a stop text."""
    async with engine() as (llm, executor):
        whole = (await llm.complete("x", GREEDY)).text
        stream = llm.generate("x", SamplingParams(max_tokens=12, temperature=0.0, stop=(whole[:3] + "\x00",)))
        executor.hold()
        reader = asyncio.create_task(anext(stream))
        await executor.held.wait()
        executor.release()
        first = await reader
        assert first.text == ""
        executor.hold()
        await executor.held.wait()
        assert await llm.abort(stream.request_id)
        last = await anext(stream)
        assert (last.finish_reason, whole.startswith(last.text), last.text != "") == ("abort", True, True)
        executor.release()


async def test_a_failing_executor_ends_every_stream_with_its_error(engine):
    """Each reader gets an error object of its own, and the driver serves the next request."""
    async with engine(max_num_seqs=2) as (llm, executor):
        executor.fail_sample = WorkerDied(0, 4711, signal="SIGKILL", phase="sample_tokens")
        results = await asyncio.gather(*(llm.complete("a", GREEDY) for _ in range(5)), return_exceptions=True)
        assert {type(result) for result in results} == {WorkerDied}
        assert {str(result) for result in results} == {str(executor.fail_sample)}
        assert len({id(result) for result in results}) == 5
        executor.fail_sample = None
        executor.runner._launched.clear()
        statistics = await llm.statistics()
        assert (statistics.num_running, statistics.num_waiting, statistics.blocks.num_holders) == (0, 0, 0)
        assert (await llm.complete("a", GREEDY)).finish_reason == "length"


async def test_an_executor_that_fails_to_launch_is_reported_the_same_way(engine):
    """The first phase or the second: it makes no difference to who waits."""
    async with engine() as (llm, executor):
        executor.fail_execute = WorkerDied(0, 4711, exit_code=1)
        with pytest.raises(WorkerDied, match="pid 4711"):
            await llm.complete("a", GREEDY)


@pytest.mark.parametrize("output", [None, "words", ModelRunnerOutput(request_ids=["request-1"], sampled_token_ids=[])])
async def test_an_output_that_makes_no_sense_ends_the_streams_and_hangs_none(engine, output):
    """A worker class of somebody's own may return anything."""
    async with engine() as (llm, executor):
        executor.spoil = lambda _: output
        with pytest.raises((ProtocolError, IndexError)):
            await llm.complete("a", GREEDY)


async def test_a_fault_of_the_scheduler_ends_the_streams_and_hangs_none(engine, monkeypatch):
    """Ours or not: who waits is told, and nobody shares what may never have been computed."""
    async with engine() as (llm, executor):
        executor.hold()
        reader = asyncio.create_task(llm.complete([5] * 40, GREEDY))
        await executor.held.wait()
        monkeypatch.setattr(llm._frontend.driver._cell.actor._scheduler, "schedule", lambda **_: 1 // 0)
        executor.release()
        with pytest.raises(ZeroDivisionError):
            await reader
        assert (await llm.statistics()).scheduler.prefix.num_cached_blocks == 0


async def test_an_error_of_one_request_fails_that_request_only(engine):
    """The others have the tokens that they have alone."""
    async with engine("dummy:poison_token_id=99") as (llm, _executor):
        alone = await llm.complete("good", GREEDY)
        good, bad = await asyncio.gather(
            llm.complete("good", GREEDY), llm.complete([99], GREEDY), return_exceptions=True
        )
        assert good.token_ids == alone.token_ids
        assert isinstance(bad, RequestFailed)
        assert "request request-3 failed: the prompt holds token 99" in str(bad)


async def test_a_step_that_runs_whole_needs_no_sampling(engine):
    """An executor may answer the first phase with the result."""
    async with engine() as (llm, executor):
        launch = executor.execute_model

        async def whole(step):
            await launch(step)
            return StepResult(step.step, executor.runner.sample_tokens(None))

        executor.execute_model = whole
        executor.sample_tokens = None
        assert len((await llm.complete("a", GREEDY)).token_ids) == 12


async def test_a_stop_text_ends_a_request_and_is_not_shown(engine):
    """The text ends before it, the reason names it, the tokens include the one that completed it."""
    async with engine() as (llm, _executor):
        whole = (await llm.complete("x", GREEDY)).text
        stop = whole[4:7]
        cut = await llm.complete("x", SamplingParams(max_tokens=12, temperature=0.0, stop=("\x00", stop)))
        at = whole.index(stop)
        assert (cut.text, cut.finish_reason, cut.stop_reason) == (whole[:at], "stop", stop)
        assert len(cut.token_ids) == at + 3
        assert (await llm.statistics()).blocks.num_holders == 0


async def test_a_stop_token_ends_a_request_and_is_its_last_token(engine):
    """The reason is the token's id."""
    async with engine() as (llm, _executor):
        tokens = (await llm.complete("x", GREEDY)).token_ids
        stop = tokens[5]
        cut = await llm.complete("x", SamplingParams(max_tokens=12, temperature=0.0, stop_token_ids=(stop,)))
        assert cut.token_ids == tokens[: tokens.index(stop) + 1]
        assert (cut.finish_reason, cut.stop_reason) == ("stop", stop)


async def test_prompt_logprobs_come_with_the_first_chunk(engine):
    """One entry per prompt token, None for the first, whatever the chunks of the prefill were."""
    async with engine(max_num_batched_tokens=4) as (llm, _executor):
        params = SamplingParams(max_tokens=3, temperature=0.0, prompt_logprobs=1, logprobs=2)
        chunks = [chunk async for chunk in llm.generate([65 + place for place in range(11)], params)]
        first, *others = chunks
        assert [entry and entry.token_id for entry in first.prompt_logprobs] == [None, *range(66, 76)]
        assert all(chunk.prompt_logprobs is None for chunk in others)
        assert [len(chunk.logprobs) for chunk in chunks] == [1, 1, 1]
        assert all(len(entry.top) == 2 for chunk in chunks for entry in chunk.logprobs)


async def test_a_full_queue_turns_a_request_away_and_leaves_the_others(engine):
    """The error comes at the first chunk, and is retryable by its type."""
    async with engine(max_num_seqs=1, max_num_waiting=1) as (llm, executor):
        executor.hold()
        kept = [asyncio.create_task(llm.complete("a", GREEDY))]
        await executor.held.wait()
        kept.append(asyncio.create_task(llm.complete("b", GREEDY)))
        await anyio.wait_all_tasks_blocked()
        with pytest.raises(QueueFull):
            await llm.complete("c", GREEDY)
        executor.release()
        assert [len(each.token_ids) for each in await asyncio.gather(*kept)] == [12, 12]


async def test_an_id_in_use_is_refused_and_its_owner_goes_on(engine):
    """The refused request's end does not abort the other."""
    async with engine() as (llm, executor):
        executor.hold()
        owner = asyncio.create_task(llm.complete("a", GREEDY, request_id="mine"))
        await executor.held.wait()
        with pytest.raises(InvalidRequest, match="request id 'mine' is in use"):
            await llm.complete("b", GREEDY, request_id="mine")
        executor.release()
        assert len((await owner).token_ids) == 12


async def test_closing_the_engine_ends_its_streams(engine):
    """The reader is told why."""
    async with engine() as (llm, executor):
        executor.hold()
        reader = asyncio.create_task(llm.complete("a", GREEDY))
        await executor.held.wait()
        closing = asyncio.create_task(llm.aclose())
        with pytest.raises(RequestAborted, match=r"request request-1 was aborted: the engine ended"):
            await reader
        executor.release()
        await closing


async def test_a_reader_who_left_while_the_mailbox_was_full_is_noticed_at_the_next_token(engine):
    """Its Abort found no room; its request ends all the same."""
    async with engine() as (llm, executor):
        executor.hold()
        stream = llm.generate("a", SamplingParams(max_tokens=500, temperature=0.0))
        reader = asyncio.create_task(anext(stream))
        await executor.held.wait()
        driver = llm._frontend.driver
        for _ in range(driver.statistics().mailbox.bound):
            driver.tell_nowait(Abort(request_id="nobody"))
        reader.cancel()
        await asyncio.wait([reader])
        executor.release()
        await anyio.wait_all_tasks_blocked()
        assert (await llm.statistics()).num_running == 0
        assert len(executor.steps) < 5


async def test_a_driver_prints_what_it_does(engine):
    """The repr tells the step and what the scheduler holds."""
    async with engine() as (llm, _executor):
        await llm.complete("a", GREEDY)
        actor = llm._frontend.driver._cell.actor
        assert (
            repr(actor) == "<EngineDriver: step 12 idle, <Scheduler: 0 running, 0 waiting, 12 steps, 0 preemption(s)>>"
        )
