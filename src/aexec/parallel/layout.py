"""Ranks, and who they share what with: DP x PP x TP, TP fastest. Pure.

An executor is one replica, PP x TP ranks counted from 0; only launchers that start all
replicas at once count through DP as well. Everything here is a list of ranks; what is made
of such lists is in ``parallel.groups``.

Source: vLLM 0.25.1, ``distributed/parallel_state.py``, ``initialize_model_parallel``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from aexec.config import ParallelConfig
from aexec.errors import ConfigError

__all__ = ("Coordinates", "Place", "RankLayout", "coordinates")

RankGroups = tuple[tuple[int, ...], ...]


class Coordinates(NamedTuple):
    """Where a rank sits.

    Attributes:
        pp_rank: Its pipeline stage.
        tp_rank: Its place among the ranks that share the stage's layers.
    """

    pp_rank: int
    tp_rank: int


class Place(NamedTuple):
    """Where a rank of all replicas sits.

    Attributes:
        dp_rank: Its replica.
        pp_rank: Its pipeline stage.
        tp_rank: Its place among the ranks that share the stage's layers.
    """

    dp_rank: int
    pp_rank: int
    tp_rank: int


def coordinates(rank: int, parallel: ParallelConfig) -> Coordinates:
    """Place a rank within its replica.

    Raises:
        ConfigError: The layout has no such rank.
    """
    if not 0 <= rank < parallel.world_size:
        raise ConfigError(f"rank is {rank}: expected 0 to {parallel.world_size - 1}, for the layout is {parallel}")
    return Coordinates(*divmod(rank, parallel.tensor_parallel_size))


@dataclass(frozen=True, slots=True)
class RankLayout:
    """The layout of one replica, or of all of them.

    >>> layout = RankLayout(tensor=2, pipeline=2)
    >>> layout.tensor_groups, layout.pipeline_groups, layout.output_rank()
    (((0, 1), (2, 3)), ((0, 2), (1, 3)), 2)

    Attributes:
        tensor: Ranks that share each layer.
        pipeline: Stages.
        data: Replicas; 1 for the ranks of one executor.
    """

    tensor: int = 1
    pipeline: int = 1
    data: int = 1

    @classmethod
    def of_replica(cls, parallel: ParallelConfig) -> RankLayout:
        """The ranks of one executor."""
        return cls(parallel.tensor_parallel_size, parallel.pipeline_parallel_size)

    @classmethod
    def of_all(cls, parallel: ParallelConfig) -> RankLayout:
        """The ranks of all replicas, as a launcher such as torchrun counts them."""
        return cls(parallel.tensor_parallel_size, parallel.pipeline_parallel_size, parallel.data_parallel_size)

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.data * self.replica_size

    @property
    def replica_size(self) -> int:
        """Ranks of one replica."""
        return self.pipeline * self.tensor

    @property
    def one_replica(self) -> RankLayout:
        """The layout of each replica for itself."""
        return RankLayout(self.tensor, self.pipeline)

    def place(self, rank: int) -> Place:
        """Where a rank sits.

        Raises:
            ConfigError: The layout has no such rank.
        """
        if not 0 <= rank < self.size:
            raise ConfigError(f"rank is {rank}: expected 0 to {self.size - 1}, for the layout is {self}")
        replica, inner = divmod(rank, self.replica_size)
        return Place(replica, *divmod(inner, self.tensor))

    def rank(self, pp_rank: int, tp_rank: int, dp_rank: int = 0) -> int:
        """The rank that sits there."""
        return (dp_rank * self.pipeline + pp_rank) * self.tensor + tp_rank

    def output_rank(self, dp_rank: int = 0) -> int:
        """The rank of a replica whose reply is the step's result: the first of its last stage."""
        return self.rank(self.pipeline - 1, 0, dp_rank)

    def neighbour(self, rank: int, stages: int) -> int | None:
        """The rank at the same place so many stages on; None past the ends of the pipeline."""
        dp_rank, pp_rank, tp_rank = self.place(rank)
        return self.rank(pp_rank + stages, tp_rank, dp_rank) if 0 <= pp_rank + stages < self.pipeline else None

    @property
    def tensor_groups(self) -> RankGroups:
        """Ranks that share each layer: neighbours."""
        return tuple(tuple(range(first, first + self.tensor)) for first in range(0, self.size, self.tensor))

    @property
    def pipeline_groups(self) -> RankGroups:
        """Ranks that hand hidden states on, in the order of their stages."""
        starts = (
            replica * self.replica_size + tp_rank for replica in range(self.data) for tp_rank in range(self.tensor)
        )
        return tuple(tuple(range(start, start + self.replica_size, self.tensor)) for start in starts)

    @property
    def data_groups(self) -> RankGroups:
        """Ranks that hold the same weights in different replicas."""
        return tuple(tuple(range(start, self.size, self.replica_size)) for start in range(self.replica_size))

    def local_rank(self, rank: int, num_nodes: int) -> int:
        """Its place on its node, when nodes take equally many ranks, in order.

        Raises:
            ConfigError: The ranks do not divide among the nodes.
        """
        if num_nodes < 1 or self.size % num_nodes:
            raise ConfigError(f"{self.size} ranks on {num_nodes} nodes: expected a number that divides {self.size}")
        self.place(rank)
        return rank % (self.size // num_nodes)
