from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import anyio
import pytest

from aexec.config import ExecutorConfig, ParallelConfig
from aexec.errors import ConfigError, PlacementFailed
from aexec.executor.ray import api
from aexec.executor.ray import placement as placing
from aexec.executor.ray.cluster import Cluster, join
from aexec.executor.ray.placement import acquire

pytestmark = [pytest.mark.anyio, pytest.mark.ray]


def config(ranks: int = 2, **settings: Any) -> ExecutorConfig:
    """Of so many ranks."""
    return ExecutorConfig(backend="ray", parallel=ParallelConfig(ranks), **settings)


@pytest.fixture
async def cluster(ray_cluster: Any) -> AsyncIterator[Cluster]:
    """The session's, which this process is on."""
    cluster = await join(config())
    yield cluster
    await cluster.leave()


@pytest.fixture
async def given(cluster: Cluster) -> AsyncIterator[Any]:
    """A placement group of the user's: four bundles of a CPU."""
    ray = api.ray()
    group = await asyncio.to_thread(ray.util.placement_group, [{"CPU": 1}] * 4, name="the user's")
    await asyncio.wait_for(api.answer(group.ready()), 30.0)
    yield group
    await asyncio.to_thread(ray.util.remove_placement_group, group)


async def state(group: Any) -> str:
    """What Ray says of a group."""
    table = await asyncio.to_thread(api.ray().util.placement_group_table, group)
    return str(table["state"])


def settle(patience: float = 5.0) -> None:
    """Wait, on a thread, until no group is left, nor what one has reserved."""
    over = time.monotonic() + patience
    ray = api.ray()
    while (left := unsettled()) or ray.available_resources().get("CPU") != ray.cluster_resources()["CPU"]:
        assert time.monotonic() < over, (left, ray.available_resources())
        threading.Event().wait(0.01)  # Ray needs a processor for it, too


def unsettled() -> list[str]:
    """The states of groups that are not removed."""
    return [each["state"] for each in api.ray().util.placement_group_table().values() if each["state"] != "REMOVED"]


async def test_a_group_of_our_own_has_a_bundle_for_each_rank_and_ends_with_its_release(cluster: Cluster) -> None:
    """And nothing follows from a second release."""
    reports: list[tuple[str, float, float]] = []
    placement = await acquire(config(3), cluster, lambda *report: reports.append(report))
    assert placement.is_ours
    assert placement.bundles == (0, 1, 2)
    assert placement.resource == "CPU"
    assert placement.nodes == (cluster.node_id,) * 3
    assert reports[0][0] == "placement"
    assert reports[0][2] == 600.0
    assert await placement.is_whole()
    await placement.release()
    await placement.release()
    assert await state(placement.group) == "REMOVED"
    assert not await placement.is_whole()
    assert repr(placement) == "<Placement our own: CPU 1 of bundles 0, 1, 2, released>"


@pytest.mark.parametrize("by", ["object", "name"])
async def test_a_given_group_is_used_by_its_bundles_and_never_removed(cluster: Cluster, given: Any, by: str) -> None:
    """Bundles 3 and 1 of four, in that order."""
    group = given if by == "object" else "the user's"
    placement = await acquire(config(placement_group=group, bundle_indices=(3, 1)), cluster)
    assert placement.bundles == (3, 1)
    assert not placement.is_ours
    await placement.release()
    assert await state(given) == "CREATED"
    assert await placement.is_whole()


async def test_a_given_group_that_is_too_small_is_refused_with_its_bundles(cluster: Cluster, given: Any) -> None:
    """At once, and the group stays."""
    with pytest.raises(ConfigError, match="cannot hold 5 ranks: 4 of its bundles have CPU: 1"):
        await acquire(config(5, placement_group=given), cluster)
    assert await state(given) == "CREATED"


async def test_a_given_group_that_was_removed_is_refused(cluster: Cluster) -> None:
    """It would be waited for in vain."""
    ray = api.ray()
    group = await asyncio.to_thread(ray.util.placement_group, [{"CPU": 1}] * 2)
    await api.answer(group.ready())  # Ray never gives back what it reserves for one that is removed before
    await asyncio.to_thread(ray.util.remove_placement_group, group)
    with pytest.raises(ConfigError, match="has been removed: make it again"):
        await acquire(config(placement_group=group), cluster)


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"placement_group": "nobody's"}, 'placement_group is "nobody\'s": expected the name of a placement group'),
        ({"placement_group": 7}, "placement_group is 7: expected a Ray placement group, or its name"),
        ({"bundle_indices": (0, 1)}, r"bundle_indices is \(0, 1\) and no placement group is given"),
    ],
)
async def test_a_group_that_is_none_is_refused(cluster: Cluster, settings: dict[str, Any], text: str) -> None:
    """With what is expected instead."""
    with pytest.raises(ConfigError, match=text):
        await acquire(config(**settings), cluster)


