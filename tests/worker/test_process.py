from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from aexec.errors import ActorStopped, ConfigError, ProtocolError, UnknownMethod
from aexec.messages.control import Dump, Greet, Ping, Revoke, Shutdown
from aexec.messages.process import PHASES, Ended, ProgressMade
from aexec.messages.step import SampleTokens, StepResult
from aexec.testing.faulty import FaultyWorker
from aexec.testing.processes import ProcessWatch
from aexec.worker.context import no_progress
from aexec.worker.exits import ORPHANED
from aexec.worker.remote import RemoteFailure, rebuild

PATIENCE = 20.0
FAULTY = "aexec.testing.faulty:FaultyWorker"


class Talkative(FaultyWorker):
    """Travels by value: no process can import it from here."""

    def __init__(self, context):
        super().__init__(context)
        context.progress("weights", 1, 2)

    async def leave_async(self, code):
        sys.exit(code)

    def leave(self, code):
        sys.exit(code)

    def coroutine(self, value):
        return self.async_echo(value)

    def hold_everything(self):
        """As native code that never lets go of the interpreter."""
        self.complain("holding\n")
        ctypes.PyDLL(None).sleep(60)

    async def shutdown(self):
        self.complain("farewell from the loop\n")


def test_a_process_reports_its_phases_and_says_hello(start):
    """PRC-05, G59: in order, from the first moment; and it goes by the name of its rank."""
    driver = start()
    hello = driver.greet()
    driver.value(driver.call("echo", 1))
    assert tuple(driver.phases) == PHASES
    assert (hello.rank, hello.pid, hello.worker) == (0, driver.process.pid, "FaultyWorker")
    assert Path(f"/proc/{hello.pid}/comm").read_text() == "aexec:worker 0\n"
    assert b"rank=0" in Path(f"/proc/{hello.pid}/cmdline").read_bytes()


def test_a_process_loads_no_torch_of_its_own(driver):
    """What a worker class does not import is not there, so that it starts in a moment."""
    loaded = driver.value(driver.call(lambda _: [name for name in ("torch", "zmq", "ray") if name in sys.modules]))
    assert loaded == []


def test_a_process_is_imported_in_a_moment():
    """It takes less than 0.4 s of processor time, of which neighbours on the same core cost more than half for a while."""
    measure = (
        "import time; began = time.process_time(); import aexec.worker.process; print(time.process_time() - began)"
    )
    command = [sys.executable, "-c", measure]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}  # as workers have it
    took: list[float] = []
    while len(took) < 12 and min(took, default=0.4) >= 0.4:
        took.append(float(subprocess.run(command, capture_output=True, check=True, env=environment).stdout))
    assert min(took) < 0.4, took


def test_the_environment_is_in_force_before_anything_is_imported(start):
    """PRC-19: set and removed in the child itself; the number of threads is a default."""
    driver = start(launch={"env": {"ADDED": "here", "KEPT": None}, "local_world_size": 10_000})
    found = [driver.value(driver.call("variable", name)) for name in ("ADDED", "KEPT", "OMP_NUM_THREADS")]
    assert found == ["here", None, os.environ.get("OMP_NUM_THREADS", "1")]


def test_a_rank_may_be_bound_to_processors(start):
    """PRC-20: from within, before threads are made."""
    cpu = min(os.sched_getaffinity(0))
    driver = start(launch={"cpus": (cpu,)})
    assert driver.value(driver.call(lambda _: os.sched_getaffinity(0))) == {cpu}


def test_classes_and_functions_travel_by_value(start):
    """G24: those of a script or a notebook, which no other process can import."""
    driver = start(Talkative, worker_init=[lambda: os.environ.update(PREPARED="yes")])
    assert driver.greet().worker == "Talkative"
    assert driver.value(driver.call("variable", "PREPARED")) == "yes"
    assert driver.value(driver.call(lambda worker, number: (type(worker).__name__, number), 3)) == ("Talkative", 3)


