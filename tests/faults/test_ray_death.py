"""A worker that Ray has placed ends, or the group does: who is told, how soon, and what is left."""

from __future__ import annotations

import asyncio
import os
import signal
import time

import pytest

from aexec import ExecuteModel, Restart
from aexec.errors import ExecutorUnavailable, WorkerDied
from aexec.messages.lifecycle import GroupRestarted
from aexec.messages.step import StepId
from aexec.testing.expect import eventually
from aexec.testing.faulty import WAYS_TO_DIE
from aexec.testing.processes import ProcessWatch, state_of

pytestmark = [pytest.mark.anyio, pytest.mark.ray]

SOON = 1.0  # seconds in which all have to know
SIGNALS = {"exit": (0, None)} | {way: (None, way) for way in WAYS_TO_DIE if way.startswith("SIG")}


async def all_gone(watch, timeout=5.0):
    with watch:
        return await asyncio.to_thread(watch.alive, timeout) == []


async def restarted(events):
    """The next generation is up."""
    async for event in events:
        if isinstance(event, GroupRestarted):
            return event.generation
    return None


async def test_a_death_ends_all_steps_in_flight_and_the_group_goes_on(open_on_ray):
    """G07, G67: SIGKILL with three steps in flight: all three say so at once; a new generation's steps are right."""
    async with open_on_ray(ranks=2, on_failure=Restart(max_restarts=1, backoff=0.01), close_grace=1.0) as executor:
        events = executor.events()
        for number in (1, 2, 3):
            await executor.execute_model(ExecuteModel(StepId(number), {"seconds": 5.0}))
        steps = [asyncio.ensure_future(executor.sample_tokens(StepId(number))) for number in (1, 2, 3)]
        await asyncio.sleep(0.1)
        began = time.monotonic()
        os.kill(executor.ranks[1].pid, signal.SIGKILL)
        results = await asyncio.gather(*steps, return_exceptions=True)
        assert time.monotonic() - began < SOON
        assert [type(result) for result in results] == [WorkerDied] * 3
        assert {(result.rank, result.signal) for result in results} == {(1, "SIGKILL")}
        with pytest.raises(ExecutorUnavailable):
            await executor.execute_model(ExecuteModel(StepId(4)))
        assert await asyncio.wait_for(restarted(events), 30.0) == 2
        for number in (5, 6, 7):
            await executor.execute_model(ExecuteModel(StepId(number)))
            assert tuple((await executor.sample_tokens(StepId(number))).output)[:2] == (number, executor.output_rank)
        assert [place[4] for place in await executor.collective_rpc("place")] == [2, 2]


async def test_deaths_within_the_budget_are_made_good_in_the_same_bundles(open_on_ray, ray_cluster):
    """G67: a group that is rebuilt keeps its placement group; the death that is one too many is final."""
    async with open_on_ray(ranks=2, on_failure=Restart(max_restarts=1, backoff=0.01), close_grace=0.5) as executor:
        events, groups = executor.events(), ray_cluster.belongings()
        ours = {key for key, what in groups.items() if what.startswith("placement")}
        os.kill(executor.ranks[0].pid, signal.SIGKILL)
        assert await asyncio.wait_for(restarted(events), 30.0) == 2
        assert {key for key, what in ray_cluster.belongings().items() if what.startswith("placement")} == ours
        failed = asyncio.get_running_loop().create_future()
        executor.add_failure_callback(failed.set_result)
        os.kill(executor.ranks[0].pid, signal.SIGKILL)
        error = await asyncio.wait_for(failed, 2 * SOON)
        assert any("used up" in note for note in error.__notes__)
        with pytest.raises(WorkerDied):
            await executor.collective_rpc("echo", (1,))


@pytest.mark.parametrize("way", WAYS_TO_DIE)
async def test_every_way_to_die_is_told_by_its_name(open_on_ray, way):
    """G30, G08, G62: an exit with code 0 too; the other ranks hang in native code; health knows it at once."""
    async with open_on_ray(ranks=2, close_grace=0.5) as executor:
        pids = [info.pid for info in executor.ranks]
        began = time.monotonic()
        with pytest.raises(WorkerDied, match="rank 1") as caught:
            await executor.collective_rpc("die_or_wait", (way, 1, 60.0), timeout=300.0)
        assert time.monotonic() - began < SOON
        assert (caught.value.exit_code, caught.value.signal) == SIGNALS[way]
        assert caught.value.phase == "die_or_wait"
        report = await executor.check_health(timeout=0.5)
        assert report.ranks[1].state == "dead"
    assert await all_gone(ProcessWatch(pids))


async def test_a_close_ends_dead_stopped_and_live_workers(open_on_ray, ray_cluster):
    """G64: in one go, within its budget, twice; nothing of it is left in the cluster."""
    executor = await open_on_ray(close_grace=1.0)
    pids = [info.pid for info in executor.ranks]
    watch = ProcessWatch(pids)
    os.kill(pids[0], signal.SIGKILL)
    os.kill(pids[1], signal.SIGSTOP)

    async def is_stopped():
        return await asyncio.to_thread(state_of, pids[1]) == "T"

    await eventually(is_stopped, "it stops")
    began = time.monotonic()
    await asyncio.gather(executor.close(), executor.close())
    await executor.close()
    assert time.monotonic() - began < 1.0 + 5.0
    assert await all_gone(watch)


async def test_a_close_runs_the_last_hooks_and_leaves_nothing(open_on_ray, ray_cluster, tmp_path):
    """G35: ``shutdown`` runs on each rank; no actor, no placement group, no process is left."""
    farewell = tmp_path / "farewell"
    before = await asyncio.to_thread(ray_cluster.belongings)
    async with open_on_ray(ranks=2, worker_kwargs={"farewell": str(farewell)}) as executor:
        pids = [info.pid for info in executor.ranks]
        now = await asyncio.to_thread(ray_cluster.belongings)
        new = sorted(what.split(",")[0] for key, what in now.items() if key not in before)
        assert [what for what in new if what.startswith("actor RayWorker")] == ["actor RayWorker"] * 2
        assert len([what for what in new if what.startswith("placement")]) == 1
        began = time.monotonic()
    assert time.monotonic() - began < 3.0
    assert sorted(farewell.read_text().split()) == ["0", "1"]
    assert await asyncio.to_thread(ray_cluster.left_since, before, 2.0) == []
    assert await all_gone(ProcessWatch(pids))


async def test_a_hook_that_hangs_has_its_budget_and_then_comes_force(open_on_ray):
    """G35: a rank that hangs in its ``shutdown`` is killed."""
    kwargs = {"stubborn_rank": 1}
    async with open_on_ray(ranks=2, close_grace=0.5, term_grace=0.5, worker_kwargs=kwargs) as executor:
        watch = ProcessWatch(info.pid for info in executor.ranks)
        began = time.monotonic()
    assert 0.4 < time.monotonic() - began < 0.5 + 4.0
    assert await all_gone(watch)
