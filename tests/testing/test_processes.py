from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from aexec.testing.processes import ProcessWatch, cpu_seconds, descendants, state_of

SLEEPER = [sys.executable, "-S", "-c", "import time; time.sleep(60)"]
BUSY = [sys.executable, "-S", "-c", "while True: pass"]


@pytest.fixture
def sleeper():
    with subprocess.Popen(SLEEPER) as process:
        yield process
        process.kill()


def test_a_watch_sees_processes_end(sleeper):
    """Whoever their parent is, and whether anybody has waited for them or not."""
    with ProcessWatch([sleeper.pid, sleeper.pid]) as watch:
        assert watch.alive() == [sleeper.pid]
        assert repr(watch) == f"<ProcessWatch: [{sleeper.pid}] alive of 1>"
        sleeper.kill()
        assert watch.alive(5.0) == []
    sleeper.wait()
    with ProcessWatch([sleeper.pid]) as watch:
        assert watch.alive() == []


def test_descendants_are_those_that_run(sleeper):
    """Children of children too; one that has ended is left out although nobody has waited for it."""
    shell = ["sh", "-c", '"$@" & wait', "sh", *SLEEPER]
    with subprocess.Popen(shell) as process, ProcessWatch([process.pid, sleeper.pid]) as watch:
        while len(below := descendants(process.pid)) < 1:
            watch.alive(0.01)
        assert {sleeper.pid, process.pid, *below} <= set(descendants())
        os.kill(below[0], signal.SIGKILL)
        sleeper.kill()
        assert watch.alive(5.0) == []
        assert not {sleeper.pid, process.pid} & set(descendants())


def test_a_state_is_a_letter(sleeper):
    """Stopped, or ended."""
    with ProcessWatch([sleeper.pid]) as watch:
        sleeper.send_signal(signal.SIGSTOP)
        while state_of(sleeper.pid) != "T":
            watch.alive(0.005)
        sleeper.kill()
        watch.alive(5.0)
        assert state_of(sleeper.pid) == "Z"
    sleeper.wait()
    assert state_of(sleeper.pid) == "Z"


def test_processor_time_grows_with_work():
    """In seconds; a process that has ended costs nothing any more."""
    with subprocess.Popen(BUSY) as process, ProcessWatch([process.pid]) as watch:
        while cpu_seconds(process.pid) < 0.05:
            watch.alive(0.01)
        process.kill()
    assert cpu_seconds(process.pid) == 0.0