@pytest.mark.parametrize(
    ("worker_cls", "kwargs", "method", "error", "text"),
    [
        (FAULTY, {"fail_in": "__init__"}, "__init__ of FaultyWorker", Exception, "was told to fail"),
        (FAULTY, {"nope": 1}, "__init__", ConfigError, "nope=1"),
        ("no_such_module:Worker", {}, "import", ConfigError, "there is no module 'no_such_module'"),
    ],
)
def test_a_failed_construction_is_the_greeters(start, worker_cls, kwargs, method, error, text):
    """G32: with its type and its place, whenever one greets; and the process can be told to end."""
    driver = start(worker_cls, greet=False, worker_kwargs=kwargs)
    for _ in range(2):
        failure = driver.failure(driver.send(Greet(), "control"), "control")
        raised = rebuild(failure) if isinstance(failure, RemoteFailure) else failure
        assert isinstance(raised, error)
        assert text in str(raised)
        assert method in str(raised) + str(raised.__notes__)
    for line in ("work", "control"):
        assert "which has no worker" in str(driver.failure(driver.call("async_echo", 1, line=line), line))
    assert driver.ask(Shutdown(5.0)) is True
    assert driver.ends() == 0


def test_a_context_that_cannot_be_read_is_the_greeters(start):
    """An error of its own phase, and no dead process."""
    driver = start(greet=False, launch={"context": b"cnowhere\nNothing\n."})
    failure = driver.failure(driver.send(Greet(), "control"), "control")
    assert (failure.method, failure.type_path) == ("import", "builtins:ModuleNotFoundError")


def test_progress_is_told_from_within(start):
    """WRK-07: a long phase says how far it has come."""
    driver = start(Talkative, greet=False)
    assert driver.event(ProgressMade, "control") == ProgressMade("weights", 1, 2)


def test_a_context_travels_back(driver):
    """Its way to report progress stays behind."""
    context = driver.value(driver.call(lambda worker: worker.context))
    assert (context.rank, context.progress) == (0, no_progress)


def test_work_is_done_in_order_and_a_launch_does_not_wait(driver):
    """Plain methods take their turn between steps."""
    first, second = driver.step(seconds=0.2), driver.step()
    sent = [
        driver.send(first),
        driver.call("note", "between"),
        driver.send(second),
        driver.send(SampleTokens(first.step)),
        driver.send(SampleTokens(second.step)),
        driver.call("read_log"),
    ]
    while driver.ask(Ping()).phase != "execute_model":
        pass
    one, two, log = [driver.value(call) for call in sent[-3:]]
    assert (one.step, one.output[0], two.step, two.output[0]) == (first.step, first.step, second.step, second.step)
    forwards = [[("execute", step.step), ("executed", step.step)] for step in (first, second)]
    assert log == [*forwards[0], "between", *forwards[1], ("sample", first.step), ("sample", second.step)]


def test_samplings_run_in_step_order(driver):
    """One that is asked for before an older one waits for it."""
    first, second = driver.step(), driver.step()
    driver.send(first)
    driver.send(second)
    later = driver.send(SampleTokens(second.step))
    older = driver.send(SampleTokens(first.step))
    driver.value(later)
    assert [frame.call for frame in driver.heard["work"] if frame.call in (older, later)] == [older, later]


def test_a_failed_forward_pass_surfaces_at_its_sampling(driver):
    """And holds up no other step."""
    bad, good = driver.step(fail="no memory"), driver.step()
    driver.send(bad)
    driver.send(good)
    waiting = driver.send(SampleTokens(good.step))
    failure = driver.failure(driver.send(SampleTokens(bad.step)))
    assert (failure.method, failure.text, failure.rank) == ("execute_model", "no memory", 0)
    assert failure.traceback_text.count("File ") == 1
    assert driver.value(waiting).output[0] == good.step
    again = driver.failure(driver.send(SampleTokens(bad.step)))
    assert "was dropped: its execute_model raised ProbeError" in str(again)


