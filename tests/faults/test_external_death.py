"""Ranks that torchrun or SLURM has started: whatever becomes of one, all others hear of it, and end by themselves."""

from __future__ import annotations

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from launched import end_session, torchrun

from aexec.testing.processes import descendants

COLLECTIVE = """
import datetime as dt
import torch, torch.distributed as dist

class Reducer(StepProbeWorker):
    def init_device(self):
        context = self.context
        dist.init_process_group(
            "gloo", init_method=context.distributed_init_method, rank=context.world_rank, world_size=context.world.size,
            timeout=dt.timedelta(seconds=120),
        )

    def reduce(self, but=None):
        if self.context.rank == but:
            raise ValueError("not with me")
        total = torch.ones(1)
        dist.all_reduce(total)
        return total.item()
"""

DIVERGES = """
async def main():
    async with make() as executor:
        await executor.execute_model(ExecuteModel(1))
        await executor.sample_tokens(1)
        await executor.execute_model(ExecuteModel(2, {"value": RANK}))
        say("asked")
        await executor.sample_tokens(2)

asyncio.run(main())
"""


@pytest.mark.timeout(90)
def test_another_argument_ends_every_rank_soon_with_rank_and_step(launch):
    """G53: within two seconds, by name, with a non-zero exit code; nobody hangs."""
    ranks = launch(DIVERGES)
    assert ranks.lines() == ["asked"] * 2
    began = time.monotonic()
    for rank in (0, 1):
        ended = ranks.finish(rank)
        assert ended.code == 1
        assert ended.at - began < 5.0  # of which two are the interpreters' ends
        assert "RanksDiverged: rank 1 does not ask for what the others ask for (call" in ended.errors
        assert "step 2)" in ended.errors


def at_once(check, programs):
    """Look at programs that run at the same time: each is waited for most of its time."""
    with ThreadPoolExecutor(len(programs)) as pool:
        list(pool.map(check, programs, programs.values()))


@pytest.mark.timeout(90)
def test_a_rank_that_ends_takes_the_others_with_it(launch):
    """G18: killed, gone without a word, with an error of its own, or just through, while a worker is in a long call."""

    def program(how):
        return f"""
async def main():
    async with make() as executor:
        async def last():
            await asyncio.sleep(0.3)
            say("gone")
            {how}
        calls = [executor.collective_rpc("block", (60.0, 0))] if RANK == 0 else [last()]
        say("ready")
        await asyncio.gather(*calls)

asyncio.run(main())
"""

    def check(how, ranks):
        assert ranks.lines() == ["ready"] * 2, how
        assert ranks.line(1) == "gone", how
        began = time.monotonic()
        ended = ranks.finish(0)
        assert ended.code == 1, how
        assert ended.at - began < 8.0, (
            how
        )  # half a second to know, a second of grace, one of the thread's, then Python's
        assert "rank 1" in ended.errors, how
        assert ("WorkerDied" in ended.errors) == ("_exit" in how or "kill" in how), how

    ways = ["os.kill(os.getpid(), signal.SIGKILL)", "os._exit(1)", "raise OSError('mine')", "return"]
    at_once(check, {how: launch(program(how)) for how in ways})


@pytest.mark.timeout(90)
def test_a_rank_that_is_killed_while_the_others_are_in_a_collective(launch):
    """All end within the deadline with a non-zero exit code; the interpreter's end waits for no thread (G18, G62)."""
    text = f"""{COLLECTIVE}
async def main():
    async with make(Reducer, backend="external_launcher") as executor:
        await executor.collective_rpc("reduce")
        if RANK == 1:
            say("ready")
            await asyncio.sleep(60)
        say("calls")
        await executor.collective_rpc("reduce", timeout=20.0)

asyncio.run(main())
"""
    ranks = launch(text, 3)
    assert ranks.lines() == ["calls", "ready", "calls"]
    began = ranks.kill(1)
    for rank in (0, 2):
        ended = ranks.finish(rank)
        assert ended.code == 1
        assert ended.at - began < 8.0
        assert "WorkerDied: rank 1" in ended.errors


@pytest.mark.timeout(90)
def test_a_rank_that_is_stopped_is_the_calls_own_deadline(launch):
    """A process that does not run is no death; whoever waits for it in a collective ends at its limit, thread and all."""
    text = f"""{COLLECTIVE}
async def main():
    async with make(Reducer, backend="external_launcher") as executor:
        await executor.collective_rpc("reduce")
        if RANK == 1:
            say("ready")
            await asyncio.sleep(60)
        say("calls")
        await executor.collective_rpc("reduce", timeout=1.0)

asyncio.run(main())
"""
    ranks = launch(text)
    assert ranks.lines() == ["calls", "ready"]
    began = ranks.kill(1, signal.SIGSTOP)
    ended = ranks.finish(0)
    assert (ended.code, "CallTimeout: reduce on ranks 0, 1" in ended.errors) == (1, True)
    assert ended.at - began < 12.0
    assert "rank 1: gives no answer" in ended.errors


@pytest.mark.timeout(90)
def test_a_rank_that_raises_while_the_other_is_in_a_collective(launch):
    """G06: the error reaches both programs at once, though rank 0's thread hangs; and both end.

    Rank 1 ends last: that frees the other's thread, which may crash an interpreter that is at its end.
    """
    text = f"""{COLLECTIVE}
async def main():
    async with make(Reducer, backend="external_launcher") as executor:
        await executor.collective_rpc("reduce")
        began = time.monotonic()
        try:
            await executor.collective_rpc("reduce", kwargs={{"but": 1}})
        except ValueError as error:
            say(type(error).__name__, error.rank, time.monotonic() - began < 1.0)

asyncio.run(main())
if RANK == 1:
    sys.stdin.read()  # until the test waits for its end
"""
    ranks = launch(text)
    assert ranks.lines() == ["RemoteError[ValueError] 1 True"] * 2
    assert [ranks.finish(rank).code for rank in (0, 1)] == [0, 0]


