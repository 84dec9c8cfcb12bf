from __future__ import annotations

import asyncio
import gc
import os
import signal
import statistics
import threading
import time
import weakref

import numpy as np
import pytest
import trio
import uvloop
from stopwatch import Stopwatch

from aexec import ExecuteModel, ExecutorConfig, ParallelConfig, open_executor
from aexec.errors import ConfigError, ExecutorClosed
from aexec.messages.batch import GrammarOutput
from aexec.testing.workers import ProbeWorker, StepProbeWorker

pytestmark = pytest.mark.anyio


class Reuses:
    """Answers with the same buffer each time."""

    def __init__(self, context):
        self.buffer = np.zeros(2)
        self.grammars = []

    def fill(self, value):
        self.buffer[:] = value
        return self.buffer

    def execute_model(self, step):
        self.fill(step.step)

    def sample_tokens(self, step_id, grammar):
        self.grammars.append(grammar.bitmask)
        return self.buffer

    def identity(self, value):
        return value


class Carried(dict):
    """The settings of a step of the probe worker, which can be watched."""


def uni(worker_cls=ProbeWorker, **settings):
    return open_executor(ExecutorConfig(backend="uni", worker_cls=worker_cls, **settings))


async def test_the_worker_lives_in_this_process_on_its_own_thread():
    """Same pid, another thread, named after its rank."""
    before = set(threading.enumerate())
    async with uni() as executor:
        assert [rank.pid for rank in executor.ranks] == [os.getpid()]
        assert await executor.collective_rpc("thread_name") == ["aexec-worker-0"]
        assert "aexec-worker-0" in {thread.name for thread in set(threading.enumerate()) - before}


async def test_nothing_is_serialised():
    """Arguments and replies are the very objects."""
    async with uni(Reuses) as executor:
        value = object()
        assert await executor.collective_rpc("identity", (value,)) == [value]


async def test_a_reused_buffer_is_copied_where_it_crosses():
    """SO-05, OUT-02: neither side sees the other go on."""
    async with uni(Reuses) as executor:
        (first,) = await executor.collective_rpc("fill", (1,))
        (second,) = await executor.collective_rpc("fill", (2,))
        assert (first.tolist(), second.tolist()) == ([1, 1], [2, 2])
        mask = np.ones((1, 1), dtype=np.int32)
        await executor.execute_model(ExecuteModel(3))
        sampling = asyncio.ensure_future(executor.sample_tokens(3, GrammarOutput(request_ids=["r"], bitmask=mask)))
        await asyncio.sleep(0)
        third = await sampling
        mask[:] = 0
        await executor.collective_rpc("fill", (4,))
        assert third.output.tolist() == [3, 3]
        (kept,) = await executor.collective_rpc(lambda worker: worker.grammars[0])
        assert kept.tolist() == [[1]]


async def test_several_ranks_need_another_backend():
    """The error names the layout and the remedy."""
    layout = ParallelConfig(tensor_parallel_size=2, pipeline_parallel_size=2)
    with pytest.raises(ConfigError, match=r"tensor_parallel_size=2 x pipeline_parallel_size=2 asks for 4: leave both"):
        await uni(parallel=layout)


async def test_an_environment_of_its_own_is_refused():
    """It shares this process; the error names the variables, and not their values."""
    with pytest.raises(ConfigError, match=r"ExecutorConfig.env sets A_KEY, TOKEN, and backend 'uni' shares") as caught:
        await uni(env={"TOKEN": "secret", "A_KEY": "x"})
    assert "secret" not in str(caught.value)
    assert "TOKEN" not in os.environ


async def test_progress_reaches_the_one_who_opens():
    """Phases and what a worker reports, on the loop of the caller."""
    told, threads = [], set()

    def progress(phase, done, total):
        told.append((phase, done, total))
        threads.add(threading.current_thread())

    async with open_executor(ExecutorConfig(worker_cls=Reports), progress=progress):
        pass
    assert told == [
        ("worker_init", 1, 1),
        ("__init__", 1, 1),
        ("load_model", 0, 1),
        ("weights", 1, 2),
        ("weights", 2, 2),
        ("load_model", 1, 1),
    ]
    assert threads == {threading.current_thread()}


