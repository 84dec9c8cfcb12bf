from __future__ import annotations

import asyncio
import threading
import time

import anyio
import pytest

from aexec import ExecuteModel, ExecutorConfig, Restart, open_executor
from aexec.errors import ExecutorClosed, ExecutorUnavailable, RemoteError, StepStateError, WorkerDied
from aexec.messages.lifecycle import GroupRestarted, WorkerStarted
from aexec.testing.workers import ProbeWorker, StepProbeWorker

pytestmark = pytest.mark.anyio


class Unlucky(ProbeWorker):
    """Cannot be constructed in generation 2."""

    def __init__(self, context, **kwargs):
        if context.generation == 2:
            raise OSError("the device is still busy")
        super().__init__(context, **kwargs)


class NeverAgain(ProbeWorker):
    """Can be constructed once."""

    def __init__(self, context, **kwargs):
        if context.generation > 1:
            raise OSError("the device is gone")
        super().__init__(context, **kwargs)


def restarting(worker_cls=StepProbeWorker, *, max_restarts=2, backoff=0.0, **settings):
    policy = Restart(max_restarts=max_restarts, within=60.0, backoff=backoff)
    return open_executor(ExecutorConfig(worker_cls=worker_cls, on_failure=policy, **settings))


async def kill(executor, code=3):
    with pytest.raises(WorkerDied):
        await executor.collective_rpc("end", (code,))


async def is_up(executor, generation):
    """Wait until the group of ``generation`` takes calls."""
    with anyio.fail_after(10):
        while True:
            try:
                ((*_, found),) = await executor.collective_rpc("place")
            except ExecutorUnavailable:
                await anyio.sleep(0.002)
            else:
                assert found == generation
                return


async def test_a_group_that_died_is_rebuilt_under_a_new_generation():
    """Promise 9: and its story is told by events."""
    async with restarting() as executor:
        events = executor.events()
        await kill(executor)
        await is_up(executor, 2)
        assert executor.generation == 2
        assert executor.ranks[0].state == "ready"
        died, started, restarted = [await anext(events) for _ in range(3)]
        assert isinstance(died, WorkerDied)
        assert died.exit_code == 3
        assert (type(started), started.generation) == (WorkerStarted, 2)
        assert isinstance(restarted, GroupRestarted)
        assert restarted.generation == 2
        assert "rank 0" in restarted.reason
        assert await executor.check_health()


async def test_while_down_calls_fail_fast_and_may_be_tried_again():
    """Promise 9: the error says when; health says dead."""
    async with restarting(backoff=1.5) as executor:
        await kill(executor)
        with pytest.raises(ExecutorUnavailable, match="ended with exit code 3") as caught:
            await executor.collective_rpc("echo", (1,))
        assert 0 < caught.value.retry_after < 2.0
        with pytest.raises(ExecutorUnavailable):
            await executor.execute_model(ExecuteModel(1))
        report = await executor.check_health()
        assert report.ranks[0].state == "dead"
        await is_up(executor, 2)


async def test_the_restart_budget_ends():
    """G67: the death after the last restart is final, says so, and reaches the callbacks."""
    failures = []
    async with restarting(max_restarts=2) as executor:
        executor.add_failure_callback(failures.append)
        for generation in (1, 2):
            await kill(executor)
            assert failures == []
            await is_up(executor, generation + 1)
        pending = asyncio.ensure_future(executor.collective_rpc("async_block", (30.0,)))
        await anyio.lowlevel.checkpoint()
        await kill(executor)
        with pytest.raises(WorkerDied) as caught:
            await pending
        assert any("the 2 restarts allowed within 60 s are used up" in note for note in caught.value.__notes__)
        with pytest.raises(WorkerDied) as caught:
            await executor.collective_rpc("echo", (1,))
        assert any("the 2 restarts allowed within 60 s are used up" in note for note in caught.value.__notes__)
        assert any("failed for good" in note for note in caught.value.__notes__)
        await asyncio.sleep(0)
        assert [type(failure) for failure in failures] == [WorkerDied]


