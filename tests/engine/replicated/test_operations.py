"""What is done with an engine beside generating: in lockstep too, and in the same order on all ranks."""

from __future__ import annotations

import asyncio

import anyio
import pytest

from aexec.config import Offload
from aexec.errors import ConfigError, EngineDraining, RanksDisagree, RequestTimeout
from aexec.messages.request import SamplingParams

pytestmark = pytest.mark.anyio

GREEDY = SamplingParams(max_tokens=12, temperature=0.0)
LONG = SamplingParams(max_tokens=150, temperature=0.0)


@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize("seed", range(6))
async def test_calls_of_workers_come_between_the_same_steps(world_class, ranks, seed, stages):
    """Whatever runs, a call goes out while no step is in flight, and calls have one order."""
    world = world_class(2, seed, stages=stages)
    async with ranks(world) as llms:

        async def program(rank, llm):
            async def call(name):
                await world.jitter()
                await world.jitter()
                return (await llm.collective_rpc(name, (7,)))[0]

            async def pause():
                await world.jitter()
                await llm.pause()
                answer = await call("paused")
                await llm.resume()
                return answer

            requests = [llm.complete([65 + number] * 4, GREEDY, request_id=f"r{number}") for number in range(5)]
            return await asyncio.gather(*requests, call("one"), call("two"), pause(), llm.reset_prefix_cache())

        first, second = await world.on_all(llms, program)
    assert first == second
    assert first[-4:] == [("one", 7), ("two", 7), ("paused", 7), True]
    world.assert_alike()


@pytest.mark.parametrize("seed", range(4))
async def test_a_time_out_ends_a_request_at_the_same_step(world_class, ranks, seed):
    """By the clock of the last rank: all have the same tokens."""
    world = world_class(2, seed, most_turns=40)
    async with ranks(world) as llms:

        async def program(rank, llm):
            tokens = []

            async def read():
                sampling = SamplingParams(max_tokens=2000, temperature=0.0)
                async for chunk in llm.generate([65], sampling, timeout=0.02 + 0.01 * rank):
                    tokens.extend(chunk.token_ids)

            with pytest.raises(RequestTimeout) as caught:
                await read()
            return tokens, caught.value.num_tokens

        first, second = await world.on_all(llms, program)
    assert first == second
    world.assert_alike()


async def test_draining_takes_effect_for_the_same_request_on_all(world_class, ranks):
    """The request that is refused is refused on all ranks."""
    world = world_class(2, 3)
    async with ranks(world) as llms:

        async def program(rank, llm):
            running = asyncio.create_task(llm.complete([65], GREEDY, request_id="runs"))
            await world.jitter()
            drain = asyncio.create_task(llm.drain())
            await world.jitter()
            late = await asyncio.gather(llm.complete([66], GREEDY, request_id="late"), return_exceptions=True)
            await drain
            await llm.resume()
            again = await llm.complete([66], GREEDY, request_id="again")
            return (await running).token_ids, isinstance(late[0], EngineDraining), again.token_ids

        first, second = await world.on_all(llms, program)
    assert first == second
    world.assert_alike()


async def test_idle_ranks_ask_nothing(world_class, ranks):
    """Without requests there is no round, and no message in any driver."""
    world = world_class(2, 1)
    async with ranks(world) as llms:
        await world.on_all(llms, lambda rank, llm: llm.complete([65], GREEDY))
        await anyio.wait_all_tasks_blocked()
        handled = [llm.driver_statistics().handled for llm in llms]
        num_rounds = len(world.rounds)
        await anyio.sleep(0.1)
        assert [llm.driver_statistics().handled for llm in llms] == handled
        assert len(world.rounds) == num_rounds


async def test_a_rank_that_lacks_a_request_is_waited_for_without_a_spin(world_class, ranks):
    """The others go on with what all have, ask again now and then, and it runs as soon as it has come to all."""
    world = world_class(2, 2)
    async with ranks(world) as llms:
        early = asyncio.create_task(llms[0].complete([65], GREEDY, request_id="a"))
        other = asyncio.create_task(llms[1].complete([66], GREEDY, request_id="b"))
        await anyio.sleep(0.3)
        assert len(world.rounds) < 12
        assert not early.done()
        assert not other.done()
        rest = await asyncio.gather(
            llms[0].complete([66], GREEDY, request_id="b"), llms[1].complete([65], GREEDY, request_id="a")
        )
        assert (await other).token_ids == rest[0].token_ids
        assert (await early).token_ids == rest[1].token_ids
    world.assert_alike()


