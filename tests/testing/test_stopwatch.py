from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from stopwatch import Stopwatch

from aexec.testing.processes import state_of

PLUGINS = Path(__file__).parents[1] / "plugins"
TIMED = f"""
import sys
sys.path.insert(0, {str(PLUGINS)!r})
from stopwatch import Stopwatch
with Stopwatch() as watch:
    print("it runs", flush=True)
    sys.stdin.readline()
print(watch.seconds, watch.wall)
"""


def test_time_in_which_nothing_runs_does_not_count():
    """As where the host takes the processors away: the bound is not the machine's to break."""
    with subprocess.Popen([sys.executable, "-c", TIMED], stdin=-1, stdout=-1, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "it runs\n"
        process.send_signal(signal.SIGSTOP)
        while state_of(process.pid) != "T":
            pass
        began = time.monotonic()
        threading.Event().wait(0.7)
        halted = time.monotonic() - began
        process.send_signal(signal.SIGCONT)
        seconds, wall = map(float, process.communicate("go on\n")[0].split())
    assert wall >= halted
    assert seconds <= wall - halted + 0.1


def test_time_that_is_spent_counts():
    """Neither waiting for what takes long nor computing is a stall, on a machine that runs in one of a few tries."""
    watch = Stopwatch()
    while watch.seconds < 0.25:
        with Stopwatch() as watch:
            threading.Event().wait(0.2)
            until = time.thread_time() + 0.1
            while time.thread_time() < until:
                pass
        assert watch.wall >= max(watch.seconds, 0.3)
    assert repr(watch).startswith("<Stopwatch: 0.")
