"""A worker in a process that somebody else has made: it comes for its lines, and leaves alone what is not its own."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from aexec.messages.control import Dump, Ping, Shutdown
from aexec.messages.process import PHASES, Ended
from aexec.messages.step import SampleTokens
from aexec.testing.faulty import FaultyWorker
from aexec.testing.processes import ProcessWatch
from aexec.worker.exits import ORPHANED

PLACES = pytest.mark.parametrize("where", ["here", "elsewhere"])


class Leaving(FaultyWorker):
    """Ends its process."""

    def leave(self, code):
        sys.exit(code)


@pytest.fixture
def foreign(start):
    """Starts a process that dials, and greets it."""

    def make(where="here", *args, **given):
        return start(foreign=(where, *(args or ("main",))), **{"launch": {"driver_pid": 0}} | given)

    return make


@PLACES
def test_a_worker_that_came_for_its_lines_is_like_any_other(foreign, where):
    """Phases, hello, steps, plain and async methods, large values, the liveness lane, and its end when asked."""
    driver = foreign(where)
    step = driver.step()
    driver.send(step)
    assert driver.value(driver.send(SampleTokens(step.step))).step == step.step
    assert driver.value(driver.call("echo", 1)) == 1
    assert driver.value(driver.call("async_echo", 2, line="control"), "control") == 2
    assert len(driver.value(driver.call("zeros", 3_000_000))) == 3_000_000
    assert driver.ask(Ping()).phase == "idle"
    assert tuple(driver.phases) == PHASES
    assert driver.ask(Shutdown(5.0)) is True
    assert driver.ends() == 0
    assert driver.process.stderr.read() == "served: [0]\n"


@PLACES
@pytest.mark.parametrize("line", ["work", "control"])
def test_the_end_of_a_line_is_the_end_of_the_process(foreign, where, line):
    """Even while its device thread is in native code; on another node it is the only sign there is."""
    driver = foreign(where)
    driver.call("native_sleep", 60.0)
    driver.reaches("native_sleep")
    driver.lines[line].close()
    assert driver.ends() == ORPHANED


def test_a_drivers_pid_means_nothing_on_another_node(foreign):
    """A process there may have it, or none."""
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    driver = foreign("elsewhere", launch={"driver_pid": gone.pid, "parent_pid": gone.pid})
    assert driver.value(driver.call("echo", 1)) == 1


def test_on_the_drivers_node_its_pid_is_taken_from_the_line(tmp_path):
    """It is right whatever the launch says, and its end is seen although somebody else keeps the lines open."""
    program = tmp_path / "driver.py"
    program.write_text(DRIVER)
    driver = subprocess.Popen([sys.executable, program, Path(__file__).parent], stdout=subprocess.PIPE, text=True)
    with driver:
        worker, keeper = (int(pid) for pid in driver.stdout.readline().split())
        try:
            with ProcessWatch([worker]) as watch:
                driver.kill()
                assert watch.alive(20.0) == []
        finally:
            os.kill(keeper, signal.SIGKILL)


DRIVER = """
import os, sys, threading, subprocess
sys.path.insert(0, sys.argv[1])
import conftest
driver = conftest.ProcessDriver("aexec.testing.faulty:FaultyWorker", {"driver_pid": 0}, foreign=("here", "main"))
driver.__enter__()
driver.greet()
for line in driver.lines.values():
    os.set_inheritable(line._link.fileno(), True)
keeper = subprocess.Popen(["sleep", "60"], close_fds=False, stdout=subprocess.DEVNULL)
print(driver.process.pid, keeper.pid, flush=True)
threading.Event().wait()
"""


def test_what_belongs_to_whoever_made_the_process_is_left_alone(foreign):
    """Its signal handlers, the signal that comes when its parent ends, and its import path, which only grows."""

    def signal_of_the_parents_end(_):  # in here it travels by value: under `python -m pytest` this file is a module
        number = ctypes.c_int(-1)
        ctypes.CDLL(None).prctl(2, ctypes.byref(number))
        return number.value

    driver = foreign(launch={"driver_pid": 0, "sys_path": ("/of/the/driver", sys.path[-1])})
    handlers = driver.value(driver.call(lambda _: [str(signal.getsignal(n)) for n in (signal.SIGTERM, signal.SIGINT)]))
    assert "<lambda>" in handlers[0]
    assert "default_int_handler" in handlers[1]
    path = driver.value(driver.call(lambda _: list(sys.path)))
    assert path.index("/of/its/own") < path.index("/of/the/driver")
    assert path.count(sys.path[-1]) == 1
    assert driver.value(driver.call(signal_of_the_parents_end)) == 0
    driver.process.send_signal(signal.SIGTERM)
    assert driver.value(driver.call("echo", 1)) == 1
    assert driver.ask(Shutdown(5.0)) is True
    assert "handled by whoever made it\n" in driver.process.stderr.read()


def test_it_may_serve_on_any_thread(foreign):
    """Whoever has made the process may need its main thread: the one that serves is the device's, and is dumped."""
    driver = foreign("here", "other")
    driver.call("native_sleep", 0.5)
    driver.reaches("native_sleep")
    assert "native_sleep" in driver.ask(Dump())
    assert driver.ask(Shutdown(5.0)) is True
    assert driver.ends() == 0


@PLACES
def test_sys_exit_is_told_and_left_to_whoever_made_the_process(foreign, where):
    """The driver hears of it first; the exit code comes back from the call."""
    driver = foreign(where, worker_cls=Leaving)
    driver.call("leave", 7)
    assert driver.event(Ended) == Ended(exit_code=7, phase="leave")
    assert driver.ends() == 7
    assert driver.process.stderr.read() == "served: [7]\n"


def test_another_road_stands_for_the_work_line(foreign):
    """All that the device thread receives and answers goes by it, and the context has what the process adds."""
    driver = foreign("here", "main", "road")
    assert driver.value(driver.call("echo", "a")) == (1, "a")
    assert driver.value(driver.call("echo", "b")) == (2, "b")
    assert driver.value(driver.call(lambda worker: worker.context.node_id)) == (3, "completed")
    assert driver.ask(Shutdown(5.0)) is True
    assert driver.ends() == 0
