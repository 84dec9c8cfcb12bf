from __future__ import annotations

import asyncio
import gc
import os
import re
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path

import anyio
import pytest

from aexec import ExecuteModel, ExecutorConfig, open_executor
from aexec.actor import Actor, ActorSystem, Message, handles
from aexec.errors import AexecError, CallTimeout, ConfigError, ExecutorClosed, UnknownMethod, WrongLoop
from aexec.testing.workers import ProbeWorker, StepProbeWorker

pytestmark = pytest.mark.anyio


def probe(worker_cls=ProbeWorker, **settings):
    return open_executor(ExecutorConfig(worker_cls=worker_cls, **settings))


async def test_an_executor_is_awaited_or_entered():
    """Both are the same, but for who closes it."""
    executor = await probe()
    async with executor as same:
        assert same is executor
    with pytest.raises(ExecutorClosed):
        await executor.collective_rpc("echo", (1,))
    async with probe() as other:
        assert other.world_size == 1


async def test_a_closed_executor_is_not_entered():
    """The block would run without workers; an executor is opened anew instead."""
    executor = await probe()
    await executor.close()
    with pytest.raises(ExecutorClosed, match=r"open another one with `async with open_executor\(config\)`"):
        async with executor:
            raise AssertionError("it was entered")


async def test_an_attribute_that_is_called_is_named_as_one():
    """With the callable that reads it; it is found before anything is sent."""
    async with probe() as executor:
        with pytest.raises(UnknownMethod, match=r"attribute, which `lambda worker: worker\.context` reads"):
            await executor.collective_rpc("context")


async def test_an_executor_tells_where_it_stands():
    """Its repr is for people, its statistics for programs."""
    async with probe() as executor:
        assert repr(executor) == "<Executor uni: 1 rank, generation 1, ready, 0 pending>"
        await executor.collective_rpc("echo", (1,))
        with pytest.raises(CallTimeout):
            await executor.collective_rpc("block_until_cancelled", (20.0,), timeout=0.01)
        await executor.collective_rpc("echo", (1,))
        figures = executor.statistics()
        assert (figures.state, figures.open, figures.timeouts) == ("ready", 0, 1)
        (rank,) = executor.ranks
        assert (rank.rank, rank.pid, rank.state, rank.phase) == (0, os.getpid(), "ready", "idle")
    assert repr(executor).endswith("closed, 0 pending>")


async def test_a_dump_shows_calls_ranks_and_stacks():
    """G69: without waiting for anything."""
    async with probe() as executor:
        running = asyncio.ensure_future(executor.collective_rpc("block_until_cancelled", (20.0,)))
        queued = asyncio.ensure_future(executor.collective_rpc("echo", (1,)))
        with anyio.fail_after(10):
            while "in block_until_cancelled" not in executor.dump():  # noqa: ASYNC110 - nothing tells of it
                await anyio.sleep(0.002)
        dump = executor.dump()
        running.cancel()
        assert await queued == [1]
    assert "2 pending" in dump
    assert re.search(r"block_until_cancelled on rank 0, sent, for \d+\.\d", dump)
    assert "echo on rank 0, queued" in dump


async def test_a_timeout_shows_what_the_rank_was_doing(monkeypatch):
    """G69: the stack is in the error."""
    monkeypatch.setattr("aexec.executor.fanout.STACK_GRACE", 10.0)  # usually less than a machine may stand still
    async with probe() as executor:
        with pytest.raises(CallTimeout, match=r"rank 0 passed its limit of 1 s \(it had started") as caught:
            await executor.collective_rpc("block_until_cancelled", (20.0,), timeout=1.0)
    assert "in block_until_cancelled" in "\n".join(note for note in caught.value.__notes__ if "rank 0" in note)


class Ask(Message[object]):
    """Call a worker method from within an actor."""


class Asker(Actor):
    """Under the deadline of what it handles, so that its calls take the executor's mailbox."""

    def __init__(self, executor):
        self.executor = executor

    @handles(Ask)
    async def ask(self, message):
        try:
            return await self.executor.collective_rpc("no_such_method")
        except AexecError as error:
            return error


async def test_an_error_reads_the_same_by_the_short_way_and_by_the_mailbox():
    """It names what was called; which actor of ours raised it is nobody's business."""
    async with probe() as executor, ActorSystem(timeout=20.0) as system:
        with pytest.raises(AexecError, match="no_such_method") as short:
            await executor.collective_rpc("no_such_method")
        asker = await system.spawn(Asker, executor)
        by_mailbox = await asker.ask(Ask())
        assert (type(by_mailbox), str(by_mailbox)) == (type(short.value), str(short.value))
        assert getattr(by_mailbox, "__notes__", []) == getattr(short.value, "__notes__", [])


