"""An engine on real processes that die: what becomes of requests, of operations, and of the engine itself."""

from __future__ import annotations

import asyncio
import os
import signal
import time

import anyio
import pytest

from aexec import AsyncLLM, ExecutorConfig, ParallelConfig, Restart, SamplingParams, open_executor
from aexec.config import CacheConfig, ModelConfig
from aexec.engine.events import EngineFailed, EngineRecovered
from aexec.errors import CallTimeout, ExecutorUnavailable, ModelNotReady, RequestAborted, WorkerDied
from aexec.testing.processes import ProcessWatch

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("no_files_are_left")]

GREEDY = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
SLOW = "dummy:forward_seconds=0.005"
OFTEN = Restart(max_restarts=50, within=1.0, backoff=0.0)


def opened(model=SLOW, on_failure=OFTEN, **settings):
    return AsyncLLM(model, executor="mp", tensor_parallel_size=2, on_failure=on_failure, **settings)


def kill(llm, rank=1):
    os.kill(llm.executor.ranks[rank].pid, signal.SIGKILL)


async def begun(llm, prompt=(70, 71)):
    """A stream, what it has said, and that it says more."""
    stream = llm.generate(list(prompt), GREEDY)
    return stream, list((await anext(stream)).token_ids)


async def rest_of(stream, tokens):
    async for chunk in stream:
        tokens += chunk.token_ids
    return tuple(tokens)


async def recovered(events):
    async for event in events:
        if isinstance(event, EngineRecovered):
            return event
    raise AssertionError("the engine was closed")


async def test_the_budget_is_the_executors():
    """One crash more than it allows: every stream ends with the last death and why it is final, and so do new ones."""
    async with opened(on_failure=Restart(max_restarts=1, within=60.0, backoff=0.0)) as llm:
        events = llm.events()
        tasks = [asyncio.create_task(llm.complete([70, place], GREEDY)) for place in range(4)]
        kill(llm)
        await recovered(events)
        kill(llm)
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert [type(result) for result in results] == [WorkerDied] * 4
        for result in results:
            assert any("the one restart allowed within 60 s is used up" in line for line in result.__notes__)
        with pytest.raises(WorkerDied):
            await llm.complete([70], GREEDY)
        failed = await anext(events)
        assert isinstance(failed, EngineFailed)
        assert failed.num_requests == 4
    assert [event async for event in events] == []


async def test_without_a_budget_the_first_death_is_the_last():
    """``on_failure="fail"``: the streams end at once."""
    async with opened(on_failure="fail") as llm:
        _, began = await begun(llm), time.monotonic()
        task = asyncio.create_task(llm.complete([70], GREEDY))
        kill(llm)
        with pytest.raises(WorkerDied):
            await task
        assert time.monotonic() - began < 2.0


async def test_a_close_ends_a_rebuild():
    """Streams end with the word for it, in the time that a close may take, and no process is left."""
    async with opened() as llm:
        stream, _ = await begun(llm)
        events = llm.events()
        with ProcessWatch(rank.pid for rank in llm.executor.ranks) as watch:
            kill(llm)
            await anext(events)
            began = time.monotonic()
            await llm.aclose()
            assert time.monotonic() - began < 5.0
            assert await asyncio.to_thread(watch.alive, 5.0) == []
        with pytest.raises(RequestAborted):
            await rest_of(stream, [])


async def test_an_update_that_workers_die_in_has_not_happened():
    """It says so; requests go on with what the model's files say, and the update works when it is repeated."""
    async with opened() as llm:
        undisturbed = (await llm.complete([70, 71], GREEDY)).token_ids
        stream, tokens = await begun(llm)

        def weights():
            kill(llm)
            yield "seed", 7

        with pytest.raises((WorkerDied, ExecutorUnavailable)) as caught:
            await llm.update_weights(weights())
        assert any("have the weights of the model's files" in line for line in caught.value.__notes__)
        assert await rest_of(stream, tokens) == undisturbed
        await llm.update_weights({"seed": 7})
        assert (await llm.complete([70, 71], GREEDY)).token_ids != undisturbed


