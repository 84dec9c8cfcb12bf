"""An engine whose workers are lost: the requests stay, wait, go on, and end once."""

from __future__ import annotations

import asyncio

import anyio
import pytest

from aexec import AsyncLLM
from aexec.engine.calls import HaveWeights
from aexec.engine.events import EngineDown, EngineFailed, EngineRecovered, RequestCondemned
from aexec.errors import (
    CallTimeout,
    ConfigError,
    EngineDraining,
    EngineRecovering,
    ExecutorPaused,
    ExecutorUnavailable,
    ModelNotReady,
    PeerLost,
    RequestAborted,
    RequestFailed,
    RequestTimeout,
    WorkerDied,
)
from aexec.executor.lifecycle import ExecutorState
from aexec.messages.batch import ModelRunnerOutput
from aexec.messages.lifecycle import GroupRestarted
from aexec.messages.request import SamplingParams
from aexec.messages.step import StepResult

pytestmark = pytest.mark.anyio

GREEDY = SamplingParams(max_tokens=12, temperature=0.0)
DEATH = WorkerDied(0, 4711, signal="SIGKILL", phase="sample_tokens")


def kill(executor, state=ExecutorState.DOWN):
    """The group is lost; what is in flight and what comes meanwhile ends with it."""
    executor.state = state
    executor.fail_sample, executor.fail_execute = DEATH, ExecutorUnavailable("rank 0 died", 0.5)
    executor.release()
    executor.news.emit(DEATH)


def rebuild(executor, *, tell=True):
    """There are new workers, which know nothing."""
    executor.runner = type(executor)().runner
    executor.generation += 1
    executor.state, executor.fail_sample, executor.fail_execute = ExecutorState.READY, None, None
    if tell:
        executor.news.emit(GroupRestarted(generation=executor.generation, reason=str(DEATH), seconds=0.1))


def give_up(executor):
    """There will be no other workers."""
    executor.state, executor.fail_execute = ExecutorState.FAILED, DEATH
    for tell in executor.tell_failure:
        tell(DEATH)


async def settled():
    """All messages on their way have arrived; far quicker than a look at all tasks."""
    for _ in range(50):
        await asyncio.sleep(0)


async def until(condition):
    """Nothing tells of it."""
    with anyio.fail_after(5.0):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0)


PARAMS = [
    SamplingParams(max_tokens=20, temperature=0.0),
    SamplingParams(max_tokens=20, seed=3, logprobs=2),
    SamplingParams(max_tokens=20, seed=4, prompt_logprobs=1, logprobs=0),
    SamplingParams(max_tokens=20, seed=5, n=3),
    SamplingParams(max_tokens=20, min_tokens=10, temperature=0.0, ignore_eos=True),
]


async def say_all(llm, params=PARAMS):
    return await asyncio.gather(*(llm.complete([70, 71 + place], each) for place, each in enumerate(params)))


def without_ids(completions):
    return [[(each.text, each.token_ids, each.logprobs, each.prompt_logprobs, each.finish_reason)
             for each in (completion.samples or [completion])] for completion in completions]  # fmt: skip


@pytest.mark.parametrize("num_steps", [0, 1, 2, 7])
async def test_streams_go_on_as_if_nothing_had_been(engine, num_steps):
    """Text, tokens, log-probabilities and samples are those of an undisturbed run, wherever the crash was."""
    async with engine() as (llm, executor):
        text = (await llm.complete([70, 71], PARAMS[0])).text
        params = [*PARAMS, SamplingParams(max_tokens=20, temperature=0.0, stop=(text[9:12],))]
        undisturbed = without_ids(await say_all(llm, params))
        assert {len(samples[0][1]) for samples in undisturbed} != {0}
        before = len(executor.steps)
        disturbed = asyncio.create_task(say_all(llm, params))
        await until(lambda: len(executor.steps) > before + num_steps)
        executor.hold()
        await executor.held.wait()
        kill(executor)
        await settled()
        assert not disturbed.done()
        rebuild(executor)
        assert without_ids(await disturbed) == undisturbed
        figures = (await llm.statistics()).recovery
        assert (figures.state, figures.num_outages, figures.num_lost_steps > 0) == ("up", 1, True)
        llm._frontend.driver._cell.actor._scheduler._blocks.check_integrity()