def test_a_whole_step_is_answered_once(driver):
    """With its result, or its error."""
    whole = driver.step(0, value="done")
    assert driver.value(driver.send(whole)) == StepResult(whole.step, "done")
    assert f"step {whole.step} was sent twice" in str(driver.failure(driver.send(whole)))
    assert driver.failure(driver.send(driver.step(0, fail="no"))).text == "no"


def test_async_methods_run_beside_plain_ones_and_after_the_steps_before_them(driver):
    """On the other thread; never ahead of an accepted step, failed ones included."""
    blocked = driver.call("block", 0.4)
    assert driver.value(driver.call("async_echo", 1, line="control"), "control") == 1
    step = driver.step(seconds=0.1, fail="no")
    driver.send(step)
    between = driver.call("async_block", 0.0, "between", line="control", after=driver.steps_sent)
    last = driver.call("async_block", 0.0, "last", line="control", after=driver.steps_sent + 1)
    driver.value(between, "control")
    driver.send(SampleTokens(step.step))
    driver.value(last, "control")
    assert driver.value(blocked) == 0
    assert driver.value(driver.call("read_log")) == ["blocked", ("execute", step.step), "between", "last"]


def test_a_coroutine_from_a_plain_method_is_awaited(start):
    """By the control thread, which answers."""
    driver = start(Talkative)
    assert driver.value(driver.call("coroutine", 5), "control") == 5


def test_each_answer_is_an_answer(driver):
    """G51, G52: unknown methods, wrong lines, values that cannot travel; and the worker lives on."""
    assert isinstance(driver.failure(driver.call("nope")), UnknownMethod)
    assert isinstance(driver.failure(driver.call("nope", line="control"), "control"), UnknownMethod)
    assert isinstance(driver.failure(driver.call("echo", 1, line="control"), "control"), ProtocolError)
    assert isinstance(driver.failure(driver.send(Ping())), ProtocolError)
    assert isinstance(driver.failure(driver.send(driver.step(), "control"), "control"), ProtocolError)
    assert "lock" in str(driver.failure(driver.call("unportable")))
    assert "lock" in str(driver.failure(driver.call(_async_lock, line="control"), "control"))
    assert driver.value(driver.call("echo", 2)) == 2


async def _async_lock(worker):
    return worker.unportable()


def test_a_queued_call_that_is_revoked_never_runs(driver):
    """G29: one that runs is told, and so is an async one."""
    running = driver.call("block_until_cancelled", 15.0)
    queued = driver.call("note", "never")
    waiting = driver.call("async_block", 30.0, line="control")
    driver.reaches("block_until_cancelled")
    assert driver.ask(Revoke(queued)) is True
    assert driver.ask(Revoke(running)) is False
    assert isinstance(driver.failure(queued), ActorStopped)
    assert driver.ask(Revoke(waiting)) is False
    assert isinstance(driver.failure(waiting, "control"), ActorStopped)
    assert driver.ask(Revoke(waiting)) is False
    assert sorted(driver.value(driver.call("read_log")), key=str) == [True, "waited cancelled"]


def test_the_liveness_lane_answers_during_native_code(start):
    """G69: phase, step, age, and the stack with the name that hangs."""
    driver = start()
    step = driver.step()
    driver.send(step)
    driver.call("stuck", 20.0)
    driver.call("echo", 1)
    pong = driver.reaches("stuck")
    assert (pong.step, pong.queued) == (step.step, 1)
    hanging = driver.call("async_block", 30.0, line="control")
    while "in async_block" not in (dump := driver.ask(Dump())):
        pass
    assert dump.startswith("thread main, in stuck:\n")
    assert "in native_sleep" in dump
    assert "worker/device.py" not in dump
    assert driver.ask(Revoke(hanging)) is False


def test_a_large_answer_holds_up_no_other_line(start):
    """Nobody reads it, and the control line answers all the same."""
    driver = start()
    sizes = [driver.call("zeros", 8_000_000) for _ in range(4)]
    assert driver.ask(Ping()).rank == 0
    assert [len(driver.value(call)) for call in sizes] == [8_000_000] * 4


