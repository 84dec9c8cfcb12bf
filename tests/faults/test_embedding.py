"""Executors inside whatever people embed them in: threads, pools, notebooks, loops, scripts without a guard."""

from __future__ import annotations

import asyncio
import subprocess
import sys

import pytest

from aexec.errors import WrongLoop
from aexec.testing.processes import ProcessWatch

pytestmark = pytest.mark.usefixtures("no_files_are_left")


def test_it_starts_in_a_background_thread(run):
    """G20, G21: no signal handler is touched, before, during or after."""
    assert (
        run("""
def handlers():
    return [signal.getsignal(number) for number in signal.valid_signals()]

before = handlers()

async def main():
    async with make() as executor:
        assert handlers() == before
        say(*await executor.collective_rpc("echo", (1,)))

thread = threading.Thread(target=asyncio.run, args=(main(),))
thread.start()
thread.join()
assert handlers() == before
""")
        == "1 1\n"
    )


def test_it_starts_inside_a_pool(start, tmp_path):
    """G22: in a daemonic process, which may have no children by ``multiprocessing``; they die with the pool."""
    (tmp_path / "pooled.py").write_text("""
import asyncio, multiprocessing, os, sys
from aexec import ExecutorConfig, ParallelConfig, open_executor

def run_echo(linger):
    return asyncio.run(echo(linger))

async def echo(linger):
    config = ExecutorConfig(backend="mp", parallel=ParallelConfig(pipeline_parallel_size=2), worker_cls="aexec.testing.faulty:FaultyWorker")
    async with open_executor(config) as executor:
        found = await executor.collective_rpc("echo", (1,))
        if linger:
            print(*await executor.collective_rpc("pid"), flush=True)
            await executor.collective_rpc("native_sleep", (60.0,))
        return found

if __name__ == "__main__":
    with multiprocessing.get_context(sys.argv[1]).Pool(1) as pool:
        print(*pool.apply(run_echo, (False,)), flush=True)
        pool.apply_async(run_echo, (True,))
        sys.stdin.read()
        import time; time.sleep(2.5)
""")
    for method in ("fork", "spawn"):
        program = start("", command=[sys.executable, str(tmp_path / "pooled.py"), method])
        assert program.line() == "1 1"
        with ProcessWatch(int(pid) for pid in program.line().split()) as watch:
            _, errors, code = program.finish()
            assert watch.alive(2.0) == []
        assert (errors, code) == ("", 0)


def test_a_script_needs_no_main_guard(start, tmp_path):
    """G24: it is run once; a class and a function that only it knows work."""
    script = tmp_path / "no_guard.py"
    script.write_text("""
import asyncio
from aexec import ExecutorConfig, ParallelConfig, open_executor
print("once", flush=True)

class Mine:
    def __init__(self, context):
        self.rank = context.rank
    def double(self, value):
        return 2 * value + self.rank

def triple(worker, value):
    return 3 * value + worker.rank

async def main():
    config = ExecutorConfig(backend="mp", parallel=ParallelConfig(pipeline_parallel_size=2), worker_cls=Mine)
    async with open_executor(config) as executor:
        print(*await executor.collective_rpc("double", (10,)), *await executor.collective_rpc(triple, (10,)))

asyncio.run(main())
""")
    output, errors, code = start("", command=[sys.executable, str(script)]).finish()
    assert (output, errors, code) == ("once\n20 21 30 31\n", "", 0)


def test_a_session_without_a_file_works(tmp_path):
    """G24: a program that comes by standard input, as cells of a notebook do: nothing could be run again."""
    text = """
import asyncio
from aexec import ExecutorConfig, ParallelConfig, open_executor

class Mine:
    def __init__(self, context):
        self.rank = context.rank
    def double(self, value):
        return 2 * value + self.rank

async def main():
    config = ExecutorConfig(backend="mp", parallel=ParallelConfig(pipeline_parallel_size=2), worker_cls=Mine)
    async with open_executor(config) as executor:
        print(*await executor.collective_rpc("double", (10,)))

asyncio.run(main())
"""
    done = subprocess.run([sys.executable, "-"], input=text, capture_output=True, text=True, timeout=40, check=False)
    assert (done.stdout, done.stderr, done.returncode) == ("20 21\n", "", 0)


