"""Stages of the dummy model, as threads of one process: who hands what to whom, and when."""

from __future__ import annotations

import asyncio
import dataclasses
import random
import time

import pytest

from aexec import ExecuteModel, ExecutorConfig, ParallelConfig, open_executor
from aexec.config import CacheConfig, ModelConfig
from aexec.errors import AexecError, ConfigError, PeerLost, ProtocolError
from aexec.messages.batch import CachedRequestData, NewRequestData, SchedulerOutput
from aexec.messages.request import SamplingParams
from aexec.testing.ranks import ThreadGroup
from aexec.worker.context import place_worker
from aexec.worker.pipeline import RankPipeline

pytestmark = pytest.mark.anyio

GREEDY = SamplingParams(temperature=0.0)


def open_stages(pipeline=2, tensor=1, model="dummy", **settings):
    kwargs = {"model_config": ModelConfig(model=model), "cache_config": CacheConfig(num_blocks=64)}
    layout = ParallelConfig(tensor_parallel_size=tensor, pipeline_parallel_size=pipeline)
    backend = ThreadGroup if layout.world_size > 1 else "uni"
    return open_executor(ExecutorConfig(backend=backend, parallel=layout, worker_kwargs=kwargs, **settings))


def prompt(number, crash=False):
    """A request of three tokens, in a block of its own."""
    request = NewRequestData(
        request_id=f"r{number}",
        token_ids=[1, 2, 99 if crash else 3],
        num_prompt_tokens=3,
        block_ids=[number],
        num_computed_tokens=0,
        sampling=GREEDY,
    )
    return SchedulerOutput(new=[request], num_scheduled_tokens={f"r{number}": 3})


def decode(number, token, computed):
    cached = CachedRequestData(
        request_ids=[f"r{number}"], new_token_ids=[[token]], new_block_ids=[[]], num_computed_tokens=[computed]
    )
    return SchedulerOutput(cached=cached, num_scheduled_tokens={f"r{number}": 1})


async def run(executor, step, batch):
    await executor.execute_model(ExecuteModel(step, batch, batch.total_num_scheduled_tokens))
    return (await executor.sample_tokens(step)).output


async def piped(executor, steps, in_flight):
    """Run a prompt in each step, several at a time, each sampling asked for right behind its step; the outputs."""
    room = asyncio.Semaphore(in_flight)

    async def sampled(step):
        try:
            return (await executor.sample_tokens(step)).output
        finally:
            room.release()

    asked = []
    for step in range(1, steps + 1):
        await room.acquire()
        asked.append(asyncio.ensure_future(executor.execute_model(ExecuteModel(step, prompt(step), 3))))
        await asyncio.sleep(0)
        asked.append(asyncio.ensure_future(sampled(step)))
    return (await asyncio.gather(*asked))[1::2]


async def tokens_of(executor, count=6):
    """One request's tokens, step by step."""
    tokens = [(await run(executor, 1, prompt(1))).sampled_token_ids[0][0]]
    for step in range(2, count + 1):
        tokens.append((await run(executor, step, decode(1, tokens[-1], step + 1))).sampled_token_ids[0][0])
    return tokens


@pytest.mark.parametrize(("pipeline", "tensor"), [(2, 1), (4, 1), (2, 2), (1, 2)])
async def test_stages_say_what_one_process_says(pipeline, tensor):
    """Token for token, with the tokens of each step told to all ranks by the next one."""
    async with open_stages(1) as alone, open_stages(pipeline, tensor) as executor:
        assert await tokens_of(executor) == await tokens_of(alone)


async def test_only_the_output_rank_keeps_something_to_sample():
    """The other ranks of the last stage drop their logits, and no stage before it has any."""
    async with open_stages(2, 2) as executor:
        await executor.execute_model(ExecuteModel(1, prompt(1), 3))
        launched = await executor.collective_rpc(lambda worker: worker.runner.statistics().launched)
        assert launched == [0, 0, 1, 0]
        await executor.sample_tokens(1)
        sampled = await executor.collective_rpc(lambda worker: worker.runner.statistics().sampled)
        assert sampled == [0, 0, 1, 0]


async def test_hidden_states_do_not_go_through_the_driver():
    """They are counted at both ends of each link."""
    async with open_stages(3) as executor:
        await tokens_of(executor, 4)
        figures = await executor.collective_rpc("pipeline_statistics")
        assert [(each.received, each.sent) for each in figures] == [(0, 4), (4, 4), (4, 0)]


async def test_several_steps_are_under_way_at_a_time():
    """G61: four stages of 10 ms give nearly four times the rate of one after the other."""
    steps = 40
    async with open_stages(4, model="dummy:forward_seconds=0.04") as executor:
        begun = time.monotonic()
        outputs = await piped(executor, steps, in_flight=5)
        rate = steps / (time.monotonic() - begun)
        assert [output.request_ids for output in outputs] == [[f"r{step}"] for step in range(1, steps + 1)]
        assert rate > 45  # one step at a time would be 25 a second, the ideal is 93
        bubbles = [each.wait_seconds for each in await executor.collective_rpc("pipeline_statistics")]
        assert bubbles[0] == 0.0 < bubbles[1] < bubbles[3]


