"""Where a driver may be, and how it may end: each in an interpreter of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from stopwatch import Stopwatch

from aexec.testing.processes import ProcessWatch

PRELUDE = """
import asyncio, os, pathlib, sys, time
from aexec import ExecutorConfig, ParallelConfig, open_executor
from aexec.testing.workers import ProbeWorker

def opening(ranks=2, **settings):
    layout = ParallelConfig(pipeline_parallel_size=ranks)
    return open_executor(ExecutorConfig(backend="mp", parallel=layout, worker_cls=ProbeWorker, **settings))

def say_pids(executor):
    # Of its workers, and of the server, which is their parent.
    pids = [info.pid for info in executor.ranks]
    server = pathlib.Path(f"/proc/{pids[0]}/stat").read_text().rpartition(")")[2].split()[1]
    print(*pids, server, flush=True)

async def use(value, **settings):
    async with opening(**settings) as executor:
        return await executor.collective_rpc("echo", (value,))
"""


@pytest.fixture
def script(tmp_path):
    """Starts a script; whatever it has started is gone at the end of the test."""
    started = []

    def start(text, **options):
        path = tmp_path / "script.py"
        path.write_text(PRELUDE + textwrap.dedent(text))
        process = subprocess.Popen(
            [sys.executable, path], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def ended(process, within=30):
    with Stopwatch() as watch:
        out, err = process.communicate(timeout=30)
    assert watch.seconds < within
    return process.returncode, out.strip(), err.strip()


def all_gone_within(pids, seconds):
    with ProcessWatch(pids) as processes, Stopwatch() as watch:
        left = processes.alive(20.0)
    return not left and watch.seconds < seconds


def pids_of(process):
    """What ``say_pids`` has said: the script may be over by now."""
    pids = [int(word) for word in process.stdout.readline().split()]
    assert pids, process.communicate()
    return pids


BUSY = """
    async def main():
        async with opening() as executor:
            calls = [asyncio.ensure_future(executor.collective_rpc({call})) for _ in range(2)]
            await executor.collective_rpc("async_echo", (1,))
            say_pids(executor)
            {then}
            await asyncio.gather(*calls)

    asyncio.run(main())
"""


def test_a_script_without_a_main_guard_runs_once(script):
    """G24: nothing runs the user's file again, also where it defines the worker class; and the program ends."""
    process = script("""
        print("once")

        class Mine:
            def __init__(self, context):
                self.rank = context.rank

            def answer(self):
                return self.rank, __name__

        async def main():
            config = ExecutorConfig(worker_cls=Mine, parallel=ParallelConfig(2))
            async with open_executor(config) as executor:
                print(await executor.collective_rpc("answer"))
                print(await executor.collective_rpc(lambda worker, more: worker.rank + more, (10,)))

        asyncio.run(main())
    """)
    assert ended(process) == (0, "once\n[(0, '__main__'), (1, '__main__')]\n[10, 11]", "")


def test_it_works_in_a_daemonic_pool_process(script):
    """G22: where multiprocessing itself may start no process; and the pool ends."""
    process = script("""
        import multiprocessing

        def work(value):
            return asyncio.run(use(value))

        if __name__ == "__main__":
            with multiprocessing.get_context("fork").Pool(1) as pool:
                print(pool.map(work, [1, 2]))
    """)
    assert ended(process) == (0, "[[1, 1], [2, 2]]", "")


def test_it_works_in_threads_and_on_uvloop_three_at_once(script):
    """G20, G21, promise 6: any thread, either loop, several at once."""
    process = script("""
        import threading, uvloop

        async def three(value):
            return await asyncio.gather(*(use(value + more) for more in range(3)))

        results = {}
        runs = [
            threading.Thread(target=lambda: results.update(uvloop=uvloop.run(three(0)))),
            threading.Thread(target=lambda: results.update(asyncio=asyncio.run(three(10)))),
        ]
        for run in runs:
            run.start()
        for run in runs:
            run.join()
        print(results["uvloop"], results["asyncio"], threading.active_count())
    """)
    assert ended(process) == (0, "[[0, 0], [1, 1], [2, 2]] [[10, 10], [11, 11], [12, 12]] 1", "")