async def test_rpc_timeout_is_the_default_limit():
    """And a call's own limit replaces it."""
    async with probe(rpc_timeout=0.02) as executor:
        with pytest.raises(CallTimeout, match=r"limit of 0.02 s"):
            await executor.collective_rpc("block_until_cancelled", (20.0,))
        await executor.collective_rpc("block", (0.05,), timeout=5.0)


async def test_step_timeout_is_the_limit_of_a_step():
    """The step is not stopped by it: the next one has its own result."""
    go_on = threading.Event()

    class Holds(StepProbeWorker):
        def execute_model(self, step):
            assert go_on.wait(20.0)
            return super().execute_model(step)

    async with probe(Holds, step_timeout=1.0) as executor:
        await executor.execute_model(ExecuteModel(1))
        with pytest.raises(CallTimeout, match="sample_tokens on rank 0"):
            await executor.sample_tokens(1)
        go_on.set()
        await executor.execute_model(ExecuteModel(2))
        assert (await executor.sample_tokens(2)).output[0] == 2


async def test_health_needs_a_limit():
    """For silence is an answer."""
    async with probe() as executor:
        with pytest.raises(ConfigError, match="timeout of check_health is None"):
            await executor.check_health(None)


async def test_a_caller_under_a_deadline_passes_it_on():
    """DESIGN 3: the lesser of the two wins, and what waited in the queue never runs."""

    class Use(Message[float], frozen=True):
        pass

    class User(Actor):
        def __init__(self, executor):
            self.executor = executor

        @handles(Use)
        async def use(self, message: Use) -> float:
            await self.executor.collective_rpc("note", ("never",))
            return 0.0

    async with probe() as executor, ActorSystem() as system:
        blocked = asyncio.ensure_future(executor.collective_rpc("block", (0.2,)))
        user = await system.spawn(User, executor)
        with pytest.raises(CallTimeout):
            await user.ask(Use(), timeout=0.05)
        await blocked
        assert "never" not in (await executor.collective_rpc("read_log"))[0]


@pytest.mark.parametrize("means", ["cancel", "timeout", "move_on_after"])
async def test_a_cancelled_caller_ends_as_cancelled_and_alone(means):
    """G28: by whatever means, among twenty."""
    async with probe() as executor:

        async def call():
            return await executor.collective_rpc("block", (0.005,))

        async def limited():
            if means == "timeout":
                async with asyncio.timeout(0.01):
                    await call()
            else:
                with anyio.move_on_after(0.01) as scope:
                    await call()
                assert scope.cancelled_caught

        others = [asyncio.ensure_future(call()) for _ in range(19)]
        await asyncio.sleep(0)
        if means == "cancel":
            one = asyncio.ensure_future(call())
            await asyncio.sleep(0.01)
            one.cancel()
            await asyncio.wait([one])
            assert one.cancelled()
        elif means == "timeout":
            with pytest.raises(TimeoutError):
                await limited()
        else:
            await limited()
        assert await asyncio.gather(*others) == [[0]] * 19
        assert await executor.collective_rpc("echo", (1,)) == [1]
        assert executor.statistics().open == 0


async def test_callers_cancelled_in_the_same_turn_end_alone():
    """G28: two at once, one of them by two means at once."""
    async with probe() as executor:
        calls = [asyncio.ensure_future(executor.collective_rpc("block", (0.01,))) for _ in range(6)]

        async def doubly():
            with anyio.CancelScope() as scope:
                scopes.append(scope)
                await executor.collective_rpc("note", ("never",))

        scopes = []
        double = asyncio.ensure_future(doubly())
        await asyncio.sleep(0.005)
        calls[2].cancel()
        calls[4].cancel()
        scopes[0].cancel()
        double.cancel()
        await asyncio.wait([*calls, double])
        assert [call.cancelled() for call in (*calls, double)] == [False, False, True, False, True, False, True]
        log = (await executor.collective_rpc("read_log"))[0]
        assert log.count("blocked") == 4
        assert "never" not in log