async def test_events_tell_what_happens(engine):
    """Down, with the steps that are lost and the requests that are not; recovered, with what it costs."""
    async with engine() as (llm, executor):
        events = llm.events()
        executor.hold()
        task = asyncio.create_task(llm.complete([65] * 30, GREEDY))
        await executor.held.wait()
        kill(executor)
        down = await anext(events)
        assert isinstance(down, EngineDown)
        assert (down.outage, down.lost_steps[0], down.num_running, down.num_waiting) == (1, 1, 1, 0)
        assert "ended by SIGKILL" in down.reason
        assert (await llm.statistics()).recovery.state == "down"
        rebuild(executor)
        recovered = await anext(events)
        assert isinstance(recovered, EngineRecovered)
        assert (recovered.outage, recovered.generation, recovered.num_requests) == (1, 2, 1)
        assert recovered.num_recomputed_tokens >= 30
        assert recovered.seconds > 0
        await task
    assert [event async for event in events] == []


async def test_a_late_result_of_the_old_workers_is_not_applied(engine, monkeypatch):
    """Its step is not in flight any longer: the request computes that token again."""
    async with engine() as (llm, executor):
        undisturbed = (await llm.complete("late", GREEDY)).token_ids
        sample, late, is_held = executor.sample_tokens, asyncio.Event(), asyncio.Event()

        async def sample_late(step_id, grammar=None):
            is_held.set()
            await late.wait()
            return StepResult(step_id, ModelRunnerOutput(request_ids=["late"], sampled_token_ids=[[1]]))

        monkeypatch.setattr(executor, "sample_tokens", sample_late)
        task = asyncio.create_task(llm.complete("late", GREEDY, request_id="late"))
        await is_held.wait()
        kill(executor)
        await settled()
        monkeypatch.setattr(executor, "sample_tokens", sample)
        executor.hold()
        rebuild(executor)
        await executor.held.wait()
        late.set()
        await settled()
        executor.release()
        assert (await task).token_ids == undisturbed


async def test_workers_that_are_others_are_noticed_at_the_next_step(engine):
    """No event and no failed step is needed: whoever looks sees another generation."""
    async with engine() as (llm, executor):
        undisturbed = (await llm.complete("a", GREEDY)).token_ids
        stream = llm.generate("a", GREEDY)
        tokens = list((await anext(stream)).token_ids)
        await llm.pause()
        rebuild(executor, tell=False)
        await llm.resume()
        async for chunk in stream:
            tokens += chunk.token_ids
        assert tuple(tokens) == undisturbed
        assert (await llm.statistics()).recovery.num_outages == 1


async def test_an_idle_engine_recovers_too(engine):
    """Nobody waits; the prefix cache is void all the same."""
    async with engine() as (llm, executor):
        prompt = [66] * 100
        undisturbed = (await llm.complete(prompt, GREEDY)).token_ids
        events = llm.events()
        kill(executor)
        assert (await anext(events)).lost_steps == ()
        rebuild(executor)
        assert isinstance(await anext(events), EngineRecovered)
        hits = (await llm.statistics()).scheduler.prefix.num_hit_tokens
        assert (await llm.complete(prompt, GREEDY)).token_ids == undisturbed
        assert (await llm.statistics()).scheduler.prefix.num_hit_tokens == hits