@pytest.mark.parametrize(
    ("method", "line", "code", "exit_code"),
    [("leave", "work", 3, 3), ("leave_async", "control", None, 0), ("leave_async", "control", "some text", 1)],
)
def test_sys_exit_ends_the_process_and_is_told(start, method, line, code, exit_code):
    """G30: before it happens, with what the code was called for; exit code 0 too."""
    driver = start(Talkative)
    driver.call(method, code, line=line)
    assert driver.event(Ended, line) == Ended(exit_code=exit_code, phase=method)
    assert driver.ends() == exit_code
    assert ("some text" in driver.process.stderr.read()) is (code == "some text")


def test_sys_exit_during_a_step_tells_the_step(start):
    """Its phase and its number."""
    driver = start()
    step = driver.step(exit=9)
    driver.send(step)
    assert driver.event(Ended) == Ended(exit_code=9, phase="execute_model", step=step.step)
    assert driver.ends() == 9


def test_sys_exit_during_the_construction_is_told(start):
    """A worker that gives up in its import or its constructor."""
    driver = start(greet=False, worker_init=[lambda: sys.exit(6)])
    assert driver.event(Ended) == Ended(exit_code=6, phase="worker_init")
    assert driver.ends() == 6


@pytest.mark.parametrize("line", ["work", "control"])
@pytest.mark.parametrize("busy", [False, True])
def test_a_closed_line_ends_the_process_at_once(start, line, busy):
    """G18: whichever line it is, and although the main thread is in native code."""
    driver = start()
    if busy:
        driver.call("native_sleep", 60.0)
        driver.reaches("native_sleep")
    driver.lines[line].close()
    assert driver.ends() == ORPHANED


@pytest.mark.parametrize("method", ["native_sleep", "hold_everything"])
def test_the_end_of_the_driver_is_the_end_of_the_process(start, method):
    """G18, PRC-03: in native code, even in such that holds the interpreter's lock; with both lines still open."""
    driver = start(Talkative, under_shell=True)
    worker = driver.greet().pid
    with ProcessWatch([worker]) as watch:
        driver.call(method, *([60.0] if method == "native_sleep" else []))
        if method == "hold_everything":
            assert driver.process.stderr.readline() == "holding\n"
        driver.process.kill()
        assert watch.alive(PATIENCE) == []


def test_a_process_whose_parent_is_gone_does_not_begin(start):
    """PRC-04: it was adopted before it could ask to die with its parent."""
    driver = start(greet=False, launch={"parent_pid": 1 << 22})
    assert driver.ends() == ORPHANED


def test_a_process_whose_driver_is_gone_does_not_begin(start):
    """Although its parent, a fork server, is there."""
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    driver = start(greet=False, launch={"driver_pid": gone.pid})
    assert driver.ends() == ORPHANED


def test_control_c_is_left_to_the_driver(start):
    """G19: no stack from each worker."""
    driver = start()
    driver.process.send_signal(signal.SIGINT)
    assert driver.value(driver.call("echo", 1)) == 1
    assert driver.ask(Shutdown(5.0)) is True
    assert driver.ends() == 0
    assert driver.process.stderr.read() == ""


def test_what_is_written_to_standard_error_comes_as_it_is(start):
    """Past Python's own buffers, and with the stack of a native crash."""
    driver = start()
    driver.call("complain", "woe is me\n")
    driver.call("die", "SIGSEGV")
    assert driver.ends() == -signal.SIGSEGV
    text = driver.process.stderr.read()
    assert text.startswith("woe is me\nFatal Python error: Segmentation fault")
    assert "in die" in text


def test_log_records_have_the_rank(start):
    """G59: without anything in front of them, so that JSON stays JSON."""
    driver = start(launch={"log_level": "warning", "log_format": "json", "rank": 0})
    driver.value(driver.call(_warn))
    assert '"event": "so hot", "degrees": 90, "rank": 0' in driver.process.stderr.readline()


