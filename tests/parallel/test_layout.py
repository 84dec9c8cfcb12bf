from __future__ import annotations

import pytest

from aexec.config import ParallelConfig
from aexec.errors import ConfigError
from aexec.parallel.layout import Coordinates, coordinates


def test_tensor_parallel_ranks_are_neighbours():
    """TP runs fastest: ranks 0 and 1 share a stage, rank 2 begins the next."""
    layout = ParallelConfig(tensor_parallel_size=2, pipeline_parallel_size=3)
    assert [coordinates(rank, layout) for rank in range(6)] == [
        Coordinates(pp_rank, tp_rank) for pp_rank in range(3) for tp_rank in range(2)
    ]


def test_the_output_rank_is_the_first_of_the_last_stage():
    """The rank whose reply counts sits in the last stage, at TP rank 0."""
    layout = ParallelConfig(tensor_parallel_size=2, pipeline_parallel_size=3)
    assert coordinates(layout.output_rank, layout) == Coordinates(pp_rank=2, tp_rank=0)


@pytest.mark.parametrize("rank", [-1, 4])
def test_a_rank_outside_the_layout_is_refused(rank):
    """The error names the rank and the ranks there are."""
    with pytest.raises(ConfigError, match=f"rank is {rank}: expected 0 to 3"):
        coordinates(rank, ParallelConfig(tensor_parallel_size=4))