def test_the_blocking_facade_works_where_a_loop_runs(run):
    """G25: inside ``async def``, with processes behind it; the loop is not patched."""
    assert (
        run("""
from aexec import LLM, SamplingParams

async def main():
    before = asyncio.get_running_loop(), type(asyncio.get_running_loop()).run_until_complete
    with LLM("dummy", executor="mp", pipeline_parallel_size=2) as llm:
        (done,) = llm.generate([[1, 2, 3]], SamplingParams(max_tokens=4, ignore_eos=True))
        say(len(done.token_ids))
    assert before == (asyncio.get_running_loop(), type(asyncio.get_running_loop()).run_until_complete)

asyncio.run(main())
""")
        == "4\n"
    )


def test_one_loop_after_the_other_leaves_nothing_behind(run):
    """G26, G20: start, call, close, five times in one process: no thread, descriptor, process or handler more."""
    assert (
        run(
            """
from aexec.testing import LeakCheck

async def main():
    async with LeakCheck(), make() as executor:
        await executor.collective_rpc("echo", (1,))

def handlers():
    return [signal.getsignal(number) for number in signal.valid_signals()]

asyncio.run(main())
before = handlers()
with LeakCheck():
    for _ in range(5):
        asyncio.run(main())
        assert handlers() == before
say("clean")
""",
            "-W",
            "error",
        )
        == "clean\n"
    )


@pytest.mark.anyio
async def test_a_foreign_loop_is_refused(mp):
    """G26: at once, with both loops in the error, and nothing is disturbed."""

    def elsewhere():
        asyncio.run(mp.close())

    with pytest.raises(WrongLoop):
        await asyncio.to_thread(elsewhere)

    def call_elsewhere():
        asyncio.run(mp.collective_rpc("echo", (1,)))

    with pytest.raises(WrongLoop):
        await asyncio.to_thread(call_elsewhere)
    assert await mp.collective_rpc("echo", (1,)) == [1, 1, 1]


@pytest.mark.parametrize("ending", ["pass", "sys.exit(3)"])
def test_a_program_that_forgets_to_close_ends(start, ending):
    """G27: soon, with a ResourceWarning, its own exit code, and no worker."""
    program = start(
        f"""
async def main():
    executor = await make()
    await executor.collective_rpc("echo", (1,))
    say("used", *(info.pid for info in executor.ranks))
    {ending}

asyncio.run(main())
""",
        "-W",
        "always::ResourceWarning",
    )
    with ProcessWatch(int(pid) for pid in program.line().split()[1:]) as watch:
        _, errors, code = program.finish(8.0)
        assert watch.alive(2.0) == []
    assert code == (0 if ending == "pass" else 3)
    assert "ResourceWarning" in errors
    assert "Traceback" not in errors


def test_three_executors_live_in_one_process(run):
    """At once, on one loop, and a fourth on the loop of a thread beside them."""
    assert (
        run("""
async def use(number):
    async with make(ranks=1) as executor:
        for _ in range(20):
            assert await executor.collective_rpc("echo", (number,)) == [number]
        return await executor.collective_rpc("pid")

async def main():
    beside = asyncio.to_thread(asyncio.run, use(4))
    return await asyncio.gather(use(1), use(2), use(3), beside)

say(len({pid for (pid,) in asyncio.run(main())}))
""")
        == "4\n"
    )


def test_uvloop_drives_it(start):
    """Calls, large ones too, a death, a close."""
    pytest.importorskip("uvloop")
    program = start("""
import uvloop
from aexec import WorkerDied

async def main():
    async with make() as executor:
        assert await executor.collective_rpc("echo", (1,)) == [1, 1]
        assert await executor.collective_rpc("length", (bytes(10_000_000),)) == [10_000_000] * 2
        try:
            await executor.collective_rpc("die_or_wait", ("SIGKILL", 1, 60.0), timeout=30.0)
        except WorkerDied as error:
            say(error.signal)

with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
    runner.run(main())
""")
    output, errors, code = program.finish()
    assert (output, code) == ("SIGKILL\n", 0)
    assert "Traceback" not in errors