class Reports:
    def __init__(self, context):
        self.progress = context.progress

    def load_model(self):
        self.progress("weights", 1, 2)
        self.progress("weights", 2, 2)


async def test_a_ticker_never_notices_the_worker():
    """G10, issue 2: while a worker blocks, the loop turns as it does alone."""
    async with uni() as executor:
        blocked = asyncio.ensure_future(executor.collective_rpc("block_until_cancelled", (20.0,)))
        gaps, last = [], time.monotonic()
        for _ in range(30):
            await asyncio.sleep(0.01)
            now = time.monotonic()
            gaps, last = [*gaps, now - last], now
        assert not blocked.done()
        blocked.cancel()
    assert statistics.median(gaps) < 0.1  # of many, as the machine may be held up by others in one of them


async def test_steps_are_launched_while_the_device_works():
    """The launch of the next step does not wait for the one before."""
    async with uni(StepProbeWorker) as executor:
        with Stopwatch() as watch:
            for step in range(1, 5):
                await executor.execute_model(ExecuteModel(step, {"seconds": 0.05}))
        assert watch.seconds < 0.15
        results = [await executor.sample_tokens(step) for step in range(1, 5)]
        assert [result.output[0] for result in results] == [1, 2, 3, 4]


@pytest.fixture(scope="session")
def uvloop_has_run():
    """Its first loop opens a pipe for the whole process."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(asyncio.sleep(0))


async def test_a_step_leaves_nothing_to_the_garbage_collector():
    """What a step carries goes with its result: no cycle of the executor's keeps it until the next collection."""
    gc.disable()
    try:
        async with uni(StepProbeWorker) as executor:
            carried = Carried()
            there = weakref.ref(carried)
            await executor.execute_model(ExecuteModel(1, carried, 1))
            del carried
            await executor.sample_tokens(1)
            for step in (2, 3):  # whoever holds the last step only is not at fault
                await executor.execute_model(ExecuteModel(step, None, 1))
                await executor.sample_tokens(step)
            assert there() is None
    finally:
        gc.enable()


@pytest.mark.usefixtures("uvloop_has_run")
def test_it_works_on_uvloop():
    """Calls, steps and a close."""

    async def use():
        async with uni(StepProbeWorker) as executor:
            assert await executor.collective_rpc("echo", (1,)) == [1]
            await executor.execute_model(ExecuteModel(1))
            return (await executor.sample_tokens(1)).output[0]

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        assert runner.run(use()) == 1


def test_another_kind_of_loop_is_refused():
    """Trio has no place for an executor, and is told so."""

    async def use():
        await uni()

    with pytest.raises(ConfigError, match="executors run on asyncio"):
        trio.run(use)


def test_it_works_in_a_thread_and_touches_no_signal_handler():
    """G20: ``asyncio.run`` in a thread of its own, two at once."""
    handlers = [signal.getsignal(number) for number in signal.valid_signals()]
    answers = []

    async def use():
        async with uni() as one, uni() as two:
            answers.append(await one.collective_rpc("echo", (1,)) + await two.collective_rpc("echo", (2,)))

    threads = [threading.Thread(target=asyncio.run, args=(use(),)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert answers == [[1, 2], [1, 2]]
    assert [signal.getsignal(number) for number in signal.valid_signals()] == handlers


async def test_a_thread_that_hangs_is_left_behind_and_said():
    """Promise 8: close keeps its budget, and the thread ends when it is back from C."""
    begun, go_on = threading.Event(), threading.Event()

    def hang(_worker):
        begun.set()
        assert go_on.wait(20.0)

    executor = await uni(close_grace=0.05)
    hanging = asyncio.ensure_future(executor.collective_rpc(hang))
    assert await asyncio.to_thread(begun.wait, 10.0)
    with Stopwatch() as watch:
        await executor.close()
    assert not go_on.is_set()
    assert watch.seconds < 0.3
    go_on.set()
    with pytest.raises(ExecutorClosed, match=r"closed while .*hang on rank 0 was pending"):
        await hanging