def test_a_worker_does_not_share_the_drivers_memory(script):
    """G23: the driver is never forked, whatever threads it has."""
    process = script("""
        import threading, aexec
        aexec.flag = "set in the driver"
        stop = threading.Event()
        for _ in range(3):
            threading.Thread(target=stop.wait).start()

        def look(worker):
            import aexec, threading
            return getattr(aexec, "flag", None), [t.name for t in threading.enumerate() if t.name.startswith("Thread-")]

        async def main():
            async with opening() as executor:
                print(await executor.collective_rpc(look))

        asyncio.run(main())
        stop.set()
    """)
    assert ended(process) == (0, "[(None, []), (None, [])]", "")


@pytest.mark.parametrize("method", ["forkserver", "spawn"])
@pytest.mark.parametrize("end", ["SIGKILL", "_exit", "raise"])
def test_workers_end_with_their_driver(script, end, method):
    """G17, G18: whatever ended it, although they are in a sleep of a minute; within a second, no memory left."""
    then = {"SIGKILL": "pass", "_exit": "os._exit(3)", "raise": "raise SystemExit(4)"}[end]
    shared = set(Path("/dev/shm").iterdir())
    process = script(
        BUSY.format(call='"block", (60.0,)', then=then).replace(
            "opening()", f"opening(start_method={method!r}, close_grace=0.2)"
        )
    )
    pids = pids_of(process)
    if end == "SIGKILL":
        process.kill()
    process.wait(10)
    assert all_gone_within(pids, 1.0)
    assert set(Path("/dev/shm").iterdir()) <= shared


def test_workers_that_hold_the_interpreters_lock_end_with_their_driver(script):
    """No thread of theirs can run: the kernel ends them."""
    process = script("""
        import ctypes

        def hold(worker):
            ctypes.PyDLL(None).sleep(60)

        async def main():
            async with opening() as executor:
                say_pids(executor)
                await executor.collective_rpc(hold)

        asyncio.run(main())
    """)
    pids = pids_of(process)
    time.sleep(0.3)
    process.kill()
    assert all_gone_within(pids, 1.0)


@pytest.mark.parametrize("call", ['"block", (60.0,)', '"async_block", (60.0,)', '"echo", (1,)'])
def test_ctrl_c_ends_all_within_three_seconds(script, call):
    """G19: to the whole process group, in a call or idle: one traceback, the driver's; none of a worker."""
    text = BUSY.format(call=call, then="await asyncio.gather(*calls); await asyncio.sleep(60)").replace(
        "opening()", "opening(close_grace=0.5)"
    )
    process = script(text, start_new_session=True)
    pids = pids_of(process)
    os.killpg(process.pid, signal.SIGINT)
    code, _, err = ended(process, within=3)
    assert code == -signal.SIGINT
    assert err.endswith("KeyboardInterrupt")
    assert "(rank" not in err
    assert all_gone_within(pids, 0.5)


def test_a_program_that_forgets_to_close_ends(script):
    """G27: with its own exit code, within three seconds, a warning, and nothing left."""
    process = script("""
        async def main():
            executor = await opening()
            say_pids(executor)
            sys.exit(5)

        asyncio.run(main())
    """)
    pids = pids_of(process)
    code, _, _ = ended(process, within=3)
    assert code == 5
    assert all_gone_within(pids, 1.0)


def test_the_loops_thread_may_change(script):
    """PR_SET_PDEATHSIG fires when the thread that made a child ends: none of ours is made by such a thread."""
    process = script("""
        import threading
        loop = asyncio.new_event_loop()
        made = []

        async def start():
            made.append(await opening())

        thread = threading.Thread(target=lambda: loop.run_until_complete(start()))
        thread.start()
        thread.join()
        time.sleep(0.2)
        print(loop.run_until_complete(made[0].collective_rpc("echo", (1,))))
        loop.run_until_complete(made[0].close())
        loop.close()
    """)
    assert ended(process) == (0, "[1, 1]", "")


def test_children_of_the_program_are_its_own(script):
    """No exit status is taken from it, and its SIGCHLD handler is left alone."""
    process = script("""
        import signal, subprocess
        seen = []
        signal.signal(signal.SIGCHLD, lambda *_: seen.append(1))

        async def main():
            child = subprocess.Popen([sys.executable, "-c", "raise SystemExit(9)"])
            other = await asyncio.create_subprocess_exec(sys.executable, "-c", "raise SystemExit(8)")
            async with opening() as executor:
                await executor.collective_rpc("echo", (1,))
            print(child.wait(), await other.wait(), bool(seen))

        asyncio.run(main())
    """)
    assert ended(process) == (0, "9 8 True", "")
