"""What a worker is told about its place, before it does anything."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from aexec.config import ExecutorConfig
from aexec.parallel.layout import RankLayout, coordinates
from aexec.parallel.link import StageLink

__all__ = ("Progress", "WorkerContext", "no_progress", "place_worker")


class Progress(Protocol):
    """Told how far a start has come; see ``aexec.model.base.LoadProgress``."""

    def __call__(self, phase: str, done: float, total: float) -> None:
        """``done`` of ``total`` units of ``phase`` are through."""
        ...


def no_progress(phase: str, done: float, total: float) -> None:
    """Nobody wants to know."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerContext:
    """One rank's place in its group; the first argument of every worker class.

    Attributes:
        rank: Rank in the worker group.
        local_rank: Rank among the group's workers of this node.
        world_size: Ranks of the group.
        tp_rank: Place among the ranks that share its layers.
        pp_rank: Its pipeline stage.
        dp_rank: Its data-parallel replica.
        num_replicas: Replicas whose ranks all meet at the same place; 1: this group is alone there.
        local_world_size: Ranks of this node, of all replicas; 0: all ranks of the group are on it.
        owns_process: This process is the worker's, to set up as it needs; False: it is the user's.
        node_id: Names the node.
        node_ip: The node's address.
        output_rank: The rank whose reply is the step's result.
        is_driver_worker: True for the first rank of each tensor-parallel group.
        generation: Of the worker group, from 1.
        distributed_init_method: For ``torch.distributed``, as ``tcp://host:port``; empty
            in a world of one.
        device: As in ``cpu`` or ``cuda:0``; ``auto`` lets the worker choose.
        config: The executor's settings.
        progress: Call it, from any thread, to say how far a long phase has come.
        group_secret: What the group's processes prove to each other that they belong together,
            where anybody could dial; empty where nobody else can. It is not sent along with the rest.
        stage_link: How hidden states get from stage to stage, where that is with the steps
            themselves; None: the worker sees to it. Use it in ``execute_model`` only.
    """

    rank: int
    local_rank: int
    world_size: int
    tp_rank: int
    pp_rank: int
    dp_rank: int
    node_id: str
    node_ip: str
    output_rank: int
    is_driver_worker: bool
    generation: int
    distributed_init_method: str
    device: str
    config: ExecutorConfig
    num_replicas: int = 1
    local_world_size: int = 0
    owns_process: bool = True
    progress: Progress = no_progress
    group_secret: bytes = field(default=b"", repr=False)
    stage_link: StageLink | None = None

    @property
    def world(self) -> RankLayout:
        """Of all ranks that meet at ``distributed_init_method``, those of other replicas too."""
        parallel = self.config.parallel
        return RankLayout(parallel.tensor_parallel_size, parallel.pipeline_parallel_size, self.num_replicas)

    @property
    def world_rank(self) -> int:
        """This rank, counted through all replicas."""
        return self.dp_rank * self.world_size + self.rank

    @property
    def num_local_ranks(self) -> int:
        """Ranks that share this node with this one, itself counted."""
        return self.local_world_size or self.world.size


def place_worker(
    rank: int,
    config: ExecutorConfig,
    *,
    generation: int,
    local_rank: int,
    node_id: str,
    node_ip: str,
    distributed_init_method: str = "",
    device: str = "auto",
    progress: Progress = no_progress,
    dp_rank: int = 0,
    num_replicas: int = 1,
    local_world_size: int = 0,
    owns_process: bool = True,
    group_secret: bytes = b"",
) -> WorkerContext:
    """The context of one rank; what follows from the layout is filled in.

    Raises:
        ConfigError: The layout has no such rank.
    """
    pp_rank, tp_rank = coordinates(rank, config.parallel)
    return WorkerContext(
        rank=rank,
        local_rank=local_rank,
        world_size=config.parallel.world_size,
        tp_rank=tp_rank,
        pp_rank=pp_rank,
        dp_rank=dp_rank,
        node_id=node_id,
        node_ip=node_ip,
        output_rank=config.parallel.output_rank,
        is_driver_worker=tp_rank == 0,
        generation=generation,
        distributed_init_method=distributed_init_method,
        device=device,
        config=config,
        num_replicas=num_replicas,
        local_world_size=local_world_size,
        owns_process=owns_process,
        progress=progress,
        group_secret=group_secret,
    )
