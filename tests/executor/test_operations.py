from __future__ import annotations

import asyncio
import re
import signal
import subprocess
import threading
import time

import anyio
import pytest

from aexec import ExecuteModel, Restart
from aexec.errors import (
    CallTimeout,
    ConfigError,
    ExecutorClosed,
    ExecutorPaused,
    ExecutorUnavailable,
    ModelNotReady,
    WorkerDied,
)
from aexec.executor.proc import process_state
from aexec.messages.lifecycle import SlowCall
from aexec.messages.operations import WeightsReport
from aexec.testing.workers import ProbeError, ProbeWorker, SleepProbeWorker, StepProbeWorker

pytestmark = pytest.mark.anyio


async def eventually(fact):
    """Wait until ``fact()`` is true; nothing tells of it."""
    async with asyncio.timeout(10):
        while not fact():  # noqa: ASYNC110 - statistics are there to be looked at
            await anyio.sleep(0.002)


async def run(executor, step):
    await executor.execute_model(ExecuteModel(step))
    return await executor.sample_tokens(step)


class FallsApart(SleepProbeWorker):
    """Its last rank cannot sleep."""

    def sleep(self, level):
        if self.context.rank == self.context.world_size - 1:
            raise ProbeError("no room in host memory", code=level)
        return super().sleep(level)


class InChunks(SleepProbeWorker):
    """Its weights come in pieces."""

    def update_weights(self, last):
        return WeightsReport(version=1, is_complete=last)

    def start_weight_update(self):
        pass

    def finish_weight_update(self):
        pass


async def test_a_sleep_that_fails_on_a_rank_takes_the_worst_for_true(opened):
    """G55: the weights count as discarded until they are loaded again on all ranks."""
    async with opened(FallsApart, ranks=2) as executor:
        with pytest.raises(ProbeError):
            await executor.sleep(1)
        with pytest.raises(ModelNotReady, match="discarded"):
            await executor.execute_model(ExecuteModel(1))
        await executor.wake_up()
        with pytest.raises(ModelNotReady, match="call load_weights"):
            await executor.execute_model(ExecuteModel(1))
        await executor.weights_loaded()
        await run(executor, 1)


async def test_weights_that_only_some_ranks_have_run_nothing(opened):
    """OPS-06: after a partial failure, and while ranks are served one by one."""
    async with opened(SleepProbeWorker, ranks=2) as executor:
        with pytest.raises(ProbeError):
            await executor.collective_rpc("update_weights", (1,), {"fail_on": 1})
        with pytest.raises(ModelNotReady, match="half updated"):
            await executor.execute_model(ExecuteModel(1))
        await executor.collective_rpc("update_weights", (2,), ranks=[0])
        with pytest.raises(ModelNotReady, match="half updated"):
            await executor.execute_model(ExecuteModel(1))
        await executor.collective_rpc("update_weights", (2,), ranks=[1])
        await run(executor, 1)


async def test_weights_that_come_in_chunks_are_whole_after_the_last_one(opened):
    """OPS-06: by the worker's report, or by the end of the update."""
    async with opened(InChunks) as executor:
        await executor.collective_rpc("update_weights", (False,))
        with pytest.raises(ModelNotReady, match="finish_weight_update"):
            await executor.execute_model(ExecuteModel(1))
        await executor.collective_rpc("update_weights", (True,))
        await run(executor, 1)
        await executor.collective_rpc("start_weight_update")
        with pytest.raises(ModelNotReady):
            await executor.execute_model(ExecuteModel(2))
        await executor.collective_rpc("finish_weight_update")
        await run(executor, 2)


async def test_weights_are_not_loaded_into_sleeping_memory(opened):
    """Refused before anything is sent, with what to do first."""
    async with opened(SleepProbeWorker) as executor:
        await executor.sleep(2)
        with pytest.raises(ModelNotReady, match=r"wake_up\(\['weights'\]\)"):
            await executor.collective_rpc("update_weights", (1,))
        with pytest.raises(ModelNotReady):
            await executor.weights_loaded()
        with pytest.raises(ModelNotReady, match="resume was refused"):
            await executor.resume()
        assert "weights" not in [entry[0] for entry in (await executor.collective_rpc("read_log"))[0]]


