from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
import threading
import weakref

import anyio
import pytest

from aexec.worker import cancelled
from aexec.worker.compute import ComputeThread

pytestmark = pytest.mark.anyio


@pytest.fixture
async def thread():
    thread = ComputeThread("aexec-test")
    thread.start(asyncio.get_running_loop().call_soon_threadsafe)
    yield thread
    assert await thread.close(5.0)


class Result:
    """Collects what jobs report, and lets a test wait for it."""

    def __init__(self, wanted=1):
        self.reports = []
        self._wanted = wanted
        self._event = asyncio.Event()

    def done(self, value, error):
        self.reports.append(error or value)
        if len(self.reports) == self._wanted:
            self._event.set()

    async def wait(self):
        with anyio.fail_after(10):
            await self._event.wait()
        return self.reports


async def test_jobs_run_first_in_first_out_on_one_thread(thread):
    """And report on the loop, in that order."""
    result = Result(20)
    idents = set()
    for number in range(20):
        thread.submit("count", lambda number=number: (idents.add(threading.get_ident()), number)[1], result.done)
    assert await result.wait() == list(range(20))
    assert len(idents) == 1
    assert idents != {threading.get_ident()}


async def test_an_exception_is_the_jobs_own(thread):
    """The thread goes on with the next."""
    result = Result(2)
    thread.submit("divide", lambda: 1 // 0, result.done)
    thread.submit("divide", lambda: 4 // 2, result.done)
    error, value = await result.wait()
    assert isinstance(error, ZeroDivisionError)
    assert value == 2


async def test_the_pulse_is_read_without_the_threads_help(thread):
    """G10: phase, step and queue are known while a job blocks, and the loop is free."""
    gate, begun, result = threading.Event(), asyncio.Event(), Result(2)
    loop = asyncio.get_running_loop()
    thread.submit("hang", lambda: (loop.call_soon_threadsafe(begun.set), gate.wait(10)), result.done, 7)
    thread.submit("next", lambda: None, result.done)
    await begun.wait()
    figures = thread.statistics()
    assert (figures.phase, figures.step, figures.queued, figures.done) == ("hang", 7, 1, 0)
    assert repr(thread).startswith("<ComputeThread aexec-test: hang for ")
    gate.set()
    await result.wait()
    figures = thread.statistics()
    assert (figures.phase, figures.step, figures.queued, figures.done) == ("idle", 7, 0, 2)
    assert figures.busy_seconds > 0


async def test_a_stack_names_the_function_that_hangs(thread):
    """G69: and not aexec's own frames."""
    gate, begun, result = threading.Event(), asyncio.Event(), Result()
    loop = asyncio.get_running_loop()

    def stuck_in_a_collective():
        loop.call_soon_threadsafe(begun.set)
        gate.wait(10)

    assert thread.stack() == "thread aexec-test is idle\n"
    thread.submit("execute_model", stuck_in_a_collective, result.done)
    await begun.wait()
    stack = thread.stack()
    gate.set()
    await result.wait()
    assert stack.startswith("thread aexec-test, in execute_model:\n")
    assert "in stuck_in_a_collective" in stack
    assert "in _work" not in stack


async def test_a_job_that_has_not_begun_can_be_cancelled(thread):
    """G29: it never runs, and never reports."""
    gate, ran, result = threading.Event(), [], Result(2)
    thread.submit("hold", lambda: gate.wait(10), result.done)
    job = thread.submit("run", lambda: ran.append("cancelled job"), result.done)
    thread.submit("run", lambda: ran.append("next job"), result.done)
    assert job.cancel()
    gate.set()
    await result.wait()
    assert ran == ["next job"]


async def test_a_job_that_runs_can_tell_that_it_was_cancelled(thread):
    """G29: a long method may poll a flag."""
    begun, result = asyncio.Event(), Result()
    loop = asyncio.get_running_loop()
    told = threading.Event()

    def work():
        loop.call_soon_threadsafe(begun.set)
        told.wait(10)
        return cancelled()

    job = thread.submit("work", work, result.done)
    await begun.wait()
    assert not job.cancel()
    told.set()
    assert await result.wait() == [True]
    assert not cancelled()


async def test_sys_exit_in_a_job_ends_the_thread_and_says_so():
    """What was queued behind it never runs."""
    thread, ran, deaths = ComputeThread("aexec-test"), [], Result()
    thread.start(asyncio.get_running_loop().call_soon_threadsafe, deaths.done)
    thread.submit("leave", lambda: sys.exit(3), lambda *_: None, 5)
    thread.submit("next", lambda: ran.append(1), lambda *_: None)
    (pulse,) = await deaths.wait()
    assert (pulse.phase, pulse.step) == ("leave", 5)
    assert await thread.close(5.0)
    assert ran == []


async def test_closing_waits_for_the_job_at_hand_within_its_grace():
    """A thread cannot be killed: past the grace one in C is left, and ends when it is back."""
    thread, gate = ComputeThread("aexec-test"), threading.Event()
    thread.start(asyncio.get_running_loop().call_soon_threadsafe)
    thread.submit("hang", lambda: gate.wait(10), lambda *_: None)
    assert not await thread.close(0.05)
    gate.set()
    assert await thread.close(5.0)
    assert await thread.close(5.0)
    thread._thread.join(5)
    assert thread.stack() == "thread aexec-test is not running\n"


async def test_a_job_in_python_is_ended_past_the_grace():
    """It is no death of the thread, its ``finally`` runs, what is queued does not, and who waits is told."""
    thread, begun, result, seen = ComputeThread("aexec-test"), asyncio.Event(), Result(), []
    loop = asyncio.get_running_loop()

    def spin():
        try:
            loop.call_soon_threadsafe(begun.set)
            while True:
                pass
        finally:
            seen.append("cleaned up")

    thread.start(loop.call_soon_threadsafe, lambda *_: seen.append("died"))
    thread.submit("spin", spin, result.done)
    thread.submit("next", lambda: seen.append("next"), result.done)
    await begun.wait()
    assert not await thread.close(0.0)
    (error,) = await result.wait()
    assert (type(error), str(error)) == (TimeoutError, "spin took longer than the grace of its thread's end")
    assert await thread.close(5.0)
    assert seen == ["cleaned up"]


async def test_queued_jobs_can_be_discarded(thread):
    """A shutdown does not work off what nobody waits for."""
    gate, ran, result = threading.Event(), [], Result()
    begun = asyncio.Event()
    loop = asyncio.get_running_loop()
    thread.submit("hold", lambda: (loop.call_soon_threadsafe(begun.set), gate.wait(10)), result.done)
    thread.submit("run", lambda: ran.append(1), result.done)
    await begun.wait()
    assert thread.discard_queued() == 1
    gate.set()
    await result.wait()
    assert ran == []


async def test_a_thread_that_was_not_started_takes_no_jobs():
    """And closes at once."""
    thread = ComputeThread("aexec-test")
    with pytest.raises(RuntimeError, match="aexec-test was not started"):
        thread.submit("run", lambda: None, lambda *_: None)
    assert await thread.close(1.0)
    assert "not running" in thread.stack()


async def test_an_idle_thread_holds_on_to_nothing():
    """Results and arguments are freed, and the thread ends with its owner."""
    thread, result = ComputeThread("aexec-test"), Result()
    thread.start(asyncio.get_running_loop().call_soon_threadsafe)

    class Tensor:
        pass

    tensor = Tensor()
    thread.submit("use", lambda tensor=tensor: type(tensor), result.done)
    await result.wait()
    gone = weakref.ref(tensor)
    del tensor
    gc.collect()
    assert gone() is None
    inner = thread._thread
    del thread
    gc.collect()
    inner.join(5)
    assert not inner.is_alive()


async def test_a_failed_job_holds_on_to_nothing():
    """Its exception is the receiver's alone: no cycle keeps its frames alive."""
    thread, result = ComputeThread("aexec-test"), Result()
    thread.start(asyncio.get_running_loop().call_soon_threadsafe)

    class Tensor:
        pass

    def fail():
        tensor = Tensor()
        seen.append(weakref.ref(tensor))
        raise ValueError("bad")

    seen = []
    gc.disable()
    try:
        thread.submit("fail", fail, result.done)
        await result.wait()
        result.reports.clear()
        await thread.close(5.0)
        assert seen[0]() is None
    finally:
        gc.enable()


async def test_inference_mode_is_entered_once_torch_is_there(monkeypatch):
    """By choice of the worker, and without importing torch."""
    entered = []

    class FakeTorch:
        class inference_mode:  # noqa: N801 - torch's name
            def __enter__(self):
                entered.append("in")

            def __exit__(self, *_):
                entered.append("out")

    thread, result = ComputeThread("aexec-test"), Result(3)
    thread.start(asyncio.get_running_loop().call_soon_threadsafe)
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    thread.submit("before", lambda: None, result.done)
    thread.allow_inference_mode()
    thread.submit("import", lambda: monkeypatch.setitem(sys.modules, "torch", FakeTorch), result.done)
    thread.submit("use", lambda: list(entered), result.done)
    assert (await result.wait())[-1] == ["in"]
    await thread.close(5.0)
    assert entered == ["in", "out"]


@pytest.mark.parametrize("work", ["None", "time.sleep(60)", "sum(0 for _ in iter(int, 1))"])
def test_a_forgotten_thread_does_not_keep_the_interpreter(work):
    """G27: the program ends soon and with its own exit code, whether a job runs or not."""
    program = f"""
import sys, time
from aexec.worker.compute import ComputeThread
thread = ComputeThread("forgotten")
thread.start(lambda function, *args: function(*args))
thread.submit("work", lambda: {work}, lambda *_: None)
sys.exit(7)
"""
    ended = subprocess.run([sys.executable, "-c", program], timeout=20, check=False, capture_output=True)
    assert (ended.returncode, ended.stderr) == (7, b"")


@pytest.mark.parametrize("close", ["pass", "asyncio.run(thread.close(0.0))"])
def test_a_program_ends_as_it_likes_while_torch_computes(close):
    """And not by SIGABRT, as it would when the thread came back from torch after the interpreter's end."""
    program = f"""
import asyncio, sys, threading, torch
from aexec.worker.compute import ComputeThread
begun, thread = threading.Event(), ComputeThread("busy")

def work():
    some = torch.ones(100, 100)
    while True:
        some = torch.tanh(some @ some)
        begun.set()

thread.start(lambda function, *args: function(*args))
thread.submit("work", work, lambda *_: None)
begun.wait()
{close}
sys.exit(7)
"""
    ended = subprocess.run([sys.executable, "-c", program], timeout=60, check=False, capture_output=True)
    assert (ended.returncode, ended.stderr) == (7, b"")