async def test_a_group_that_can_never_come_fails_at_its_deadline_says_never_and_is_removed(cluster: Cluster) -> None:
    """99 of a resource that nobody has."""
    began = anyio.current_time()
    wanted = config(ray_resource="pet", ray_resource_per_worker=99, placement_timeout=0.5)
    with pytest.raises(PlacementFailed, match="never come as the cluster is: no node has pet: 99") as caught:
        await acquire(wanted, cluster)
    assert caught.value.never
    assert 0.5 <= anyio.current_time() - began < 10
    assert unsettled() == []


async def test_a_group_that_others_keep_from_coming_says_so(cluster: Cluster, given: Any) -> None:
    """The node's total would do, and what is free is told beside it."""
    total = next(int(node.total["CPU"]) for node in await cluster.nodes())
    with pytest.raises(PlacementFailed, match="would come if others gave back") as caught:
        await acquire(config(total, placement_timeout=1.0), cluster)
    assert not caught.value.never
    assert f"CPU: {total}" in str(caught.value)
    assert await state(given) == "CREATED"


@pytest.mark.parametrize("resource", ["CPU", "pet"])
async def test_a_wait_that_is_cancelled_at_whatever_moment_leaves_no_group(cluster: Cluster, resource: str) -> None:
    """Before it is made, while it is made, while it is waited for, and when it has just come; all CPUs are free again."""
    for moment in range(10):
        task = asyncio.ensure_future(acquire(config(ray_resource=resource, placement_timeout=5.0), cluster))
        await asyncio.sleep(moment * 0.003)
        task.cancel()
        outcome = (await asyncio.gather(task, return_exceptions=True))[0]
        if not isinstance(outcome, BaseException):
            await outcome.release()
    await asyncio.to_thread(settle)


async def test_a_group_that_is_removed_while_it_is_placed_gives_all_back(cluster: Cluster) -> None:
    """Ray keeps what it was about to reserve, in one or two of a hundred removals: so it is let to end first."""

    def make_and_remove() -> None:
        for _ in range(150):
            group = placing._make([{"CPU": 1.0}] * 2, "PACK")
            placing._remove(group)
        settle()

    await asyncio.to_thread(make_and_remove)


def test_a_removal_waits_while_ray_places_the_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """And no longer: not for one that cannot be placed, nor for one that Ray does not know."""
    said = iter(["QUEUED", "SCHEDULING_STARTED", "QUEUED", "NO_RESOURCES", "the next is asked for in vain"])
    monkeypatch.setattr(placing, "_state", lambda _: {"stats": {"scheduling_state": next(said)}})
    placing._let_settle("a group")
    assert next(said) == "the next is asked for in vain"
    monkeypatch.setattr(placing, "_state", lambda _: {})
    placing._let_settle("a group")


async def run_in_group(given: Any, work: Callable[[], Any], *, captures: bool = True) -> Any:
    """What a task of Ray's returns that runs in a bundle of the group."""
    ray = api.ray()
    strategy = api.part("util.scheduling_strategies").PlacementGroupSchedulingStrategy(
        given, placement_group_bundle_index=0, placement_group_capture_child_tasks=captures
    )
    return await api.answer(ray.remote(work).options(num_cpus=1, scheduling_strategy=strategy).remote())


def place(**settings: Any) -> tuple[bool, tuple[int, ...], bool]:
    """Join and acquire inside a task of Ray: whether it is ours, its bundles, and whether the cluster is."""

    async def main() -> tuple[bool, tuple[int, ...], bool]:
        cluster = await join(config(**settings))
        placement = await acquire(config(**settings), cluster)
        found = placement.is_ours, placement.bundles, cluster.started_here
        await placement.release()
        await cluster.leave()
        return found

    return asyncio.run(main())


async def test_in_a_task_of_ray_whose_children_belong_to_a_group_that_group_is_taken(given: Any) -> None:
    """As in a replica of Ray Serve; the connection that was there is neither made nor ended."""
    assert await run_in_group(given, _in_task) == (False, (0, 1), False)


async def test_in_a_task_of_ray_a_group_of_our_own_can_be_asked_for(given: Any) -> None:
    """By ``placement_group="new"``; and it is made where the task's children do not belong to the group."""
    assert await run_in_group(given, _in_task_new) == (True, (0,), False)
    assert await run_in_group(given, _in_task_one, captures=False) == (True, (0,), False)


def _in_task() -> Any:
    return place()


def _in_task_new() -> Any:
    return place(ranks=1, placement_group="new")


def _in_task_one() -> Any:
    return place(ranks=1)


async def test_an_actor_runs_in_the_bundle_that_its_options_name(cluster: Cluster) -> None:
    """Without a CPU of its own: whoever has the group may sit there too."""
    placement = await acquire(config(2), cluster)
    ray = api.ray()

    class Probe:
        def where(self) -> str:
            return str(ray.get_runtime_context().get_placement_group_id())

    try:
        actors = [ray.remote(Probe).options(**placement.options(index)).remote() for index in range(2)]
        found = await asyncio.gather(*(api.answer(actor.where.remote()) for actor in actors))
        assert found == [placement.group.id.hex()] * 2
        for actor in actors:
            ray.kill(actor)
    finally:
        await placement.release()
