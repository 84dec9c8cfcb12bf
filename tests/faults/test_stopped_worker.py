"""A worker that lives and does nothing: stopped, stuck or slow. It is seen, named, and no obstacle to a close."""

from __future__ import annotations

import asyncio
import os
import signal
import time

import anyio
import pytest
import structlog

from aexec.errors import CallTimeout
from aexec.messages.lifecycle import SlowCall
from aexec.testing.expect import eventually
from aexec.testing.processes import ProcessWatch, state_of

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("no_files_are_left")]


async def stop(pid):
    """Stop a process, and wait until none of its threads runs any longer."""
    os.kill(pid, signal.SIGSTOP)

    async def is_stopped():
        return await asyncio.to_thread(state_of, pid) == "T"

    await eventually(is_stopped, "it stops")


async def test_a_stopped_worker_is_reported_as_stuck(open_faulty):
    """Health says so within its own limit, a slow call names it, and it answers again once it goes on."""
    async with open_faulty(slow_call=0.3) as executor:
        events = executor.events()
        pid = executor.ranks[1].pid
        await stop(pid)
        try:
            began = time.monotonic()
            report = await executor.check_health(timeout=0.4)
            assert time.monotonic() - began < 0.9
            assert [rank.state for rank in report.ranks] == ["alive", "stuck", "alive"]
            assert executor.ranks[1].state == "stuck"
            call = asyncio.ensure_future(executor.collective_rpc("echo", (1,)))
            event = await asyncio.wait_for(anext(events), 5.0)
            assert isinstance(event, SlowCall)
            assert (event.method, list(event.missing)) == ("echo", [1])
            assert event.age >= 0.3
            assert "no answer" in event.missing[1] or "stopped" in event.missing[1]
        finally:
            os.kill(pid, signal.SIGCONT)
        assert await asyncio.wait_for(call, 5.0) == [1, 1, 1]
        assert bool(await executor.check_health())


async def test_a_call_that_is_slow_says_who_is_missing(open_faulty):
    """G01: method, call, age, the missing rank alone with its phase; at most three lines in ten intervals, then none."""
    with structlog.testing.capture_logs() as lines:
        async with open_faulty(slow_call=0.1) as executor:
            events = executor.events()
            await executor.collective_rpc("block", (1.0, 1))
            await executor.collective_rpc("echo", (1,))
            await anyio.sleep(0.3)
    reports = [event async for event in events]
    assert 1 <= len(reports) <= 4
    # After one interval, then two more, then four: a fourth would take 1.5 s, on a machine that is late.
    assert all(event.age >= 0.1 * (2**number - 1) for number, event in enumerate(reports, 1))
    assert all(isinstance(event, SlowCall) and list(event.missing) == [1] for event in reports)
    assert {event.missing[1] for event in reports} == {"block"}
    warnings = [line for line in lines if line["event"] == "slow call"]
    assert len(warnings) == len(reports)
    assert all(line["method"] == "block" and list(line["missing"]) == [1] for line in warnings)


async def test_a_dump_shows_where_the_workers_are(mp):
    """G69: pending calls with their ages and ranks in a dump; in a time-out's error the stack of the rank that hangs."""
    call = asyncio.ensure_future(mp.collective_rpc("stuck", (0.8, 1)))
    await anyio.sleep(0.2)
    dump = mp.dump()
    assert "stuck on ranks 0, 1, 2, sent" in dump
    assert "waits for ranks [1]" in dump
    assert f"rank 1: pid {mp.ranks[1].pid}" in dump
    await call
    with pytest.raises(CallTimeout) as caught:
        await mp.collective_rpc("stuck", (0.8, 1), timeout=0.2)
    notes = "\n".join(caught.value.__notes__)
    assert "in stuck" in notes
    assert "libc.usleep" in notes
    await mp.collective_rpc("echo", (1,))


async def test_a_close_ends_dead_stopped_and_live_workers(open_faulty):
    """G64: in one go, within its budget, twice."""
    executor = await open_faulty(close_grace=1.0)
    pids = [info.pid for info in executor.ranks]
    watch = ProcessWatch(pids)
    os.kill(pids[0], signal.SIGKILL)
    await stop(pids[1])
    began = time.monotonic()
    await asyncio.gather(executor.close(), executor.close())
    await executor.close()
    assert time.monotonic() - began < 1.0 + 5.0
    with watch:
        assert await asyncio.to_thread(watch.alive, 1.0) == []


async def test_a_close_ends_a_worker_that_was_stopped_alone(open_faulty):
    """G64: no worker is dead, so that nothing but its silence tells."""
    executor = await open_faulty(ranks=2, close_grace=0.5)
    pids = [info.pid for info in executor.ranks]
    watch = ProcessWatch(pids)
    await stop(pids[1])
    began = time.monotonic()
    await executor.close()
    assert time.monotonic() - began < 0.5 + 4.0
    with watch:
        assert await asyncio.to_thread(watch.alive, 1.0) == []
