"""The driver ends, in whatever way: its workers end with it, and nothing is left."""

from __future__ import annotations

import signal
import time

import pytest
from stopwatch import Stopwatch

from aexec.testing.processes import ProcessWatch, descendants

pytestmark = pytest.mark.usefixtures("no_files_are_left")

BUSY = """
async def main():
    executor = await make()
    call = asyncio.ensure_future(executor.collective_rpc("native_sleep", (60.0,)))
    while {phase!r} not in str([info.phase for info in executor.ranks]):
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.2)
    say("busy", *(info.pid for info in executor.ranks))
    {end}
    await call

asyncio.run(main())
"""
ENDS = {
    "SIGKILL": "pass",
    "SIGTERM": "pass",
    "os._exit": "os._exit(1)",
    "abort": "import resource; resource.setrlimit(resource.RLIMIT_CORE, (0, 0)); os.abort()",
}


@pytest.mark.parametrize("way", ENDS)
def test_workers_end_with_a_driver_that_is_killed(start, way):
    """G17, G18: while they are in a native sleep of a minute: all gone within a second, and no file is left."""
    program = start(BUSY.format(phase="native_sleep", end=ENDS[way]))
    said = program.line().split()
    assert said[0] == "busy"
    if way.startswith("SIG"):
        with program.watch() as watch:
            with Stopwatch() as stopwatch:
                program.kill(signal.Signals[way])
                assert watch.alive(20.0) == []
            assert stopwatch.seconds < 2.0
    else:
        with ProcessWatch(int(pid) for pid in said[1:]) as watch:
            assert watch.alive(2.0) == []
    program.finish()


def test_workers_end_with_a_driver_that_raises(start):
    """G18: an error that nobody catches ends the loop, the executor that was never closed, and its workers."""
    program = start("""
async def main():
    executor = await make()
    say("open", *(info.pid for info in executor.ranks))
    raise RuntimeError("a fault of the program's")

asyncio.run(main())
""")
    pids = [int(pid) for pid in program.line().split()[1:]]
    with ProcessWatch(pids) as watch:
        _, errors, code = program.finish(10.0)
        assert code == 1
        assert "a fault of the program's" in errors
        assert watch.alive(2.0) == []


def test_children_of_workers_end_with_a_driver_that_is_killed(start):
    """G18: the grandchildren too."""
    program = start("""
async def main():
    executor = await make()
    say("children", *await executor.collective_rpc("have_child"))
    await asyncio.sleep(60)

asyncio.run(main())
""")
    pids = [int(pid) for pid in program.line().split()[1:]]
    with program.watch() as watch:
        assert set(pids) <= set(descendants(program.pid))
        program.kill(signal.SIGKILL)
        assert watch.alive(3.0) == []


def test_children_of_workers_end_with_a_close(run):
    """G18: a worker that is told to end takes what it has started with it."""
    pids = run("""
async def main():
    async with make() as executor:
        say(*await executor.collective_rpc("have_child"))

asyncio.run(main())
""").split()
    with ProcessWatch(int(pid) for pid in pids) as watch:
        assert watch.alive(3.0) == []


INTERRUPTED = {
    "idle": "say('ready'); await asyncio.sleep(60)",
    "in a call": "say('ready'); await executor.collective_rpc('async_block', (60.0,))",
    "in native code": "say('ready'); await executor.collective_rpc('native_sleep', (60.0,))",
    "in close": "say('ready'); await executor.close()",
    "in a start": "await executor.close(); say('ready'); await make(worker_kwargs=dict(hang_in='load_model', seconds=60))",
}


@pytest.mark.parametrize("when", INTERRUPTED)
def test_an_interrupt_from_the_terminal_ends_all_quietly(start, when):
    """G19: with default settings all are gone within three seconds, and not a line is a worker's.

    The program's own stack is there, and one line at most on workers that did not end by themselves.
    """
    program = start(f"""
async def main():
    async with make(close_grace=ExecutorConfig().close_grace) as executor:
        {INTERRUPTED[when]}

asyncio.run(main())
""")
    assert program.line() == "ready"
    time.sleep(0.0 if when == "in close" else 0.3)
    with program.watch() as watch:
        with Stopwatch() as stopwatch:
            program.interrupt_all()
            assert watch.alive(20.0) == []
        assert stopwatch.seconds < 3.0
    _, errors, code = program.finish()
    assert [line for line in errors.splitlines() if line.startswith(("(rank", "(fork server"))] == []
    assert errors.count("did not end within") <= 2
    assert errors.count("by themselves") <= 1
    assert code in ({0, -signal.SIGINT} if when == "in close" else {-signal.SIGINT})


def test_a_second_interrupt_is_now(start):
    """G19: while the first still waits for a worker in native code."""
    program = start("""
async def main():
    async with make(close_grace=30.0) as executor:
        say("ready")
        await executor.collective_rpc("native_sleep", (60.0,))

asyncio.run(main())
""")
    assert program.line() == "ready"
    time.sleep(0.3)
    with program.watch() as watch:
        program.interrupt_all()
        time.sleep(0.5)
        program.interrupt_all()
        assert watch.alive(3.0) == []
    program.finish()
