"""What a worker is told about its place, before it does anything."""

from __future__ import annotations

from dataclasses import dataclass

from aexec.config import ExecutorConfig

__all__ = ("WorkerContext",)


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
        node_id: Names the node.
        node_ip: The node's address.
        output_rank: The rank whose reply is the step's result.
        is_driver_worker: True for the first rank of each tensor-parallel group.
        generation: Of the worker group, from 1.
        distributed_init_method: For ``torch.distributed``, as ``tcp://host:port``; empty
            in a world of one.
        device: As in ``cpu`` or ``cuda:0``; ``auto`` lets the worker choose.
        config: The executor's settings.
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
