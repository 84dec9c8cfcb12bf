"""Settings of backend ``ray``: the cluster, where its workers are placed, and how a step reaches them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from aexec.config.checks import mapping, one_of, seconds, whole
from aexec.errors import ConfigError

__all__ = ("DEVICES", "NEW_GROUP", "RayOptions")

#: As ``placement_group``: one of our own.
NEW_GROUP = "new"
#: Resources of which a rank has one at most.
DEVICES = ("GPU", "XPU", "TPU")
_LEAST_BUFFER = 1 << 16  # bytes; a step's message alone is up to this size


@dataclass(frozen=True, slots=True, kw_only=True)
class RayOptions:
    """Where Ray places workers, and how a step reaches them there.

    Attributes:
        ray_address: The cluster: ``"local"`` starts one of our own on this machine, anything
            else is joined; None: the one that this process is connected to, else that of
            ``RAY_ADDRESS``, else a local one of our own. One of our own ends with the executor.
        placement_group: A Ray placement group, or the name of one; it is never removed. None:
            that of the Ray actor or task that this is, if its children belong there, else one of
            our own; ``"new"``: one of our own in any case.
        placement_strategy: How bundles of our own are spread over nodes: ``PACK``, ``SPREAD``,
            ``STRICT_PACK`` or ``STRICT_SPREAD``.
        placement_timeout: Seconds to wait for the placement group; then the error says what is missing.
        bundle_indices: The bundles of a given placement group to take, one for each rank; None:
            the first that have the resource.
        ray_resource: What a worker takes of its bundle: ``GPU``, ``CPU``, ``TPU``, or a resource of
            your own; ``XPU`` is counted by Ray as ``GPU``. None: ``GPU`` if the cluster has any, else ``CPU``.
        ray_resource_per_worker: How much of it; a fraction shares a device.
        ray_bundle_resources: What each bundle of our own reserves besides, for the worker's own
            tasks, as in ``{"CPU": 4}``.
        ray_runtime_env: Ray's ``runtime_env`` for the workers; its ``env_vars`` are there before
            the worker's interpreter starts.
        ray_nsight: Run each worker under Nsight Systems; options of ``nsys profile`` as a dict.
        ray_step_plane: How a step reaches the workers: ``compiled_graph``, Ray's, which also
            carries hidden states from stage to stage; ``channel``, the lines that ``mp`` has.
        graph_transport: How the graph carries hidden states: ``nccl`` from device to device,
            ``shm`` through host memory; ``auto``: ``nccl`` where each worker has a CUDA device of its own.
        graph_overlap: Let the graph send hidden states while it computes; needs ``nccl``.
        graph_buffer_bytes: The largest message of the graph: a step's, or the hidden states of
            one; None: 16 MiB, or less where Ray's object store is small.
        graph_timeout: Seconds that the graph may take for one of its messages.
        graph_idle_release: Seconds without a step after which the graph is taken down, for it
            keeps a core busy in each process; the next step builds it again. None: never.
    """

    ray_address: str | None = None
    placement_group: Any = None
    placement_strategy: Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"] = "PACK"
    placement_timeout: float = 600.0
    bundle_indices: Sequence[int] | None = None
    ray_resource: str | None = None
    ray_resource_per_worker: float = 1.0
    ray_bundle_resources: Mapping[str, float] = field(default_factory=dict[str, float])
    ray_runtime_env: Mapping[str, Any] = field(default_factory=dict[str, Any])
    ray_nsight: bool | Mapping[str, str] = False
    ray_step_plane: Literal["compiled_graph", "channel"] = "compiled_graph"
    graph_transport: Literal["auto", "nccl", "shm"] = "auto"
    graph_overlap: bool = False
    graph_buffer_bytes: int | None = None
    graph_timeout: float = 300.0
    graph_idle_release: float | None = 5.0

    def __post_init__(self) -> None:
        """Refuse what no cluster could serve."""
        seconds(self, "placement_timeout", "graph_timeout", "graph_idle_release")
        mapping(self, "ray_bundle_resources", "ray_runtime_env")
        one_of(self, "placement_strategy", "PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD")
        one_of(self, "ray_step_plane", "compiled_graph", "channel")
        one_of(self, "graph_transport", "auto", "nccl", "shm")
        whole(self, _LEAST_BUFFER, "graph_buffer_bytes")
        _check_names(self)
        _check_amounts(self)
        _check_bundles(self)
        _check_graph(self)

    def ray_settings(self) -> tuple[str, ...]:
        """Names of these settings that differ from their defaults."""
        return tuple(each.name for each in dataclasses.fields(RayOptions) if getattr(self, each.name) != _default(each))


def _default(of: dataclasses.Field[Any]) -> Any:
    return of.default if of.default_factory is dataclasses.MISSING else of.default_factory()


def _check_names(options: RayOptions) -> None:
    for name in ("ray_address", "placement_group", "ray_resource"):
        value: object = getattr(options, name)
        if isinstance(value, str) and not value.strip():
            raise ConfigError(f"ExecutorConfig.{name} is empty: expected a name, or None")
    nsight: object = options.ray_nsight
    if not isinstance(nsight, bool | Mapping):
        raise ConfigError(f"ExecutorConfig.ray_nsight is {nsight!r}: expected True, or options of 'nsys profile'")


def _check_amounts(options: RayOptions) -> None:
    amount = options.ray_resource_per_worker
    if not (0 < amount <= 1 or (amount > 1 and amount == int(amount))):
        raise ConfigError(
            f"ExecutorConfig.ray_resource_per_worker is {amount!r}: expected a fraction of one, or a whole number"
        )
    if amount > 1 and options.ray_resource in {None, *DEVICES}:
        raise ConfigError(
            f"ExecutorConfig.ray_resource_per_worker is {amount!r}: a rank has one device at most; say "
            "ray_resource='CPU', or name the resource that is meant"
        )
    for name, value in options.ray_bundle_resources.items():
        if not value > 0:
            raise ConfigError(f"ExecutorConfig.ray_bundle_resources[{name!r}] is {value!r}: expected a positive number")


def _check_bundles(options: RayOptions) -> None:
    indices = options.bundle_indices
    if indices is None:
        return
    if isinstance(indices, str) or not all(type(index) is int and index >= 0 for index in indices):
        raise ConfigError(f"ExecutorConfig.bundle_indices is {indices!r}: expected a list of numbers from 0")
    if options.placement_group == NEW_GROUP:
        raise ConfigError(
            f"ExecutorConfig.bundle_indices is {indices!r} and placement_group is 'new': bundles can be chosen of a "
            "given group only, one of our own has one for each rank"
        )


def _check_graph(options: RayOptions) -> None:
    if options.graph_overlap and options.graph_transport == "shm":
        raise ConfigError(
            "ExecutorConfig.graph_overlap is True and graph_transport is 'shm': only 'nccl' sends while it computes; "
            "take graph_transport='nccl', or leave graph_overlap out"
        )
    if options.ray_step_plane == "channel" and (options.graph_overlap or options.graph_transport == "nccl"):
        raise ConfigError(
            f"ExecutorConfig.ray_step_plane is 'channel', graph_transport is {options.graph_transport!r} and "
            f"graph_overlap is {options.graph_overlap}: the channel plane has no graph, there torch.distributed "
            "carries hidden states; take ray_step_plane='compiled_graph', or leave the graph's settings out"
        )