async def test_new_requests_wait_up_to_a_bound_and_a_time(engine):
    """Then they fail with an error that says when to come again; those that had begun go on waiting."""
    async with engine(max_num_waiting=2, recovery_timeout=0.5) as (llm, executor):
        executor.hold()
        begun = asyncio.create_task(llm.complete("begun", GREEDY))
        await executor.held.wait()
        kill(executor)
        await settled()
        waiting = [asyncio.create_task(llm.complete("new", GREEDY)) for _ in range(2)]
        await settled()
        with pytest.raises(EngineRecovering, match=r"2 requests wait already \(max_num_waiting\); retry after") as full:
            await llm.complete("one too many", GREEDY)
        assert full.value.retry_after >= 1.0
        for each in waiting:
            with pytest.raises(EngineRecovering, match=r"has waited for 0\.5 s"):
                await each
        assert not begun.done()
        in_time = asyncio.create_task(llm.complete("in time", GREEDY))
        await settled()
        rebuild(executor)
        assert [len((await each).token_ids) for each in (begun, in_time)] == [12, 12]
        await anyio.sleep(0.55)  # what was to end a wait in that outage ends nothing now
        assert (await llm.statistics()).num_streams == 0


async def test_the_wait_of_a_request_is_its_own(engine):
    """An id that is used again after an abort has its whole time, whatever the one before had left."""
    async with engine(recovery_timeout=1.5) as (llm, executor):
        kill(executor)
        await settled()
        first = asyncio.create_task(llm.complete("first", GREEDY, request_id="same"))
        await anyio.sleep(0.9)
        assert await llm.abort("same")
        assert (await first).finish_reason == "abort"
        second = asyncio.create_task(llm.complete("second", GREEDY, request_id="same"))
        await anyio.sleep(0.8)  # past the first's time, and long before its own
        assert not second.done()
        rebuild(executor)
        assert len((await second).token_ids) == 12


async def test_when_the_workers_are_gone_for_good_every_stream_ends_with_that(engine):
    """One clear error each, for those that had begun, those that wait and those that come later."""
    async with engine(max_num_seqs=2) as (llm, executor):
        events = llm.events()
        executor.hold()
        tasks = [asyncio.create_task(llm.complete("a", GREEDY)) for _ in range(4)]
        await executor.held.wait()
        kill(executor)
        await settled()
        give_up(executor)
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert {type(result) for result in results} == {WorkerDied}
        assert len({id(result) for result in results}) == 4
        with pytest.raises(WorkerDied) as caught:
            await llm.complete("a", GREEDY)
        assert any("gone for good" in line for line in caught.value.__notes__)
        assert [type(await anext(events)) for _ in range(2)] == [EngineDown, EngineFailed]
        statistics = await llm.statistics()
        assert (statistics.recovery.state, statistics.blocks.num_holders, statistics.num_streams) == ("failed", 0, 0)


async def test_a_failure_at_once_is_told_once(engine):
    """Without a budget for restarts there is no outage to wait in."""
    async with engine() as (llm, executor):
        events = llm.events()
        executor.hold()
        task = asyncio.create_task(llm.complete("a", GREEDY))
        await executor.held.wait()
        kill(executor, ExecutorState.FAILED)
        give_up(executor)
        with pytest.raises(WorkerDied):
            await task
        failed = await anext(events)
        assert isinstance(failed, EngineFailed)
        assert failed.num_requests == 1
    assert [event async for event in events] == []


async def test_a_pause_outlives_a_crash(engine):
    """Nothing runs before the resume; a pause that is asked for while the workers are down is there at once."""
    async with engine() as (llm, executor):
        undisturbed = (await llm.complete("a", GREEDY)).token_ids
        executor.hold()
        task = asyncio.create_task(llm.complete("a", GREEDY))
        await executor.held.wait()
        pausing = asyncio.create_task(llm.pause())
        await settled()
        kill(executor)
        await pausing
        await llm.resume()
        await llm.pause()
        steps = len(executor.steps)
        rebuild(executor)
        await settled()
        assert (len(executor.steps), task.done()) == (steps, False)
        await llm.resume()
        assert (await task).token_ids == undisturbed