async def test_an_executor_says_what_it_lacks(opened):
    """In its repr, its statistics and its dump."""
    async with opened(SleepProbeWorker) as executor:
        assert executor.statistics().memory == "ready"
        await executor.sleep(1)
        await executor.pause()
        assert "paused (keep), the weights are asleep (sleep level 1), the KV cache is asleep" in repr(executor)
        figures = executor.statistics()
        assert (figures.paused, figures.max_concurrent_steps) == ("keep", 8)
        assert "the KV cache is asleep" in figures.memory
        assert "memory: the weights are asleep" in executor.dump()


async def test_a_restarted_group_is_awake(opened):
    """EXE-08: the state belongs to the workers, and goes with them; a pause belongs to the executor, and stays."""
    policy = Restart(max_restarts=1, backoff=0.0)
    async with opened(SleepProbeWorker, on_failure=policy) as executor:
        await executor.sleep(2)
        await executor.pause("keep")
        held = asyncio.ensure_future(executor.execute_model(ExecuteModel(1)))
        await asyncio.sleep(0)
        with pytest.raises(WorkerDied):
            await executor.collective_rpc("end", (3,))
        with pytest.raises(WorkerDied) as caught:
            await held
        assert "while step 1 waited to be sent" in caught.value.__notes__
        await eventually(lambda: executor.statistics().state == "ready")
        assert executor.statistics().paused == "keep"
        await executor.resume()
        await run(executor, 1)


async def test_a_sleep_that_is_cancelled_while_it_waits_changes_nothing(opened):
    """Once it was sent, it goes on."""
    async with opened(SleepProbeWorker) as executor:
        await executor.execute_model(ExecuteModel(1))
        sleeping = asyncio.ensure_future(executor.sleep(1))
        await asyncio.sleep(0.01)
        sleeping.cancel()
        await asyncio.wait([sleeping])
        await executor.sample_tokens(1)
        await run(executor, 2)
        blocked = asyncio.ensure_future(executor.collective_rpc("block", (0.1,)))
        await asyncio.sleep(0.01)
        sent = asyncio.ensure_future(executor.sleep(1))
        await asyncio.sleep(0.01)
        sent.cancel()
        await asyncio.wait([sent, blocked])
        await eventually(lambda: "sleep level 1" in executor.statistics().memory)


async def test_a_pause_that_does_not_settle_in_time_names_the_steps(opened):
    """It is paused all the same."""
    async with opened(SleepProbeWorker) as executor:
        await executor.execute_model(ExecuteModel(7))
        with pytest.raises(CallTimeout) as caught:
            await executor.pause("finish", timeout=0.02)
        assert any(": 7;" in note for note in caught.value.__notes__)
        assert executor.statistics().paused == "finish"
        await executor.sample_tokens(7)


async def test_a_block_can_be_paused(opened):
    """OPS-04: and whatever happens in it, steps go on behind it."""
    async with opened(SleepProbeWorker) as executor:

        async def use():
            async with executor.paused("finish"):
                assert executor.statistics().paused == "finish"
                raise ValueError("mine")

        with pytest.raises(ValueError, match="mine"):
            await use()
        await run(executor, 1)


async def test_a_paused_block_that_is_cancelled_leaves_no_pause(opened):
    """However it is left: in the block, or while it waits for steps in flight."""
    async with opened(SleepProbeWorker) as executor:
        with anyio.CancelScope() as scope:
            async with executor.paused("keep"):
                scope.cancel()
                await anyio.sleep_forever()
        assert executor.statistics().paused == ""
        await executor.execute_model(ExecuteModel(1))
        with anyio.move_on_after(0.01):
            async with executor.paused("finish"):
                raise AssertionError("step 1 was not sampled")
        assert executor.statistics().paused == ""
        await executor.sample_tokens(1)
        await run(executor, 2)


async def test_an_abort_ends_steps_that_wait_for_a_place(opened):
    """They have not begun, and say so by type."""
    async with opened(SleepProbeWorker, max_concurrent_steps=1) as executor:
        await executor.execute_model(ExecuteModel(1))
        waiting = asyncio.ensure_future(executor.execute_model(ExecuteModel(2)))
        await asyncio.sleep(0)
        await executor.pause("abort")
        with pytest.raises(ExecutorPaused, match=r"step 2 was ended by pause\(mode='abort'\)"):
            await waiting
        assert executor.statistics().steps_in_flight == 0
        await executor.resume()
        await run(executor, 3)


async def test_a_step_that_one_of_several_pauses_has_ended_says_so(opened):
    """Its driver may come for it long after: as while it has a bitmask made."""
    async with opened(SleepProbeWorker) as executor:
        await executor.execute_model(ExecuteModel(1))
        for _ in range(3):
            await executor.pause("abort")
            await executor.resume()
        with pytest.raises(ExecutorPaused, match=r"step 1 was ended by pause\(mode='abort'\)"):
            await executor.sample_tokens(1)
        await run(executor, 2)


