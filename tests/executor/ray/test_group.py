"""A worker group on the session's cluster: who is told what of an end that somebody else brought about."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
import time

import pytest

from aexec import ExecutorConfig, ParallelConfig, open_executor
from aexec.errors import MeetingFailed, ProtocolError, WorkerDied
from aexec.executor.ray import group as module
from aexec.testing.workers import ProbeWorker
from aexec.transport.meeting import MeetingPlace

pytestmark = [pytest.mark.anyio, pytest.mark.ray]

SOON = 1.0  # seconds


def on_ray(worker_cls=ProbeWorker, ranks=2, **settings):
    layout = ParallelConfig(tensor_parallel_size=ranks)
    settings = {"ray_step_plane": "channel", "close_grace": 1.0, "placement_timeout": 30.0} | settings
    return open_executor(ExecutorConfig(backend="ray", worker_cls=worker_cls, parallel=layout, **settings))


def own_name(worker):
    """The name of the actor that a worker is in."""
    import ray

    return ray.get_runtime_context().get_actor_name()


def last_words(worker):
    """Say something, and end."""
    sys.stderr.write(f"no device for rank {worker.context.rank}\n")
    sys.stderr.flush()
    if worker.context.rank == 1:
        os._exit(7)
    time.sleep(30.0)


async def test_an_actor_that_somebody_kills_is_told_with_the_cause(ray_cluster):
    """Ray is asked to kill it: the kernel says how it ended, and Ray why."""
    import ray

    async with on_ray() as executor:
        names = await executor.collective_rpc(own_name)
        assert [re.sub(r"-[0-9a-f]{4}-", "-", name) for name in names] == ["aexec-g1-pp0-tp0", "aexec-g1-pp0-tp1"]
        call = asyncio.ensure_future(executor.collective_rpc("async_block", (30.0,)))
        await asyncio.sleep(0.05)
        began = time.monotonic()
        ray.kill(ray.get_actor(names[1]))
        with pytest.raises(WorkerDied, match=r"ray\.kill was called on it") as caught:
            await call
        assert time.monotonic() - began < SOON
        assert (caught.value.rank, caught.value.phase) == (1, "async_block")
        assert caught.value.node == ray.util.get_node_ip_address()


async def test_a_placement_group_that_somebody_removes_is_told(ray_cluster):
    """It is somebody's own: all of its workers end with it, and the first death says so."""
    import ray
    from ray.util import placement_group, remove_placement_group

    bundles = placement_group([{"CPU": 1}] * 2)
    await asyncio.wrap_future(bundles.ready().future())
    async with on_ray(placement_group=bundles) as executor:
        call = asyncio.ensure_future(executor.collective_rpc("async_block", (30.0,)))
        await asyncio.sleep(0.05)
        began = time.monotonic()
        await asyncio.to_thread(remove_placement_group, bundles)
        with pytest.raises(WorkerDied, match="its placement group was removed"):
            await call
        assert time.monotonic() - began < SOON
    assert ray.is_initialized()


async def test_an_end_is_told_with_the_last_lines_of_the_log(ray_cluster):
    """On this machine: exit code, phase, and what the worker wrote, whoever redirects it."""
    async with on_ray() as executor:
        with pytest.raises(WorkerDied, match="exit code 7 during last_words") as caught:
            await executor.collective_rpc(last_words)
        assert caught.value.stderr_tail.endswith("no device for rank 1")


async def test_what_was_chosen_can_be_seen(ray_cluster):
    """Where ranks are, in the bundles of which group, of which cluster."""
    async with on_ray() as executor:
        chosen = {name: executor.describe()[name].value for name in ("bundle_indices", "ray_address", "ray_resource")}
        assert sorted(chosen["bundle_indices"]) == [0, 1]
        assert chosen["ray_address"].partition(":")[0] in executor.ranks[0].node
        assert chosen["ray_resource"] == "CPU"
        here = [(info.rank, info.node, info.pid, "auto") for info in executor.ranks]
        assert list(executor.describe().places) == here
        assert "RayGroup" in executor.dump()


async def test_a_worker_that_cannot_reach_the_driver_fails_the_start(ray_cluster, monkeypatch):
    """At once, with where it tried; as behind a firewall."""
    place = MeetingPlace(b"0" * 32, "aexec-nobody-is-here", None)
    monkeypatch.setattr(module.Meeting, "place", lambda self, here: place)
    with pytest.raises(MeetingFailed, match="aexec-nobody-is-here"):
        await on_ray(start_timeout=60.0)


async def test_lines_that_cannot_be_had_fail_the_start(ray_cluster, monkeypatch):
    """Whatever is raised, at once: the hello would be waited for until the start's limit."""

    def refuse(worker, work):
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(module.RayRank, "meet", refuse)
    with pytest.raises(ProtocolError, match=r"got no lines: OSError.*Too many open files"):
        await on_ray(start_timeout=60.0)


async def test_a_death_while_the_graph_is_built_is_told_as_a_death(ray_cluster, monkeypatch):
    """Not as what Ray says of a graph that lacks an actor."""
    make = module.RayGroup._make_plane

    async def make_and_kill(group, *args):
        os.kill(group._workers[1].pid, signal.SIGKILL)
        return await make(group, *args)

    monkeypatch.setattr(module.RayGroup, "_make_plane", make_and_kill)
    with pytest.raises(WorkerDied, match=r"rank 1 .* ended by SIGKILL"):
        await on_ray(ray_step_plane="compiled_graph", start_timeout=60.0)