@pytest.mark.timeout(90)
def test_a_worker_that_ends_gives_a_code_that_a_later_sigterm_does_not_change(launch):
    """G31: the launcher restarts what has failed, and is not told that all was well."""
    text = """
async def main():
    async with make() as executor:
        try:
            await executor.collective_rpc("end", (7, 1))
        finally:
            say("failed")
            await asyncio.sleep(0.2)

asyncio.run(main())
"""
    ranks = launch(text)
    assert ranks.lines() == ["failed"] * 2
    ranks.kill(1, signal.SIGTERM)
    codes = [ranks.finish(rank).code for rank in (0, 1)]
    assert codes[0] == 1
    assert codes[1] in (1, -signal.SIGTERM)


@pytest.mark.timeout(90)
def test_the_shutdown_hook_has_its_time_on_every_rank(launch, tmp_path):
    """G35: it runs on each rank; one that hangs is left behind after the grace, which is said, and the program ends."""
    text = f"""
class Leaves(StepProbeWorker):
    def shutdown(self):
        if self.context.rank == 1:
            time.sleep(60)
        open(os.path.join({str(tmp_path)!r}, f"left {{self.context.rank}}"), "w").close()

async def main():
    began = time.monotonic()
    async with make(Leaves, close_grace=1.0) as executor:
        pass
    say(time.monotonic() - began < 6.0)

asyncio.run(main())
"""
    ranks = launch(text)
    assert ranks.lines() == ["True"] * 2
    ended = [ranks.finish(rank) for rank in (0, 1)]
    assert [one.code for one in ended] == [0, 0]
    assert [path.name for path in sorted(tmp_path.glob("left *"))] == ["left 0"]
    assert "rank 1 still worked after 1 s" in ended[1].errors


@pytest.mark.timeout(90)
def test_ctrl_c_ends_all_ranks_by_the_programs_own_handler(launch):
    """G19: each process has its KeyboardInterrupt, closes, and ends; a second Ctrl-C does no harm."""

    def program(where):
        return f"""
async def main():
    where = {where!r}
    async with make(close_grace=0.5) as executor:
        say("ready")
        if where == "in a call":
            await executor.collective_rpc("block", (60.0,))
        elif where == "idle":
            await asyncio.sleep(60.0)
        else:
            asyncio.ensure_future(executor.collective_rpc("block", (60.0,)))
            await asyncio.sleep(0.05)
            await executor.close()

assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
asyncio.run(main())
"""

    def check(where, ranks):
        assert ranks.lines() == ["ready"] * 2, where
        began = time.monotonic()
        for number in (signal.SIGINT, signal.SIGINT):
            for rank in (0, 1):
                ranks.kill(rank, number)
            time.sleep(0.1)
        for one in [ranks.finish(rank) for rank in (0, 1)]:
            assert one.at - began < 8.0, where
            assert one.code in (0, 1, 130, -signal.SIGINT), where
            assert one.code or where == "in close"
            assert "KeyboardInterrupt" in one.errors or where == "in close", where

    at_once(check, {where: launch(program(where)) for where in ("idle", "in a call", "in close")})


@pytest.mark.timeout(120)
def test_torchrun_restarts_its_ranks_and_ends_them_by_ctrl_c(tmp_path):
    """Its ranks are what it expects of any: one launcher, of which a rank dies first, and then somebody has had enough.

    G48: who has lost a rank ends with a non-zero code, and the next attempt meets in the same store, anew.
    G19, G53: the launcher's own handlers do what they always do; nothing is left, and its exit code is its own.
    """
    program = tmp_path / "program.py"
    program.write_text(
        """
import asyncio, os, signal
from aexec import ExecutorConfig, ParallelConfig, open_executor

signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the launcher's, which else may come before a rank has said why it ends

async def main():
    layout = ParallelConfig(tensor_parallel_size=2)
    config = ExecutorConfig(
        backend="external_launcher", worker_cls="aexec.testing.workers:ProbeWorker", parallel=layout, close_grace=0.5
    )
    async with open_executor(config) as executor:
        if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and os.environ["RANK"] == "1":
            os._exit(3)
        os.write(1, f"{await executor.collective_rpc('place')}\\n".encode())
        await executor.collective_rpc("block", (60.0,))

asyncio.run(main())
"""
    )
    launcher = torchrun(program, logs=tmp_path, redirects=2, restarts=1)
    try:
        assert launcher.stdout is not None
        assert [launcher.stdout.readline() for _ in range(2)] == ["[(0, 2, 0, 0, 1), (1, 2, 1, 0, 1)]\n"] * 2
        watch = descendants(launcher.pid)
        began = time.monotonic()
        os.killpg(launcher.pid, signal.SIGINT)
        output, errors = launcher.communicate(timeout=30.0)
        assert time.monotonic() - began < 15.0
        assert (launcher.returncode, output) == (1, ""), errors
        assert "SignalException" in errors
        said = [next(tmp_path.glob(f"*/attempt_1/{rank}/stderr.log")).read_text() for rank in range(2)]
        assert [text.count("\nKeyboardInterrupt") for text in said] == [1, 1]
        assert not any(Path(f"/proc/{pid}").exists() for pid in watch)
    finally:
        end_session(launcher)