async def test_a_pause_that_lets_finish_what_runs_means_what_ran_before_a_crash_too(engine):
    """It returns when those are through; what has not begun waits for the resume."""
    async with engine(max_num_seqs=1) as (llm, executor):
        executor.hold()
        begun = asyncio.create_task(llm.complete("a", GREEDY))
        await executor.held.wait()
        waits = asyncio.create_task(llm.complete("b", GREEDY))
        pausing = asyncio.create_task(llm.pause("finish"))
        await settled()
        kill(executor)
        await settled()
        assert not pausing.done()
        rebuild(executor)
        await pausing
        assert begun.done()
        assert len((await begun).token_ids) == 12
        assert not waits.done()
        await llm.resume()
        assert len((await waits).token_ids) == 12


async def test_who_leaves_while_the_workers_are_down_is_gone(engine):
    """By leaving and by its id: the blocks are free, and the new workers never hear of it."""
    async with engine() as (llm, executor):
        streams = [llm.generate("a", GREEDY, request_id=name) for name in ("left", "aborted", "stays")]
        readers = [asyncio.create_task(anext(stream)) for stream in streams]
        executor.hold()
        await executor.held.wait()
        kill(executor)
        await settled()
        readers[0].cancel()
        assert await llm.abort("aborted")
        await settled()
        statistics = await llm.statistics()
        assert (statistics.num_streams, statistics.blocks.num_holders) == (1, 1)
        steps = len(executor.steps)
        rebuild(executor)
        await readers[2]
        assert [new.request_id for new in executor.steps[steps].payload.new] == ["stays"]
        assert executor.steps[steps].payload.finished_request_ids == []
        await streams[2].aclose()


async def test_the_time_of_a_request_passes_while_the_workers_are_down(engine):
    """Its own limit holds, and says how far it came."""
    async with engine() as (llm, executor):
        executor.hold()
        stream = llm.generate("a", GREEDY, timeout=0.5)
        reader = asyncio.create_task(anext(stream))
        await executor.held.wait()
        kill(executor)
        with pytest.raises(RequestTimeout, match=r"0\.5 s"):
            await reader


async def test_a_close_does_not_wait_for_workers(engine):
    """Streams end at once, with the word for that."""
    async with engine() as (llm, executor):
        executor.hold()
        task = asyncio.create_task(llm.complete("a", GREEDY))
        await executor.held.wait()
        kill(executor)
        await settled()
        with anyio.fail_after(10.0):
            await llm.aclose()
        with pytest.raises(RequestAborted):
            await task


async def test_a_step_that_a_pause_of_the_executor_has_ended_is_computed_again(engine):
    """The workers are well, and told to forget what they knew of the requests."""
    async with engine() as (llm, executor):
        undisturbed = (await llm.complete("a", GREEDY)).token_ids
        executor.hold()
        task = asyncio.create_task(llm.complete("a", GREEDY))
        await executor.held.wait()
        sampled = executor.spoil

        def ended(output):
            executor.spoil = sampled
            raise ExecutorPaused("step 13 was ended by pause(mode='abort')")

        executor.spoil = ended  # it was sampled, for nobody
        executor.release()
        assert (await task).token_ids == undisturbed
        assert (await llm.statistics()).recovery.num_outages == 0


async def test_a_step_behind_one_that_a_pause_has_ended_is_sampled_too(engine, monkeypatch):
    """Ranks sample in step order: one that were forgotten would keep all later ones waiting for ever."""
    async with engine(async_scheduling=True) as (llm, executor):
        undisturbed = (await llm.complete("a", GREEDY)).token_ids
        execute, sample, launched, sampled = executor.execute_model, executor.sample_tokens, [], []
        is_sent, may_arrive, is_ended = asyncio.Event(), asyncio.Event(), asyncio.Event()

        async def send(message):
            if message.num_tokens:
                launched.append(message.step)
            reply = await execute(message)
            if len(launched) == 2 and not is_sent.is_set():
                is_sent.set()
                await may_arrive.wait()
            return reply

        async def end_first(step, grammar=None):
            sampled.append(step)
            result = await sample(step, grammar)
            if len(sampled) == 1:
                await is_sent.wait()
                is_ended.set()
                raise ExecutorPaused(f"step {step} was ended by pause(mode='abort')")
            return result

        monkeypatch.setattr(executor, "execute_model", send)
        monkeypatch.setattr(executor, "sample_tokens", end_first)
        task = asyncio.create_task(llm.complete("a", GREEDY))
        with anyio.fail_after(10.0):
            await is_ended.wait()
            await settled()
            may_arrive.set()
            assert (await task).token_ids == undisturbed
            await until(lambda: len(sampled) == len(launched))
        assert sampled == launched
        assert (await llm.statistics()).recovery.num_outages == 0