async def test_closing_is_one_and_may_be_asked_for_by_many():
    """G34: 10 concurrent closes with 50 calls in flight; nothing but ExecutorClosed."""
    for _ in range(5):
        executor = await probe()
        calls = [asyncio.ensure_future(executor.collective_rpc("echo", (n,))) for n in range(50)]
        await asyncio.sleep(0)
        await asyncio.gather(*(executor.close() for _ in range(10)))
        results = await asyncio.gather(*calls, return_exceptions=True)
        assert all(isinstance(result, ExecutorClosed) or result == [n] for n, result in enumerate(results))
        await executor.close()


async def test_a_cancelled_close_goes_on():
    """Whoever asks next finds it done."""
    executor = await probe()
    go_on = threading.Event()
    blocked = asyncio.ensure_future(executor.collective_rpc(lambda _worker: go_on.wait(20.0)))
    await asyncio.sleep(0)
    closing = asyncio.ensure_future(executor.close())
    await asyncio.sleep(0)
    closing.cancel()
    await asyncio.wait([closing])
    assert closing.cancelled()
    go_on.set()
    await executor.close()
    await asyncio.wait([blocked])
    assert executor.ranks[0].state == "stopped"
    assert isinstance(blocked.exception(), ExecutorClosed)


async def test_a_failure_callback_may_close_the_executor():
    """It is no actor's task, so that it does not wait for itself."""
    executor = await probe()
    closed = asyncio.Event()

    async def close(failure):
        await executor.close()
        closed.set()

    executor.add_failure_callback(close)
    with pytest.raises(Exception, match="exit code 2"):
        await executor.collective_rpc("end", (2,))
    with anyio.fail_after(5):
        await closed.wait()
    await executor.close()


async def test_another_loop_is_told_whose_it_is():
    """G26: using an executor from a foreign loop raises at once, with both loops."""
    async with probe() as executor:

        def elsewhere():
            for use in (executor.collective_rpc("echo", (1,)), executor.close()):
                with pytest.raises(WrongLoop, match=r"belongs to .*Loop.* and was used from .*Loop"):
                    asyncio.run(use)

        await asyncio.to_thread(elsewhere)
        assert await executor.collective_rpc("echo", (1,)) == [1]


async def test_an_executor_that_is_dropped_warns():
    """And its thread ends with the loop at the latest."""
    executor = await probe()
    system = executor._system
    held = [executor]
    del executor
    with pytest.warns(ResourceWarning, match="was never closed: use 'async with open_executor"):
        held.clear()
    await system.aclose()


def workers_here():
    """Threads of workers; one that has said that it ends is here for a moment longer."""
    return [thread for thread in threading.enumerate() if thread.name.startswith("aexec-worker")]


def test_ten_rounds_of_asyncio_run_leave_nothing():
    """G26: no thread and no descriptor stays."""

    async def use():
        async with probe() as executor:
            assert await executor.collective_rpc("echo", (1,)) == [1]

    def run():
        asyncio.run(use())
        for thread in workers_here():
            thread.join(10.0)

    run()
    threads, descriptors = threading.active_count(), len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(10):
        run()
    assert threading.active_count() <= threads
    assert len(list(Path("/proc/self/fd").iterdir())) <= descriptors


@pytest.mark.parametrize("busy", [False, True])
def test_a_program_that_forgets_to_close_ends_soon(busy):
    """G27: within 3 s, with its own exit code and a ResourceWarning."""
    program = f"""
import asyncio, sys, time
from aexec import ExecutorConfig, open_executor
from aexec.testing.workers import ProbeWorker

async def main():
    executor = await open_executor(ExecutorConfig(worker_cls=ProbeWorker, close_grace=0.5))
    await executor.collective_rpc("echo", (1,))
    if {busy}:
        asyncio.ensure_future(executor.collective_rpc("block", (60.0,)))
        await asyncio.sleep(0.05)

asyncio.run(main())
print(time.monotonic())
sys.exit(7)
"""
    ended = subprocess.run(
        [sys.executable, "-W", "default::ResourceWarning", "-c", program],
        timeout=30,
        check=False,
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 7, ended.stderr
    assert "ResourceWarning" in ended.stderr
    assert time.monotonic() - float(ended.stdout) < 8  # one clock for all processes; wide, as a crowd may be waiting


def test_the_warning_is_no_error_where_it_cannot_be_raised():
    """A finalizer never raises."""

    async def use():
        return await probe()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        executor = asyncio.run(use())
        del executor
        gc.collect()
        while workers_here():  # one that is not quite through with its last job holds on to all that this was of
            gc.collect()
        gc.collect()
