"""Pause, sleep and new weights of an engine on the real ``uni`` executor, with the dummy model runner (G55, G56)."""

from __future__ import annotations

import asyncio

import anyio
import pytest

from aexec import LLM, AsyncLLM, SamplingParams, open_executor
from aexec.config import ExecutorConfig
from aexec.errors import ConfigError, ModelNotReady, UnknownMethod, WeightsMismatch

pytestmark = pytest.mark.anyio

GREEDY = SamplingParams(max_tokens=16, temperature=0.0)
PROMPT = [72, 101, 108]


async def said(model: str, prompt=PROMPT, params=GREEDY) -> tuple[int, ...]:
    async with AsyncLLM(model) as llm:
        return (await llm.complete(prompt, params)).token_ids


async def test_new_weights_say_what_a_fresh_start_says():
    """The same engine, another model; then the old one again."""
    async with AsyncLLM("dummy") as llm:
        before = (await llm.complete(PROMPT, GREEDY)).token_ids
        report = await llm.update_weights({"seed": 7})
        assert (report.applied, report.version) == (("seed",), 2)
        assert (await llm.complete(PROMPT, GREEDY)).token_ids == await said("dummy:seed=7") != before
        assert (await llm.load_weights()).version == 3
        assert (await llm.complete(PROMPT, GREEDY)).token_ids == before


async def test_requests_in_the_middle_go_on_with_the_new_weights():
    """What was said stays; what follows is what the new model says after it."""
    async with AsyncLLM("dummy:forward_seconds=0.002") as llm:
        async with llm.generate(PROMPT, GREEDY) as stream:
            tokens = list((await anext(stream)).token_ids)
            await llm.pause("keep")
            await llm.update_weights([("seed", 7)])
            await llm.resume()
            statistics = await llm.statistics()
            async for chunk in stream:
                tokens += chunk.token_ids
        assert statistics.num_preemptions == 1
    assert len(tokens) == 16
    # The first tokens are the old model's: how many depends on when the pause came.
    old, new = await said("dummy"), "dummy:seed=7"
    for cut in range(1, 16):
        rest = SamplingParams(max_tokens=16 - cut, temperature=0.0)
        if tokens == [*old[:cut], *await said(new, [*PROMPT, *old[:cut]], rest)]:
            return
    raise AssertionError(f"{tokens} is no sequence of one model and then the other")


async def test_a_paused_engine_runs_no_step():
    """Requests that come meanwhile wait, and end after the resume."""
    async with AsyncLLM("dummy") as llm:
        await llm.pause()
        task = asyncio.create_task(llm.complete(PROMPT, GREEDY))
        await anyio.wait_all_tasks_blocked()
        assert (await llm.statistics()).num_steps == 0
        assert "held by pause" in repr(llm._frontend.driver) or (await llm.statistics()).num_waiting == 1
        await llm.resume()
        assert len((await task).token_ids) == 16


async def test_finish_lets_those_that_run_end():
    """And nobody else begins."""
    async with AsyncLLM("dummy:forward_seconds=0.001", max_num_seqs=1) as llm:
        first = llm.generate(PROMPT, GREEDY)
        await anext(first)
        second = asyncio.create_task(llm.complete(PROMPT, GREEDY))
        await llm.pause("finish")
        assert (await llm.statistics()).num_finished == 1
        assert not second.done()
        await llm.resume()
        assert len((await second).token_ids) == 16
        await first.aclose()


async def test_abort_ends_all():
    """With the finish reason ``abort``, those that wait too."""
    async with AsyncLLM("dummy:forward_seconds=0.001", max_num_seqs=1) as llm:
        first = llm.generate(PROMPT, GREEDY)
        await anext(first)
        waits = asyncio.create_task(llm.complete(PROMPT, GREEDY))
        await llm.statistics()
        await llm.pause("abort")
        assert [chunk.finish_reason async for chunk in first][-1] == "abort"
        assert (await waits).finish_reason == "abort"
        await llm.resume()
        assert (await llm.complete(PROMPT, GREEDY)).finish_reason == "length"


async def test_there_are_three_modes():
    """Another one is refused by name."""
    async with AsyncLLM("dummy") as llm:
        with pytest.raises(ConfigError, match="mode of pause is 'wait': expected one of abort, finish, keep"):
            await llm.pause("wait")


@pytest.mark.parametrize("level", [1, 2])
async def test_requests_wait_for_the_model_to_wake(level):
    """Asleep, partly awake, or without weights nothing runs and nothing fails; then all ends as if nothing had been."""
    async with AsyncLLM("dummy") as llm:
        before = (await llm.complete(PROMPT, GREEDY)).token_ids
        (report,) = await llm.sleep(level)
        assert report.level == level
        task = asyncio.create_task(llm.complete(PROMPT, GREEDY))
        await llm.wake_up(["weights"])
        if level == 2:
            await llm.update_weights({"seed": 0})
        await anyio.wait_all_tasks_blocked()
        assert not task.done()
        (woken,) = await llm.wake_up("kv_cache")
        assert woken.is_ready
        assert (await task).token_ids == before


async def test_a_refused_update_leaves_the_engine_as_it_was():
    """Names that no rank knows: the error says that the weights are what they were, and requests go on."""
    async with AsyncLLM("dummy") as llm:
        before = (await llm.complete(PROMPT, GREEDY)).token_ids
        with pytest.raises(WeightsMismatch, match="no weight named sed") as caught:
            await llm.update_weights({"sed": 7})
        assert "the weights are what they were" in caught.value.__notes__
        assert (await llm.complete(PROMPT, GREEDY)).token_ids == before


@pytest.mark.parametrize("weights", [7, "seed", [("seed",)], ["seed", 7], {7: 7}], ids=repr)
async def test_weights_of_another_kind_are_refused_by_what_was_expected(weights):
    """What holds no names with tensors is said to, and nothing has changed."""
    async with AsyncLLM("dummy") as llm:
        with pytest.raises(ConfigError, match=r"weights (are|is) .*: expected full tensors by their names") as caught:
            await llm.update_weights(weights)
        assert "the weights are what they were" in caught.value.__notes__


async def test_an_empty_update_is_no_update():
    """What is missing is named."""
    async with AsyncLLM("dummy") as llm:
        with pytest.raises(WeightsMismatch, match="still missing: seed"):
            await llm.update_weights(iter([]))


async def test_sleeping_weights_take_no_update():
    """The refusal says what to do first."""
    async with AsyncLLM("dummy") as llm:
        await llm.sleep(1)
        with pytest.raises(ModelNotReady, match=r"call wake_up\(\['weights'\]\)"):
            await llm.update_weights({"seed": 7})


async def test_a_worker_without_operations_is_told_from_one_that_has_them():
    """The error names the worker class; nothing was sent."""
    async with open_executor(ExecutorConfig(worker_cls="aexec.testing.workers:ProbeWorker")) as executor:
        with pytest.raises(UnknownMethod, match="has no method 'start_weight_update'"):
            await executor.collective_rpc("start_weight_update")


def test_the_blocking_engine_has_them_as_well():
    """The RL loop without await."""
    with LLM("dummy") as llm:
        (before,) = llm.generate("Hello", GREEDY)
        llm.sleep(1)
        llm.wake_up()
        assert llm.generate("Hello", GREEDY)[0].token_ids == before.token_ids
        llm.update_weights({"seed": 7})
        assert llm.generate("Hello", GREEDY)[0].token_ids != before.token_ids
        llm.load_weights()
        assert llm.generate("Hello", GREEDY)[0].token_ids == before.token_ids
        assert llm.collective_rpc("residency")[0].is_ready
