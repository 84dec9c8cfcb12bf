"""The end of an executor: many who close at once, hooks, budgets, force."""

from __future__ import annotations

import asyncio
import time

import anyio
import pytest
import structlog
from stopwatch import Stopwatch

from aexec.errors import ExecutorClosed
from aexec.testing.processes import ProcessWatch

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("no_files_are_left")]


@pytest.mark.parametrize(("backend", "rounds"), [("uni", 20), ("mp", 3)])
async def test_closing_races_with_calls(open_faulty, backend, rounds):
    """G34: ten closes and fifty calls at once: a call has its answer or ``ExecutorClosed``, and nothing else."""
    for _ in range(rounds):
        executor = await open_faulty(backend, ranks=1 if backend == "uni" else 2)
        calls = [executor.collective_rpc("echo" if number % 2 else "async_echo", (number,)) for number in range(50)]
        tasks = [asyncio.ensure_future(call) for call in calls]
        await anyio.sleep(0.002)
        closes = [asyncio.ensure_future(executor.close()) for _ in range(10)]
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert await asyncio.wait_for(asyncio.gather(*closes), 10.0) == [None] * 10
        for number, result in enumerate(results):
            assert isinstance(result, ExecutorClosed) or result == [number] * executor.world_size
        with pytest.raises(ExecutorClosed):
            await executor.collective_rpc("echo", (1,))


async def test_the_last_hook_has_its_budget_and_then_comes_force(open_faulty, tmp_path):
    """G35: ``shutdown`` runs on every rank; one that hangs there and ignores SIGTERM is killed, and that is said."""
    farewell = tmp_path / "farewell"
    kwargs = {"farewell": str(farewell), "stubborn_rank": 1}
    with structlog.testing.capture_logs() as lines:
        async with open_faulty(ranks=2, close_grace=0.5, term_grace=0.5, worker_kwargs=kwargs) as executor:
            watch = ProcessWatch(info.pid for info in executor.ranks)
            began = time.monotonic()
        assert 0.4 < time.monotonic() - began < 0.5 + 4.0
    with watch:
        assert await asyncio.to_thread(watch.alive, 5.0) == []
    assert sorted(farewell.read_text().split()) == ["0", "1"]
    said = [line for line in lines if line["event"] == "not all workers ended by themselves"]
    assert len(said) == 1
    assert "rank 1" in said[0]["what"]
    assert "it was killed" in said[0]["what"]


async def test_a_quick_close_is_quick(open_faulty):
    """Idle workers do not wait for any grace to pass."""
    async with open_faulty(close_grace=20.0):
        began = time.monotonic()
    assert time.monotonic() - began < 3.0


@pytest.mark.parametrize("backend", ["uni", "mp"])
async def test_a_drain_lets_calls_finish_and_refuses_new_ones(open_faulty, backend):
    """G36: within its limit; whatever has not ended by then ends with ``ExecutorClosed``."""
    executor = await open_faulty(backend)
    running = [asyncio.ensure_future(executor.collective_rpc("block", (0.1,))) for _ in range(3)]
    hanging = asyncio.ensure_future(executor.collective_rpc("async_block", (30.0,)))
    await anyio.sleep(0.05)
    closing = asyncio.ensure_future(executor.close(drain=2.0))
    await anyio.sleep(0.05)
    with Stopwatch() as watch, pytest.raises(ExecutorClosed):
        await executor.collective_rpc("echo", (1,))
    assert watch.seconds < 0.5
    assert await asyncio.gather(*running) == [list(range(executor.world_size))] * 3
    with pytest.raises(ExecutorClosed):
        await hanging
    await asyncio.wait_for(closing, 10.0)
