"""A worker ends: who is told, how soon, in which words, and what becomes of the others."""

from __future__ import annotations

import asyncio
import os
import signal

import anyio
import pytest
from stopwatch import Stopwatch

from aexec.errors import ExecutorUnavailable, WorkerDied
from aexec.messages.lifecycle import GroupRestarted
from aexec.testing.faulty import WAYS_TO_DIE
from aexec.testing.processes import ProcessWatch, descendants

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("no_files_are_left")]

SOON = 1.0  # seconds in which all have to know; about a hundredth of it is usual
SIGNALS = {"exit": (0, None)} | {way: (None, way) for way in WAYS_TO_DIE if way.startswith("SIG")}


async def all_gone(processes, timeout=10.0):
    with processes:
        return await asyncio.to_thread(processes.alive, timeout) == []


@pytest.mark.parametrize("way", WAYS_TO_DIE)
async def test_every_way_to_die_ends_all_waiters_at_once(open_faulty, way):
    """G07, G30: by its signal's name; exit code 0 is a death too; health is bad at once, and nothing is left."""
    async with open_faulty(close_grace=0.5) as executor:
        processes = ProcessWatch(info.pid for info in executor.ranks)
        waiting = [
            asyncio.ensure_future(executor.collective_rpc("die_or_wait", (way, 1, 60.0), timeout=300.0)),
            asyncio.ensure_future(executor.collective_rpc("async_block", (60.0,), timeout=300.0)),
            asyncio.ensure_future(executor.collective_rpc("echo", (1,))),
        ]
        with Stopwatch() as watch:
            results = await asyncio.gather(*waiting, return_exceptions=True)
        assert watch.seconds < SOON
        with Stopwatch() as watch:
            report = await executor.check_health(timeout=0.5)
        assert watch.seconds < SOON
        assert not report
        assert report.ranks[1].state == "dead"
        assert [type(result) for result in results] == [WorkerDied] * 3
        assert [(result.rank, result.exit_code, result.signal) for result in results] == [(1, *SIGNALS[way])] * 3
        assert results[0].phase == "die_or_wait"
        with pytest.raises(WorkerDied, match="rank 1"):
            await executor.collective_rpc("echo", (1,))
    assert await all_gone(processes)


async def test_a_death_is_seen_from_outside(open_faulty):
    """G08: nobody calls, nobody tells: callbacks, events and health have it within a second."""
    async with open_faulty() as executor:
        heard = asyncio.get_running_loop().create_future()
        executor.add_failure_callback(heard.set_result)
        events = executor.events()
        with Stopwatch() as watch:
            os.kill(executor.ranks[2].pid, signal.SIGKILL)
            error = await asyncio.wait_for(heard, 20.0)
        assert watch.seconds < SOON
        assert isinstance(error, WorkerDied)
        assert (error.rank, error.signal, error.phase) == (2, "SIGKILL", "idle")
        assert isinstance(await asyncio.wait_for(anext(events), 20.0), WorkerDied)
        report = await executor.check_health(timeout=0.5)
        assert report.ranks[2].state == "dead"
        assert executor.ranks[2].state == "dead"


async def test_the_death_of_a_process_in_the_middle_is_seen(open_faulty):
    """G08: whatever stands between driver and workers may be killed: no call waits for ever, and nothing is left."""
    of_others = set(await asyncio.to_thread(descendants))
    async with open_faulty() as executor:
        workers = [info.pid for info in executor.ranks]
        helpers = sorted(set(await asyncio.to_thread(descendants)) - of_others - set(workers))
        processes = ProcessWatch([*workers, *helpers])
        call = asyncio.ensure_future(executor.collective_rpc("async_block", (60.0 if helpers else 0.1,)))
        await anyio.sleep(0.1)
        for pid in helpers:
            os.kill(pid, signal.SIGKILL)
        with Stopwatch() as watch:
            (result,) = await asyncio.gather(call, return_exceptions=True)
        assert watch.seconds < SOON
        assert isinstance(result, WorkerDied) == bool(helpers)
        assert "exit code None" not in str(result)
        assert bool(await executor.check_health(timeout=0.5)) != bool(helpers)
    assert await all_gone(processes)


async def test_failure_callbacks_of_both_kinds_are_told(open_faulty):
    """G63: plain and async, each to its end; one that raises does not stop the others; one may close the executor."""
    heard: list[str] = []
    done = asyncio.Event()
    async with open_faulty(ranks=2) as executor:

        async def slowly(error):
            await anyio.sleep(0.01)
            heard.append(error.signal)
            await executor.close()
            done.set()

        def badly(error):
            raise RuntimeError("a callback of somebody's")

        executor.add_failure_callback(badly)
        executor.add_failure_callback(slowly)
        executor.add_failure_callback(lambda error: heard.append(error.signal))
        os.kill(executor.ranks[0].pid, signal.SIGKILL)
        await asyncio.wait_for(done.wait(), 10.0)
    assert heard == ["SIGKILL", "SIGKILL"]