async def test_a_step_that_finds_no_place_in_time_says_why(opened):
    """G43: it never ran, and the steps that hold the places are named."""
    async with opened(SleepProbeWorker, max_concurrent_steps=1, step_timeout=0.05) as executor:
        await executor.execute_model(ExecuteModel(1))
        with pytest.raises(CallTimeout, match="execute_model of step 2 passed its limit") as caught:
            await executor.execute_model(ExecuteModel(2))
        assert not caught.value.started
        assert "1 of 1 steps are in flight (ExecutorConfig.max_concurrent_steps): 1" in caught.value.__notes__[0]


async def test_whole_and_refused_steps_hold_no_place(opened):
    """A step without tokens is over with its reply; so is one that the ranks refuse."""
    async with opened(SleepProbeWorker, max_concurrent_steps=1, step_timeout=5.0) as executor:
        for step in (1, 2, 3):
            await executor.execute_model(ExecuteModel(step, None, 0))
        await executor.execute_model(ExecuteModel(4, {"fail": "no memory"}))
        with pytest.raises(ProbeError):
            await executor.sample_tokens(4)
        await run(executor, 5)
        assert executor.statistics().steps_in_flight == 0


async def test_fifty_steps_at_once_keep_the_bound(opened):
    """G43: all of them run, in order, never more than two at a time."""
    async with opened(StepProbeWorker, max_concurrent_steps=2) as executor:
        most = 0

        async def step(number):
            nonlocal most
            await executor.execute_model(ExecuteModel(number))
            most = max(most, executor.statistics().steps_in_flight)
            return (await executor.sample_tokens(number)).output[0]

        assert await asyncio.gather(*(step(number) for number in range(1, 51))) == list(range(1, 51))
        assert most == 2


async def test_a_missed_deadline_may_be_the_failure_of_the_group(opened):
    """G02: with on_timeout="fail_executor" the group is given up, or rebuilt where that is asked for."""
    async with opened(ProbeWorker, on_timeout="fail_executor") as executor:
        with pytest.raises(CallTimeout):
            await executor.collective_rpc("block", (0.3,), timeout=0.05)
        with pytest.raises(CallTimeout) as caught:
            await executor.collective_rpc("echo", (1,))
        assert any("failed for good" in note for note in caught.value.__notes__)
    policy = Restart(max_restarts=1, backoff=0.0)
    async with opened(ProbeWorker, on_timeout="fail_executor", on_failure=policy) as executor:
        with pytest.raises(CallTimeout):
            await executor.collective_rpc("block", (0.3,), timeout=0.05)
        await eventually(lambda: (executor.generation, executor.statistics().state) == (2, "ready"))
        assert await executor.collective_rpc("echo", (1,)) == [1]


async def test_a_second_close_cuts_a_drain_short(opened):
    """G36: the most impatient says when; all who close wait for the one end."""
    executor = await opened(ProbeWorker)
    endless = asyncio.ensure_future(executor.collective_rpc("async_block", (60.0,)))
    await asyncio.sleep(0.01)
    began = time.monotonic()
    patient = asyncio.ensure_future(executor.close(drain=60.0))
    await asyncio.sleep(0.01)
    await executor.close()
    await patient
    assert time.monotonic() - began < 10
    with pytest.raises(ExecutorClosed, match="while async_block on rank 0 was pending"):
        await endless


async def test_closes_that_come_together_wait_no_longer_than_the_most_impatient(opened):
    """G36: in whichever order they come."""
    for drains in ((60.0, 0.05), (0.05, 60.0)):
        executor = await opened(ProbeWorker)
        endless = asyncio.ensure_future(executor.collective_rpc("async_block", (60.0,)))
        await asyncio.sleep(0.01)
        with anyio.fail_after(10):
            await asyncio.gather(*(executor.close(drain=drain) for drain in drains))
        with pytest.raises(ExecutorClosed):
            await endless


async def test_a_drain_tells_its_limit_and_gives_up_what_is_paused(opened):
    """G36: steps behind a pause could never end."""
    executor = await opened(SleepProbeWorker)
    await executor.pause("keep")
    held = asyncio.ensure_future(executor.execute_model(ExecuteModel(1)))
    endless = asyncio.ensure_future(executor.collective_rpc("async_block", (60.0,)))
    await asyncio.sleep(0.01)
    await executor.close(drain=0.1)
    with pytest.raises(ExecutorClosed, match="closed while it was paused"):
        await held
    with pytest.raises(ExecutorClosed, match=r"when the 0\.1 s of its drain were over"):
        await endless
    with pytest.raises(ConfigError, match="drain of close is -1"):
        await executor.close(drain=-1)


