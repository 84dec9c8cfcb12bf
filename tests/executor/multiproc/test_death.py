from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import anyio
import pytest
from stopwatch import Stopwatch

from aexec import WorkerDied
from aexec.messages.step import ExecuteModel, StepId

pytestmark = pytest.mark.anyio


def alive(pid):
    """Neither gone nor a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def parent_of(pid):
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


async def gone(pids):
    with anyio.fail_after(5):
        while any(alive(pid) for pid in pids):  # noqa: ASYNC110 - processes send no events
            await anyio.sleep(0.002)


@pytest.mark.parametrize(
    ("how", "code", "by"),
    [
        ("SIGKILL", None, "SIGKILL"),
        ("SIGTERM", None, "SIGTERM"),
        ("abort", None, "SIGABRT"),
        ("null", None, "SIGSEGV"),
        ("exit 0", 0, None),
    ],
)
async def test_every_way_to_die_is_told_as_what_it_was(opening, how, code, by):
    """G07, G30: with its name, to the call that is pending, although another rank hangs; exit 0 is a death too."""
    async with opening() as executor:
        with Stopwatch() as watch, pytest.raises(WorkerDied) as caught:
            await executor.collective_rpc("die", (how,), kwargs={"rank": 1})
        assert watch.seconds < 1.0
        error = caught.value
        assert (error.rank, error.pid, error.exit_code, error.signal) == (1, executor.ranks[1].pid, code, by)
        assert error.phase == "die"


async def test_a_kill_is_an_error_within_a_tenth_of_a_second(opening):
    """Promise 3: for all who wait, before any clean-up; health is bad at once, and all processes go."""
    async with opening() as executor:
        pids = [info.pid for info in executor.ranks]
        waiting = [asyncio.ensure_future(executor.collective_rpc("block", (30.0,))) for _ in range(3)]
        await executor.collective_rpc("async_echo", (1,))
        with Stopwatch() as watch:
            os.kill(pids[1], signal.SIGKILL)
            results = await asyncio.gather(*waiting, return_exceptions=True)
        assert watch.seconds < 0.1
        assert [type(result) for result in results] == [WorkerDied] * 3
        assert not await executor.check_health()
    await gone(pids)


async def test_a_death_in_a_forward_pass_names_the_step(opening):
    """The forward pass was launched, and answered, before it ran."""
    async with opening() as executor:
        await executor.execute_model(ExecuteModel(StepId(7), {"seconds": 30.0}))
        os.kill(executor.ranks[0].pid, signal.SIGKILL)
        with pytest.raises(WorkerDied) as caught:
            await executor.sample_tokens(StepId(7))
        assert (caught.value.step, caught.value.signal) == (7, "SIGKILL")
        assert caught.value.phase in ("execute_model", "sample_tokens")


async def test_the_last_words_are_in_the_error(opening):
    """Also those of native code, and of the interpreter on a crash."""
    async with opening() as executor:
        await executor.collective_rpc("say", ("hello",))
        with pytest.raises(WorkerDied) as caught:
            await executor.collective_rpc("die", ("null",))
        assert "hello\nnative words\n" in caught.value.stderr_tail
        assert "Segmentation fault" in str(caught.value)


async def test_answers_that_were_sent_before_the_death_count(opening):
    """The lines are read to their end first."""

    def answer_and_die(worker):
        os.kill(os.getpid(), signal.SIGKILL)

    async with opening() as executor:
        first = asyncio.ensure_future(executor.collective_rpc("echo", ("x" * 1000,)))
        second = asyncio.ensure_future(executor.collective_rpc(answer_and_die))
        assert await first == ["x" * 1000] * 2
        with pytest.raises(WorkerDied):
            await second


async def test_a_worker_whose_grandchild_holds_its_lines_is_missed_all_the_same(opening):
    """HUP alone is defeated by one copy of a descriptor; the process's own end is not."""

    def leave_a_grandchild(worker):
        pid = os.fork()
        if pid == 0:
            signal.alarm(20)
            while True:
                signal.pause()
        return pid

    async with opening() as executor:
        grandchildren = await executor.collective_rpc(leave_a_grandchild)
        with Stopwatch() as watch:
            os.kill(executor.ranks[0].pid, signal.SIGKILL)
            with pytest.raises(WorkerDied, match="SIGKILL"):
                await executor.collective_rpc("block", (30.0,))
        assert watch.seconds < 0.5
    await gone(grandchildren)  # the fork server has adopted them, and ended them with the group


async def test_a_worker_that_closes_its_lines_is_ended(opening):
    """Alive without a way to reach it is dead to everybody."""

    def close_all(worker):
        os.closerange(3, 200)
        signal.pause()

    async with opening() as executor:
        pid = executor.ranks[0].pid
        with pytest.raises(WorkerDied):
            await executor.collective_rpc(close_all, ranks=[0])
    await gone([pid])


async def test_the_death_of_the_fork_server_is_the_workers_death(opening):
    """The kernel ends its children with it; the driver is told at once."""
    async with opening() as executor:
        pids = [info.pid for info in executor.ranks]
        server = parent_of(pids[0])
        os.kill(server, signal.SIGKILL)
        with pytest.raises(WorkerDied, match="rank"):
            await executor.collective_rpc("block", (30.0,))
    await gone(pids)