async def test_a_worker_that_dies_every_fifth_call_is_restarted_every_time():
    """G67: retryable errors while down, right answers after."""
    async with restarting(max_restarts=3) as executor:
        answers, turn = [], 0
        with anyio.fail_after(20):
            while len(answers) < 12:
                turn += 1
                try:
                    if turn % 5 == 0 and executor.generation < 4:
                        await executor.collective_rpc("end", (1,))
                    answers += await executor.collective_rpc("echo", (len(answers),))
                except (WorkerDied, ExecutorUnavailable):
                    await asyncio.sleep(0.001)
        assert answers == list(range(12))


async def test_a_restart_that_fails_is_tried_again():
    """It counts against the budget like any other."""
    async with restarting(Unlucky) as executor:
        await kill(executor)
        await is_up(executor, 3)


async def test_a_restart_that_keeps_failing_is_final():
    """With the last cause, of its own type."""
    failed = asyncio.Event()
    async with restarting(NeverAgain) as executor:
        executor.add_failure_callback(lambda _: failed.set())
        await kill(executor)
        with anyio.fail_after(10):
            await failed.wait()
        for _ in range(2):
            with pytest.raises(OSError, match="the device is gone") as caught:
                await executor.collective_rpc("echo", (1,))
            assert isinstance(caught.value, RemoteError)


async def test_steps_are_refused_while_a_new_group_is_built():
    """Also when the new group has not said yet what its workers can do."""
    async with restarting(SlowToConstruct) as executor:
        await kill(executor)
        with anyio.fail_after(10):
            await anyio.to_thread.run_sync(CONSTRUCTING_AGAIN.wait)
        with pytest.raises(ExecutorUnavailable):
            await executor.execute_model(ExecuteModel(1))
        with pytest.raises(ExecutorUnavailable):
            await executor.collective_rpc("echo", (1,))
        assert executor.ranks[0].state == "starting"
        await is_up(executor, 2)


CONSTRUCTING_AGAIN = threading.Event()


class SlowToConstruct(StepProbeWorker):
    def __init__(self, context, **kwargs):
        if context.generation > 1:
            CONSTRUCTING_AGAIN.set()
            time.sleep(0.1)
        super().__init__(context, **kwargs)


async def test_steps_of_an_old_generation_are_gone():
    """Later messages for them are refused, and ids may begin anew."""
    async with restarting() as executor:
        await executor.execute_model(ExecuteModel(5))
        await kill(executor)
        await is_up(executor, 2)
        with pytest.raises(StepStateError, match="step 5 was never executed"):
            await executor.sample_tokens(5)
        await executor.execute_model(ExecuteModel(1))
        assert (await executor.sample_tokens(1)).output[0] == 1


async def test_closing_while_down_ends_the_restart():
    """It does not wait for the back-off."""
    executor = await restarting(backoff=30.0)
    await kill(executor)
    began = time.monotonic()
    await executor.close()
    assert time.monotonic() - began < 5
    with pytest.raises(ExecutorClosed):
        await executor.collective_rpc("echo", (1,))


async def test_closing_while_a_restart_is_under_way_ends_it():
    """The half built group is taken down too."""
    executor = await restarting(NeverAgainSlow)
    await kill(executor)
    with anyio.fail_after(10):
        await anyio.to_thread.run_sync(LOADING_AGAIN.wait)
    await executor.close()
    assert executor.ranks[0].state == "stopped"


LOADING_AGAIN = threading.Event()


class NeverAgainSlow(ProbeWorker):
    def load_model(self):
        if self.context.generation > 1:
            LOADING_AGAIN.set()
            time.sleep(0.3)


async def test_a_death_during_the_start_is_the_starts_failure():
    """With its exit code and phase."""
    with pytest.raises(WorkerDied, match="ended with exit code 4 during load_model") as caught:
        await open_executor(ExecutorConfig(worker_cls=DiesLoading))
    assert caught.value.exit_code == 4


class DiesLoading(ProbeWorker):
    def load_model(self):
        raise SystemExit(4)


async def test_determine_available_memory_has_to_return_bytes():
    """What is no integer is refused with its rank."""
    from aexec.errors import ConfigError

    with pytest.raises(ConfigError, match=r"determine_available_memory returned 1.5 on rank 0: expected bytes"):
        await open_executor(ExecutorConfig(worker_cls=Vague))


class Vague(ProbeWorker):
    def determine_available_memory(self):
        return 1.5
