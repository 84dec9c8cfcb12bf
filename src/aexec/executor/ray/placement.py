"""Where Ray puts the workers: a placement group that is given, or one of our own.

A given group is looked through and waited for; it is never removed. One of our own is asked for,
awaited with a deadline, and removed whatever else happens: when it does not come, when the wait is
cancelled at whatever moment, and when the executor is through with it.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import anyio

from aexec.config import ExecutorConfig
from aexec.config.ray import NEW_GROUP
from aexec.errors import CallTimeout, ConfigError, PlacementFailed
from aexec.executor.ray import api
from aexec.executor.ray.bundles import choose_bundles, demand, new_bundles, resource_of
from aexec.executor.ray.capacity import explain, impossible
from aexec.executor.ray.cluster import Cluster
from aexec.observe import get_logger
from aexec.worker.context import Progress, no_progress

__all__ = ("Placement", "acquire")

_QUERY_LIMIT = 10.0  # seconds for a question to Ray's control store
_REPORT_EVERY = 1.0  # seconds between reports of a wait
_WARN_AFTER = 10.0  # seconds of a wait after which it is said what is missing
_SETTLES = 5.0  # seconds that a group that is to be removed may take to be placed, or to be known as not to be placed
_LOOK_EVERY = 0.005  # seconds; placing takes some three milliseconds
_BEING_PLACED = ("QUEUED", "SCHEDULING_STARTED")  # as Ray calls it; NO_RESOURCES and INFEASIBLE reserve nothing
_GONE = "REMOVED"
_PLACED = "CREATED"


@dataclass(slots=True, repr=False)
class Placement:
    """Where the workers are.

    Attributes:
        group: Ray's placement group.
        bundles: By actor: its bundle.
        nodes: By actor: Ray's id of the node of its bundle.
        is_ours: It is removed when it is released.
        resource: What an actor takes of its bundle, as Ray counts it.
        amount: How much of it.
    """

    group: Any
    bundles: tuple[int, ...]
    nodes: tuple[str, ...]
    is_ours: bool
    resource: str
    amount: float
    _is_released: bool = False

    def __repr__(self) -> str:
        whose = "our own" if self.is_ours else "given"
        bundles = ", ".join(map(str, self.bundles))
        return f"<Placement {whose}: {self.resource} {self.amount:g} of bundles {bundles}{', released' * self._is_released}>"

    def options(self, index: int) -> dict[str, Any]:
        """What an actor asks for, as options of Ray.

        Args:
            index: Of the actor.
        """
        strategies = api.part("util.scheduling_strategies")
        strategy = strategies.PlacementGroupSchedulingStrategy(
            placement_group=self.group,
            placement_group_bundle_index=self.bundles[index],
            placement_group_capture_child_tasks=True,
        )
        return {**demand(self.resource, self.amount), "scheduling_strategy": strategy}

    async def is_whole(self) -> bool:
        """True if all bundles are still there, for another generation of workers."""
        if self._is_released:
            return False
        try:
            return await api.off_loop("look at placement group", self._look, timeout=_QUERY_LIMIT)
        except CallTimeout:
            return False

    async def release(self) -> None:
        """Remove the group, if it is ours; may be called twice.

        Raises:
            CallTimeout: Ray does not answer.
        """
        if self.is_ours and not self._is_released:
            self._is_released = True
            await api.off_loop("remove placement group", _remove, self.group, timeout=_QUERY_LIMIT)

    def _look(self) -> bool:
        state = _state(self.group)
        if state.get("state") != _PLACED:
            return False
        alive = {node["NodeID"] for node in api.ray().nodes() if node["Alive"]}
        return all(state["bundles_to_node_id"][index] in alive for index in self.bundles)


async def acquire(config: ExecutorConfig, cluster: Cluster, report: Progress = no_progress) -> Placement:
    """Find or make the placement group of the settings, and wait until Ray has placed it.

    Args:
        config: The settings.
        cluster: The one that was joined.
        report: Told ``("placement", seconds waited, placement_timeout)``.

    Raises:
        ConfigError: There is no such group, or it cannot hold the workers.
        PlacementFailed: It has not come within ``placement_timeout``; a group of our own is removed.
    """
    asked = _current() if config.placement_group is None else config.placement_group
    given = await api.off_loop("find placement group", _given, config, asked, timeout=_QUERY_LIMIT)
    if given is None:
        return await _acquire_own(config, cluster, report)
    state = await api.off_loop("look at placement group", _state, given, timeout=_QUERY_LIMIT)
    if state.get("state", _GONE) == _GONE:
        raise ConfigError(f"the placement group {_named(asked)} has been removed: make it again")
    bundles: Mapping[int, Mapping[str, float]] = state["bundles"]
    resource = resource_of(config, {name for bundle in bundles.values() for name in bundle})
    chosen = choose_bundles(config, bundles, resource)
    nodes = await _wait(_Wait(given, tuple(bundles.values()), state["strategy"], config, cluster, report))
    return _placement(config, given, chosen, nodes, resource, is_ours=False)


async def _acquire_own(config: ExecutorConfig, cluster: Cluster, report: Progress) -> Placement:
    at_hand = {name for node in await cluster.nodes() if node.alive for name, amount in node.total.items() if amount}
    resource = resource_of(config, at_hand)
    bundles = new_bundles(config, resource)
    group = await api.off_loop(
        "make placement group", _make, bundles, config.placement_strategy, timeout=_QUERY_LIMIT, undo=_remove
    )
    try:
        nodes = await _wait(_Wait(group, bundles, config.placement_strategy, config, cluster, report))
    except BaseException:
        with anyio.CancelScope(shield=True):  # the removal has a limit of its own
            await _quietly_remove(group)
        raise
    return _placement(config, group, tuple(range(len(bundles))), nodes, resource, is_ours=True)


@dataclass(frozen=True, slots=True)
class _Wait:
    """A group that is to come."""

    group: Any
    bundles: Sequence[Mapping[str, float]]
    strategy: str
    config: ExecutorConfig
    cluster: Cluster
    report: Progress


async def _wait(wait: _Wait) -> Mapping[int, str]:
    """Ray's id of each bundle's node, once all are there."""
    loop = asyncio.get_running_loop()
    started, limit = loop.time(), wait.config.placement_timeout
    placed = asyncio.ensure_future(_placed(wait.group))
    is_warned = False
    try:
        while (waited := loop.time() - started) < limit:
            wait.report("placement", waited, limit)
            await asyncio.wait({placed}, timeout=min(_REPORT_EVERY, limit - waited))
            if placed.done():
                return placed.result()
            if not is_warned and waited >= _WARN_AFTER:
                is_warned = True
                await _warn(wait, waited)
        nodes = await wait.cluster.nodes()
        reason = impossible(wait.bundles, wait.strategy, nodes)
        raise PlacementFailed(limit, explain(wait.bundles, wait.strategy, nodes), never=bool(reason))
    finally:
        placed.cancel()


async def _placed(group: Any) -> Mapping[int, str]:
    ready = await api.off_loop("ask for placement group", group.ready, timeout=_QUERY_LIMIT)  # the first exports a task
    await api.answer(ready)
    while True:  # a group that has lost a node was ready once, and is placed again
        state = await api.off_loop("look at placement group", _state, group, timeout=_QUERY_LIMIT)
        if state.get("state", _GONE) == _GONE:
            raise ConfigError("the placement group was removed while it was waited for")
        if state["state"] == _PLACED:
            nodes: Mapping[int, str] = state["bundles_to_node_id"]
            return nodes
        await asyncio.sleep(_REPORT_EVERY)


async def _warn(wait: _Wait, waited: float) -> None:
    details = explain(wait.bundles, wait.strategy, await wait.cluster.nodes())
    get_logger("aexec.executor").warning(
        "the placement group has not come yet", seconds=round(waited), limit=wait.config.placement_timeout,
        details=details,
    )  # fmt: skip


async def _quietly_remove(group: Any) -> None:
    try:
        await api.off_loop("remove placement group", _remove, group, timeout=_QUERY_LIMIT)
    except Exception:  # noqa: BLE001 - what is being raised is the cause
        get_logger("aexec.executor").exception("a placement group could not be removed", group=str(group.id))


def _placement(
    config: ExecutorConfig,
    group: Any,
    chosen: tuple[int, ...],
    nodes: Mapping[int, str],
    resource: str,
    *,
    is_ours: bool,
) -> Placement:
    where = tuple(nodes[index] for index in chosen)
    return Placement(group, chosen, where, is_ours, resource, config.ray_resource_per_worker)


def _current() -> Any:
    """The group of the actor or task that this is, if its children belong there; Ray knows it by the thread."""
    ray = api.ray()
    captures = ray.get_runtime_context().should_capture_child_tasks_in_placement_group
    return ray.util.get_current_placement_group() if captures else None


def _given(config: ExecutorConfig, asked: Any) -> Any:
    """The group that is meant; None: one is to be made."""
    if asked == NEW_GROUP:
        return None
    if asked is None:
        if config.bundle_indices is not None:
            raise ConfigError(
                f"ExecutorConfig.bundle_indices is {config.bundle_indices!r} and no placement group is given: they are "
                "bundles of placement_group="
            )
        return None
    if isinstance(asked, str):
        return _by_name(asked)
    if not (hasattr(asked, "bundle_specs") and hasattr(asked, "ready")):
        raise ConfigError(f"ExecutorConfig.placement_group is {asked!r}: expected a Ray placement group, or its name")
    return asked


def _by_name(name: str) -> Any:
    """In this job's namespace first, then in any."""
    module = api.part("util.placement_group")
    try:
        return module.get_placement_group(name)
    except ValueError:
        table = module.placement_group_table()
    found = [each for each in table.values() if each["name"] == name and each["state"] != _GONE]
    if len(found) == 1:
        group_id = api.ray().PlacementGroupID(bytes.fromhex(found[0]["placement_group_id"]))
        return module.PlacementGroup(group_id)
    known = sorted({each["name"] for each in table.values() if each["name"] and each["state"] != _GONE})
    wrong = f"{len(found)} namespaces have one of that name" if found else f"there is {_listed(known)}"
    raise ConfigError(f"ExecutorConfig.placement_group is {name!r}: expected the name of a placement group; {wrong}")


def _listed(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names)) or "none with a name"


def _named(group: Any) -> str:
    return repr(group) if isinstance(group, str) else str(getattr(getattr(group, "id", None), "hex", str)())


def _make(bundles: Sequence[Mapping[str, float]], strategy: str) -> Any:
    return api.ray().util.placement_group(list(bundles), strategy=strategy)


def _remove(group: Any) -> None:
    if api.is_connected():  # else it has ended with the connection
        _let_settle(group)
        api.ray().util.remove_placement_group(group)


def _let_settle(group: Any) -> None:
    """Wait, on a thread, while Ray is placing it: what nodes reserve for a group that is removed meanwhile stays reserved.

    Ray up to 2.60 loses it in one or two of a hundred such removals (ray-project/ray#64693).
    """
    give_up = time.monotonic() + _SETTLES
    while _state(group).get("stats", {}).get("scheduling_state") in _BEING_PLACED and time.monotonic() < give_up:
        threading.Event().wait(_LOOK_EVERY)


def _state(group: Any) -> Mapping[str, Any]:
    found: Mapping[str, Any] = api.ray().util.placement_group_table(group)
    return found