def _warn(_):
    from aexec.observe import get_logger

    get_logger("aexec.model").warning("so hot", degrees=90)


def test_work_runs_under_inference_mode_once_torch_is_loaded(start):
    """Device work needs no gradients; whoever wants them says so in the class."""
    driver = start(worker_init=[_fake_torch])
    assert driver.value(driver.call(_inference)) == 1
    assert driver.value(driver.call(_inference)) == 1


def _fake_torch():
    """A module with a context manager that counts."""
    import contextlib
    import types

    torch = types.ModuleType("torch")
    torch.depth = 0

    @contextlib.contextmanager
    def inference_mode():
        torch.depth += 1
        yield
        torch.depth -= 1

    torch.inference_mode = inference_mode
    sys.modules["torch"] = torch


def _inference(_):
    return sys.modules["torch"].depth


def test_a_shutdown_gives_up_what_is_queued_and_runs_the_hook(start, tmp_path):
    """Promise 8: the running work ends, the hook runs, the process ends by itself."""
    farewell = tmp_path / "farewell"
    driver = start(worker_kwargs={"farewell": str(farewell)})
    running = driver.call("block", 0.3)
    never = driver.call(lambda _, path: path.write_text("it ran"), tmp_path / "never")
    hanging = driver.call("async_block", 30.0, line="control")
    driver.reaches("block")
    assert driver.ask(Shutdown(10.0)) is True
    assert driver.value(running) == 0
    assert isinstance(driver.failure(hanging, "control"), ActorStopped)
    assert driver.ends() == 0
    assert farewell.read_text() == "0\n"
    assert not (tmp_path / "never").exists()
    assert never not in [frame.call for frame in driver.heard["work"]]


def test_a_shutdown_tells_the_method_that_runs(start):
    """A long one that looks for it ends early, well within the grace."""
    driver = start()
    running = driver.call("block_until_cancelled", 30.0)
    driver.reaches("block_until_cancelled")
    assert driver.ask(Shutdown(10.0)) is True
    assert driver.value(running) is None
    assert driver.ends() == 0


def test_a_shutdown_that_takes_too_long_says_so(start):
    """The process is there until somebody ends it."""
    driver = start()
    driver.call("native_sleep", 60.0)
    driver.reaches("native_sleep")
    assert driver.ask(Shutdown(0.1)) is False
    assert driver.ask(Shutdown(0.1)) is False
    assert driver.ask(Ping()).phase == "native_sleep"
    assert driver.process.poll() is None


def test_a_thread_of_worker_code_does_not_keep_the_process(start):
    """The loop's own executor cannot be stopped: the process ends all the same."""
    driver = start()
    driver.call(_block_a_thread, line="control")
    while "_block_a_thread" not in driver.ask(Dump()):
        pass
    assert driver.ask(Shutdown(5.0)) is True
    assert driver.ends() == 0


async def _block_a_thread(worker):
    import asyncio

    await asyncio.to_thread(worker.native_sleep, 60.0)


def test_an_async_shutdown_hook_runs_on_the_loop(start):
    """As other async methods do."""
    driver = start(Talkative)
    assert driver.ask(Shutdown(10.0)) is True
    assert driver.ends() == 0
    assert driver.process.stderr.read() == "farewell from the loop\n"


@pytest.mark.parametrize("kind", ["plain", "async"])
def test_a_failed_shutdown_hook_does_not_keep_the_process(start, kind):
    """It is logged."""
    driver = start({"plain": BadEnd, "async": BadAsyncEnd}[kind])
    assert driver.ask(Shutdown(10.0)) is True
    assert driver.ends() == 0
    assert "the worker's shutdown hook failed" in driver.process.stderr.read()


class BadEnd:
    """Cannot even end."""

    def __init__(self, context):
        self.context = context

    def shutdown(self):
        raise RuntimeError("not even that")


class BadAsyncEnd(BadEnd):
    """Nor on the loop."""

    async def shutdown(self):
        raise RuntimeError("not even that")