async def test_an_executor_may_be_paused_again_and_again():
    """Whatever its pauses end is computed again, however far it had come."""
    params = [SamplingParams(max_tokens=40, seed=seed) for seed in range(4)]
    async with AsyncLLM("dummy") as llm:
        undisturbed = without_ids(await say_all(llm, params))
        disturbed = asyncio.create_task(say_all(llm, params))
        with anyio.fail_after(30.0):
            for turns in range(40):
                for _ in range(turns % 7):
                    await asyncio.sleep(0)
                await llm.executor.pause("abort")
                await llm.executor.resume()
            assert without_ids(await disturbed) == undisturbed


async def poisoned(llm, executor, monkeypatch, poison=99):
    """The workers die of each step that runs a prompt with ``poison``; returns how often they did."""
    deaths, execute = [], executor.execute_model

    async def execute_model(step):
        new = [request.request_id for request in step.payload.new if poison in request.token_ids]
        if not new:
            return await execute(step)
        deaths.append(step.step)
        executor.state = ExecutorState.DOWN
        asyncio.get_running_loop().call_later(0.001, rebuild, executor)
        raise DEATH

    monkeypatch.setattr(executor, "execute_model", execute_model)
    return deaths


async def test_a_rank_that_misses_another_one_is_asked_twice(engine, monkeypatch):
    """Its word comes before the death that explains it: the step waits for that, and is lost, not failed."""
    async with engine() as (llm, executor):
        undisturbed = (await llm.complete("a", GREEDY)).token_ids
        executor.hold()
        task = asyncio.create_task(llm.complete("a", GREEDY))
        await executor.held.wait()
        executor.fail_sample = PeerLost(1, 0, "receive the hidden states of step 13", "connection reset")
        executor.release()
        await settled()
        assert not task.done()
        kill(executor)
        await settled()
        rebuild(executor)
        assert (await task).token_ids == undisturbed
        monkeypatch.setattr("aexec.engine.life.PEER_SECONDS", 0.01)
        executor.fail_sample = PeerLost(1, 0, "receive the hidden states of step 26", "too late")
        with pytest.raises(PeerLost, match="step 26"):  # nobody has died
            await llm.complete("a", GREEDY)


async def test_a_request_that_kills_the_workers_fails_alone(engine, monkeypatch):
    """After three crashes in a row, the last time alone; the others say what they say without it."""
    async with engine() as (llm, executor):
        alone = [(await llm.complete([65, number], GREEDY)).token_ids for number in range(6)]
        events = llm.events()
        deaths = await poisoned(llm, executor, monkeypatch)
        good = [asyncio.create_task(llm.complete([65, number], GREEDY)) for number in range(6)]
        bad = asyncio.create_task(llm.complete([99], GREEDY, request_id="bad"))
        with pytest.raises(RequestFailed, match="request bad failed: the workers went down 3 times in a row"):
            await bad
        assert [(await task).token_ids for task in good] == alone
        assert len(deaths) == 3
        told = [await anext(events) for _ in range(7)]
        assert [type(event) for event in told].count(RequestCondemned) == 1
        assert [event.request_id for event in told if isinstance(event, RequestCondemned)] == ["bad"]
        figures = (await llm.statistics()).recovery
        assert (figures.num_outages, figures.num_condemned, figures.num_suspects) == (3, 1, 0)