async def test_the_last_words_of_a_worker_are_in_the_error(open_faulty):
    """The lines it wrote to its standard error before it died, past Python's own buffers."""
    async with open_faulty(ranks=2) as executor:
        await executor.collective_rpc("complain", ("the device is on fire\n",), ranks=[1])
        with pytest.raises(WorkerDied) as caught:
            await executor.collective_rpc("die", ("SIGABRT", 1))
    assert "the device is on fire" in caught.value.stderr_tail
    assert "the device is on fire" in str(caught.value)


@pytest.mark.timeout(120)
async def test_ranks_in_a_collective_do_not_hide_an_error_or_a_death(open_faulty):
    """G06, G62: ranks 0 to 2 sit in a barrier: rank 3's error, and later its death, reach the caller at once."""
    async with open_faulty(ranks=4, close_grace=1.0, env={"OMP_NUM_THREADS": "1"}) as executor:
        processes = ProcessWatch(info.pid for info in executor.ranks)
        assert await executor.collective_rpc("join_group", timeout=60.0) == [6] * 4
        with Stopwatch() as watch, pytest.raises(ValueError, match="rank 3 came to nothing") as caught:
            await executor.collective_rpc("barrier", kwargs={"raising_rank": 3}, timeout=60.0)
        assert watch.seconds < SOON
        assert caught.value.rank == 3
        assert "in barrier" in caught.value.traceback_text
        assert sum("no answer" in note for note in caught.value.__notes__) == 3
        await executor.collective_rpc("barrier", ranks=[3], timeout=30.0)  # the others are still in theirs
        assert await executor.collective_rpc("echo", (1,), timeout=30.0) == [1] * 4
        with Stopwatch() as watch, pytest.raises(WorkerDied, match="rank 3") as death:
            await executor.collective_rpc("barrier", kwargs={"dying_rank": 3}, timeout=60.0)
        assert watch.seconds < SOON
        assert death.value.signal == "SIGKILL"
    assert await all_gone(processes)


@pytest.mark.parametrize("kind", ["signal", "in the call"])
async def test_a_group_is_rebuilt_within_its_budget(open_faulty, kind):
    """G67: retryable errors while it is down, right answers after; the death that is one too many is final."""
    from aexec import Restart

    policy = Restart(max_restarts=2, within=60.0, backoff=0.01)
    async with open_faulty(ranks=2, on_failure=policy, close_grace=1.0) as executor:
        failed = asyncio.get_running_loop().create_future()
        executor.add_failure_callback(failed.set_result)
        events = executor.events()
        deaths, answers, refused = 0, 0, 0
        while deaths < 3:
            try:
                if kind == "signal" and answers % 5 == 4:
                    os.kill(executor.ranks[0].pid, signal.SIGKILL)
                    await executor.collective_rpc("async_block", (30.0,))
                found = await executor.collective_rpc("die_on_call", (5,), timeout=30.0)
                assert found[0] == found[1]
                assert found[0] in range(1, 5)
                answers += 1
            except ExecutorUnavailable as error:
                refused += 1
                await anyio.sleep(min(error.retry_after, 0.05) + 0.005)  # it always says when
            except WorkerDied:
                deaths += 1
                answers += kind == "signal"
        assert executor.generation == 3
        assert refused > 0
        error = await asyncio.wait_for(failed, 20.0)
        assert any("the 2 restarts allowed within 60 s are used up" in note for note in error.__notes__)
        with pytest.raises(WorkerDied):
            await executor.collective_rpc("echo", (1,))
    assert [event.generation async for event in events if isinstance(event, GroupRestarted)] == [2, 3]


def test_a_failure_is_no_success_for_whoever_restarts_the_program(start):
    """G31: a program that ends for a dead worker has another exit code than 0, a SIGTERM later or not."""
    program = start("""
async def main():
    async with make() as executor:
        say("ready")
        await executor.collective_rpc("die_or_wait", ("SIGKILL", 1, 60.0))

asyncio.run(main())
""")
    assert program.line() == "ready"
    with program.watch() as watch:
        _, errors, code = program.finish()
        assert code == 1
        assert "WorkerDied: rank 1" in errors
        assert watch.alive(3.0) == []
