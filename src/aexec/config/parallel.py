"""How a model is spread over ranks."""

from __future__ import annotations

from dataclasses import dataclass

from aexec.config.checks import whole
from aexec.errors import ConfigError

__all__ = ("ParallelConfig",)


@dataclass(frozen=True, slots=True)
class ParallelConfig:
    """How a model is spread; ranks are laid out DP x PP x TP, TP fastest.

    Attributes:
        tensor_parallel_size: Ranks that share each layer.
        pipeline_parallel_size: Stages, each with its own layers.
        data_parallel_size: Whole replicas.
        pipeline_partition: Layers of each stage; None balances them.
    """

    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    data_parallel_size: int = 1
    pipeline_partition: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        """Refuse sizes below one, and a partition of another number of stages."""
        whole(self, 1, "tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")
        partition = self.pipeline_partition
        if partition is not None and (len(partition) != self.pipeline_parallel_size or min(partition) < 1):
            raise ConfigError(
                f"ParallelConfig.pipeline_partition is {partition}: expected {self.pipeline_parallel_size} numbers "
                "of layers, one for each stage"
            )

    @property
    def world_size(self) -> int:
        """Ranks of one executor: PP x TP (each data-parallel replica is a world of its own)."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def output_rank(self) -> int:
        """The rank whose reply is the step's result: the first of the last stage."""
        return self.world_size - self.tensor_parallel_size