async def test_suspects_that_have_ended_hold_up_nobody(engine, monkeypatch):
    """Whoever has left while it was to run alone is not waited for."""
    async with engine() as (llm, executor):
        deaths = await poisoned(llm, executor, monkeypatch)
        good = asyncio.create_task(llm.complete([65], GREEDY))
        bad = asyncio.create_task(llm.complete([99], GREEDY, request_id="bad"))
        await until(lambda: len(deaths) == 2)
        assert await llm.abort("bad")
        assert (await bad).finish_reason == "abort"
        assert len((await good).token_ids) == 12
        assert len(deaths) == 2


async def test_weights_that_were_given_are_missed(engine):
    """Streams end with what to do, not with another model's words, until there are weights again."""
    async with engine() as (llm, executor):
        await llm._frontend.driver.ask(HaveWeights(given=True, generation=1))
        executor.hold()
        task = asyncio.create_task(llm.complete("a", GREEDY))
        await executor.held.wait()
        kill(executor)
        await settled()
        rebuild(executor)
        with pytest.raises(ModelNotReady, match="hold the weights of the model's files"):
            await task
        with pytest.raises(ModelNotReady, match=r"call update_weights\(\)"):
            await llm.complete("a", GREEDY)
        await llm._frontend.driver.ask(HaveWeights(given=True, generation=2))
        assert len((await llm.complete("a", GREEDY)).token_ids) == 12


async def test_a_drain_lets_what_has_begun_end_and_takes_nothing_new(engine):
    """It returns when the last one has ended; ``resume`` takes requests again."""
    async with engine() as (llm, executor):
        executor.hold()
        task = asyncio.create_task(llm.complete("a", GREEDY))
        await executor.held.wait()
        with pytest.raises(CallTimeout, match="drain") as caught:
            await llm.drain(timeout=0.5)
        assert "1 request(s) run still; nothing new is taken until resume()" in caught.value.__notes__
        draining = asyncio.create_task(llm.drain())
        await settled()
        assert (await llm.statistics()).is_draining
        with pytest.raises(EngineDraining, match="came after drain"):
            await llm.complete("b", GREEDY)
        assert not draining.done()
        executor.release()
        assert len((await task).token_ids) == 12
        await draining
        await llm.drain(timeout=10.0)
        await llm.resume()
        assert len((await llm.complete("b", GREEDY)).token_ids) == 12


async def test_a_drain_whose_time_was_up_before_it_began_says_so(engine):
    """Nothing has changed: the engine goes on taking requests."""
    async with engine() as (llm, executor):
        executor.hold()
        task = asyncio.create_task(llm.complete("a", GREEDY))
        await executor.held.wait()
        with pytest.raises(CallTimeout, match="drain") as caught:
            await llm.drain(timeout=0)
        assert not caught.value.started
        assert "1 request(s) run still; new ones are taken still" in caught.value.__notes__
        executor.release()
        assert len((await task).token_ids) == len((await llm.complete("b", GREEDY)).token_ids) == 12


async def test_a_drain_waits_for_workers_that_come_back(engine):
    """A crash in the middle loses nothing of what was taken."""
    async with engine() as (llm, executor):
        executor.hold()
        task = asyncio.create_task(llm.complete("a", GREEDY))
        await executor.held.wait()
        draining = asyncio.create_task(llm.drain())
        await settled()
        kill(executor)
        await settled()
        assert not draining.done()
        rebuild(executor)
        await draining
        assert len((await task).token_ids) == 12


@pytest.mark.parametrize("timeout", [-1.0, float("nan"), "1"])
async def test_a_drain_takes_seconds(engine, timeout):
    """Anything else is refused by name."""
    async with engine() as (llm, _):
        with pytest.raises(ConfigError, match="timeout of drain"):
            await llm.drain(timeout=timeout)