async def test_weights_of_an_update_are_missed_after_a_crash():
    """No stream goes on with other weights than it had; ``update_weights`` makes it good."""
    async with opened() as llm:
        events = llm.events()
        await llm.update_weights({"seed": 7})
        undisturbed = (await llm.complete([70, 71], GREEDY)).token_ids
        stream, tokens = await begun(llm)
        kill(llm)
        with pytest.raises(ModelNotReady, match="hold the weights of the model's files"):
            await rest_of(stream, tokens)
        await recovered(events)
        await llm.update_weights({"seed": 7})
        assert (await llm.complete([70, 71], GREEDY)).token_ids == undisturbed


async def test_workers_that_die_on_their_way_to_sleep_wake_up():
    """The sleep has failed and says so; requests go on."""
    async with opened() as llm:
        undisturbed = (await llm.complete([70, 71], GREEDY)).token_ids
        stream, tokens = await begun(llm)
        os.kill(llm.executor.ranks[1].pid, signal.SIGSTOP)
        sleeping = asyncio.create_task(llm.sleep())
        await anyio.sleep(0.05)
        kill(llm)
        with pytest.raises((WorkerDied, ExecutorUnavailable)) as caught:
            await sleeping
        assert any("are awake" in line for line in caught.value.__notes__)
        assert await rest_of(stream, tokens) == undisturbed


async def test_workers_that_die_asleep_are_waited_for_until_the_wake_up():
    """What is rebuilt is awake, but nobody has said that requests may go on."""
    async with opened() as llm:
        undisturbed = (await llm.complete([70, 71], GREEDY)).token_ids
        stream, tokens = await begun(llm)
        await llm.sleep()
        events = llm.events()
        kill(llm)
        await recovered(events)
        assert (await llm.statistics()).held_by == ("sleep",)
        await llm.wake_up()
        assert await rest_of(stream, tokens) == undisturbed


async def test_a_worker_that_hangs_is_a_worker_that_is_lost():
    """With ``on_timeout="fail_executor"`` a step past its limit costs the group, not the requests."""
    config = ExecutorConfig(
        backend="mp",
        parallel=ParallelConfig(tensor_parallel_size=2),
        step_timeout=0.5,
        on_timeout="fail_executor",
        on_failure=OFTEN,
        close_grace=0.2,
        term_grace=0.2,
    )
    async with AsyncLLM(SLOW, executor=config) as llm:
        undisturbed = (await llm.complete([70, 71], GREEDY)).token_ids
        stream, tokens = await begun(llm)
        os.kill(llm.executor.ranks[1].pid, signal.SIGSTOP)
        assert await rest_of(stream, tokens) == undisturbed
        figures = (await llm.statistics()).recovery
        assert (figures.num_outages, figures.state) == (1, "up")


async def test_an_engine_recovers_on_an_executor_that_is_not_its_own():
    """Whoever opened it has set the budget; engines come and go on it."""
    kwargs = {"model_config": ModelConfig(model=SLOW), "cache_config": CacheConfig(num_blocks=64)}
    config = ExecutorConfig(backend="mp", worker_kwargs=kwargs, on_failure=OFTEN)
    async with open_executor(config) as executor:
        for _ in range(2):
            async with AsyncLLM(SLOW, executor=executor) as llm:
                undisturbed = (await llm.complete([70, 71], GREEDY)).token_ids
                stream, tokens = await begun(llm)
                os.kill(executor.ranks[0].pid, signal.SIGKILL)
                assert await rest_of(stream, tokens) == undisturbed


async def test_a_drain_with_a_limit_says_what_runs_still():
    """And goes on draining."""
    async with opened() as llm:
        stream, tokens = await begun(llm)
        with pytest.raises(CallTimeout) as caught:
            await llm.drain(timeout=0.01)
        assert any("1 request(s) run still" in line for line in caught.value.__notes__)
        assert len(await rest_of(stream, tokens)) == 40
        await llm.drain()
