"""Rank to coordinates: DP x PP x TP with TP fastest, within one replica PP x TP.

Source: vLLM 0.25.1, ``distributed/parallel_state.py``, ``initialize_model_parallel``.
"""

from __future__ import annotations

from typing import NamedTuple

from aexec.config import ParallelConfig
from aexec.errors import ConfigError

__all__ = ("Coordinates", "coordinates")


class Coordinates(NamedTuple):
    """Where a rank sits.

    Attributes:
        pp_rank: Its pipeline stage.
        tp_rank: Its place among the ranks that share the stage's layers.
    """

    pp_rank: int
    tp_rank: int


def coordinates(rank: int, parallel: ParallelConfig) -> Coordinates:
    """Place ``rank`` in the layout.

    Raises:
        ConfigError: The layout has no such rank.
    """
    if not 0 <= rank < parallel.world_size:
        raise ConfigError(f"rank is {rank}: expected 0 to {parallel.world_size - 1}, for the layout is {parallel}")
    return Coordinates(*divmod(rank, parallel.tensor_parallel_size))