async def test_a_death_while_draining_ends_the_drain(opened):
    """Promise 3: it is not waited for what cannot come."""
    policy = Restart(max_restarts=3, backoff=0.0)
    executor = await opened(SleepProbeWorker, on_failure=policy)
    dying = asyncio.ensure_future(executor.collective_rpc("end", (3,)))
    closing = asyncio.ensure_future(executor.close(drain=60.0))
    with anyio.fail_after(10):
        await closing
    with pytest.raises(WorkerDied):
        await dying
    assert executor.generation == 1


async def test_an_operation_on_a_closed_executor_is_refused(opened):
    """Each by the same error as a call."""
    executor = await opened(SleepProbeWorker)
    await executor.close()
    for operation in (executor.sleep, executor.wake_up, executor.pause, executor.resume, executor.weights_loaded):
        with pytest.raises(ExecutorClosed):
            await operation()


async def test_the_backends_own_choices_are_described(opened, thread_group):
    """G39, G46: what it uses and what it sends, secrets hidden."""

    class Telling(thread_group):
        def settings(self):
            return {"spin": 0.0}

        def environment(self):
            return {"MY_TOKEN": "abc", "OMP_NUM_THREADS": "1"}

    async with opened(ProbeWorker, backend=Telling) as executor:
        told = executor.describe()
    assert (told["spin"].value, told["spin"].source) == (0.0, "chosen")
    assert told.environment == {"MY_TOKEN": "(hidden)", "OMP_NUM_THREADS": "1"}


async def test_a_dump_shows_what_waits_where(opened):
    """G69: calls with their limits, steps, how full the queues are, and the tasks of the loop."""
    begun, go_on = threading.Barrier(3), threading.Event()

    def hold(_worker):
        begun.wait(10.0)
        assert go_on.wait(10.0)

    async with opened(SleepProbeWorker, ranks=2, max_concurrent_steps=1) as executor:
        await executor.execute_model(ExecuteModel(1))
        step = asyncio.ensure_future(executor.execute_model(ExecuteModel(2)))
        call = asyncio.ensure_future(executor.collective_rpc(hold, timeout=9.0))
        await asyncio.to_thread(begun.wait, 10.0)
        dump = executor.dump()
        full = executor.dump(await executor.stacks())
        go_on.set()
        await call
        step.cancel()
        await asyncio.wait([step])
    assert "steps: 1 of 1 in flight, 1 waiting, not paused" in dump
    assert "calls: 1 of 4096 open" in dump
    assert re.search(r"hold on ranks 0, 1, sent, for \d\.", dump)
    assert " s of 9 s, waits for ranks [0, 1]" in dump
    assert "step 1: launched, waits to be sampled" in dump
    assert re.search(r"step 2: waits to be sent, for \d\.", dump)
    assert "await executor.stacks()" in dump
    assert "task " in dump
    assert "in hold" in full


async def test_slow_calls_tell_who_answered_and_how_the_others_are(opened):
    """G01: with the call's id, and less often each time."""
    async with opened(ProbeWorker, ranks=2, slow_call=0.05) as executor:
        events = executor.events()
        started = time.monotonic()
        call = asyncio.ensure_future(executor.collective_rpc("block", (0.5, 1)))
        with anyio.fail_after(5):
            found = [await anext(events)]
        await call
        await executor.close()
        found += [event async for event in events if isinstance(event, SlowCall)]
    assert found[0].answered == [0]
    assert found[0].states == {1: "running"}
    assert found[0].call > 0
    assert len(found) <= 3 or time.monotonic() - started > 1.0


def test_the_system_tells_whether_a_process_runs_or_is_stopped():
    """By its signal state; a process that is not there is dead."""
    with subprocess.Popen(["sleep", "60"]) as process:
        assert process_state(process.pid) == "running"
        process.send_signal(signal.SIGSTOP)
        give_up = time.monotonic() + 5
        while process_state(process.pid) != "stopped":
            assert time.monotonic() < give_up
        process.kill()
        process.wait()
    assert process_state(process.pid) == "dead"


def test_paused_is_retryable():
    """A caller that retries what is unavailable retries this."""
    assert issubclass(ExecutorPaused, ExecutorUnavailable)