async def test_results_keep_their_steps_whatever_is_cancelled():
    """G60: three stages, steps sampled while others run, some askers gone: each step has its own tokens."""
    draw = random.Random(7)
    async with open_stages(3, model="dummy:forward_seconds=0.003") as executor:

        async def one(step):
            await executor.execute_model(ExecuteModel(step, prompt(step), 3))
            asked = asyncio.ensure_future(executor.sample_tokens(step))
            if draw.random() < 0.3:  # once it is on its way: a step that is never asked for holds up the others
                await asyncio.wait([asked], timeout=0.002)
                asked.cancel()
            return asked

        asked = [await one(step) for step in range(1, 41)]
        for step, outcome in enumerate(await asyncio.gather(*asked, return_exceptions=True), 1):
            if not isinstance(outcome, asyncio.CancelledError):
                assert (outcome.step, outcome.output.request_ids) == (step, [f"r{step}"])
        figures = await executor.collective_rpc("pipeline_statistics")
        assert figures[2].received == 40


async def test_a_step_that_fails_on_one_stage_fails_on_all_and_the_next_one_runs():
    """The stages after are told; nobody waits for hidden states that will never come."""
    async with open_stages(3, model="dummy:crash_token_id=99") as executor:
        await executor.execute_model(ExecuteModel(1, prompt(1, crash=True), 3))
        with pytest.raises((AexecError, RuntimeError), match=r"crashes the dummy|it failed at this step"):
            await executor.sample_tokens(1)
        assert (await run(executor, 2, prompt(2))).request_ids == ["r2"]


async def test_stages_that_disagree_about_a_step_find_out():
    """G60: a stage that got another batch under the same step refuses the hidden states."""
    async with open_stages(2) as executor:
        await run(executor, 1, prompt(1))

        def forge(worker):
            worker.runner.execute_stage = lambda batch, incoming=None: 12345

        await executor.collective_rpc(forge, ranks=[0])
        with pytest.raises(ProtocolError, match=r"stage 1 got the hidden states 12345: expected \d+"):
            await run(executor, 2, prompt(2))


async def test_a_step_without_tokens_passes_all_stages_by_themselves():
    """Nothing is handed on, and every stage forgets what has finished."""
    async with open_stages(2) as executor:
        await run(executor, 1, prompt(1))
        result = await executor.execute_model(ExecuteModel(2, SchedulerOutput(finished_request_ids=["r1"]), 0))
        assert result.output.request_ids == []
        assert await executor.collective_rpc(lambda worker: worker.runner.statistics().live_requests) == [0, 0]
        assert (await executor.collective_rpc("pipeline_statistics"))[0].sent == 1


async def test_all_ranks_hold_as_many_blocks_as_the_least_of_them_can():
    """Memory is asked of every rank, and the least goes to all."""
    kwargs = {"model_config": ModelConfig(model="dummy"), "cache_config": CacheConfig(memory_bytes=128 * 10)}
    layout = ParallelConfig(pipeline_parallel_size=2)
    async with open_executor(ExecutorConfig(backend=ThreadGroup, parallel=layout, worker_kwargs=kwargs)) as executor:
        infos = await executor.collective_rpc("model_info")
        assert [info.num_blocks for info in infos] == [10, 10]


async def test_a_backend_without_a_place_to_meet_is_named(monkeypatch):
    """Stages cannot find each other, and the error says what the backend has to set."""
    place = ThreadGroup._place

    def nowhere(self, rank):
        return dataclasses.replace(place(self, rank), distributed_init_method="")

    monkeypatch.setattr(ThreadGroup, "_place", nowhere)
    with pytest.raises(ConfigError, match=r"cannot meet at '': expected file:///path"):
        await open_stages(2)


def test_what_a_stage_raises_is_told_though_the_stage_after_is_gone(monkeypatch):
    """The cause, not what followed from it."""

    class Stage:
        def __getattr__(self, name):
            def fail(*_):
                raise PeerLost(0, 1, "send", "gone") if name == "send_failure" else ValueError("the cause")

            return fail

        def blank_hidden(self, num_tokens):
            return num_tokens

    config = ExecutorConfig(parallel=ParallelConfig(pipeline_parallel_size=2))
    context = place_worker(0, config, generation=1, local_rank=0, node_id="here", node_ip="127.0.0.1")
    pipeline = RankPipeline(context, Stage(), "not the dummy")
    monkeypatch.setattr(pipeline, "_link", Stage())
    with pytest.raises(ValueError, match="the cause"):
        pipeline.run(1, prompt(1))