async def test_what_only_one_rank_is_asked_ends_in_an_error_that_names_it(world_class, ranks, monkeypatch):
    """The deadline is the executor's ``distributed_timeout``; other requests run on."""
    monkeypatch.setattr("aexec.engine.replicated.rounds._GRACE_SECONDS", 0.0)
    world = world_class(2, 2)
    for rank in world.ranks:
        rank.config.distributed_timeout = 0.4
    async with ranks(world) as llms:
        lone = asyncio.create_task(llms[0].complete([65], GREEDY, request_id="lone"))
        for number in range(3):
            both = await world.on_all(llms, lambda rank, llm, n=number: llm.complete([66], GREEDY, request_id=f"b{n}"))
            assert both[0].token_ids == both[1].token_ids
        with pytest.raises(
            RanksDisagree, match=r"'request lone' was asked of this rank's engine and not of rank 1 within"
        ):
            await lone
        await world.on_all(llms, lambda rank, llm: llm.complete([67], GREEDY, request_id="after"))
    world.assert_alike()


async def test_a_reader_that_leaves_on_one_rank_only_ends_nothing(world_class, ranks):
    """The request goes on to its end for the readers of the other ranks."""
    world = world_class(2, 4)
    async with ranks(world) as llms:

        async def program(rank, llm):
            if rank == 1:
                await anext(llm.generate([65], LONG, request_id="a"))
                return await llm.complete([66], LONG, request_id="b")
            answers = await asyncio.gather(
                llm.complete([65], LONG, request_id="a"), llm.complete([66], LONG, request_id="b")
            )
            assert len(answers[0].token_ids) == 150
            return answers[1]

        first, second = await world.on_all(llms, program)
        assert first.token_ids == second.token_ids
        assert [len(llm._frontend.driver._cell.actor._agenda) for llm in llms] == [0, 0]
    world.assert_alike()


async def test_engines_close_together_in_the_middle_of_requests(world_class, ranks):
    """No rank is left with a step that another one does not make."""
    world = world_class(2, 6)
    async with ranks(world) as llms:

        async def program(rank, llm):
            generation = llm.generate([65], LONG, request_id="a")
            await anext(generation)
            await world.jitter()
            await llm.aclose()
            return [chunk.finish_reason async for chunk in generation][-1]

        assert await world.on_all(llms, program) == ["abort", "abort"]
    world.assert_alike()


async def test_a_kv_connector_is_refused(world_class, engine_class):
    """What a connector holds is a matter of time."""
    world = world_class(1, 0)
    with pytest.raises(ConfigError, match="every rank has an engine of its own here"):
        await engine_class("dummy", executor=world.ranks[0], kv_connector=Offload()).open()


async def test_engines_one_after_the_other_on_executors_that_stay_open(world_class, ranks):
    """Each leaves nothing in them, and the next begins at the same step on all ranks."""
    world = world_class(2, 8)
    answers = []
    for _ in range(3):
        async with ranks(world) as llms:
            answers += await world.on_all(llms, lambda rank, llm: llm.complete([65], GREEDY))
    assert len({answer.token_ids for answer in answers}) == 1
    world.assert_alike()


async def test_what_waits_for_other_ranks_for_a_while_is_told(world_class, ranks, caplog):
    """A warning names what it is, after the executor's ``slow_call``."""
    world = world_class(2, 8)
    for rank in world.ranks:
        rank.config.slow_call = 0.1
    async with ranks(world) as llms:
        early = asyncio.create_task(llms[0].complete([65], GREEDY, request_id="early"))
        while not caplog.records:  # noqa: ASYNC110 - a log has no event
            await anyio.sleep(0.005)
        await anyio.sleep(0.25)
        assert [record.getMessage().count("request early") for record in caplog.records] == [1]
        await llms[1].complete([65], GREEDY, request_id="early")
        await early


async def test_what_nobody_waits_for_is_not_looked_at_for_ever(world_class, ranks, monkeypatch):
    """A rank alone that resumes: once that is told, and its time is up, there is nothing to be done about it."""
    monkeypatch.setattr("aexec.engine.replicated.rounds._GRACE_SECONDS", 0.0)
    world = world_class(2, 3)
    for rank in world.ranks:
        rank.config.slow_call, rank.config.distributed_timeout = 0.05, 0.1
    async with ranks(world) as llms:
        await llms[0].resume()
        await anyio.sleep(0.4)
        handled = -1
        while handled != (handled := llms[0].driver_statistics().handled):  # noqa: ASYNC110 - rest has no event
            await anyio.sleep(0.4)
        await llms[1].resume()
        answers = await world.on_all(llms, lambda rank, llm: llm.complete([65], GREEDY))
        assert answers[0].token_ids == answers[1].token_ids
