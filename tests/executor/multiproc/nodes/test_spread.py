from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aexec import ExecutorConfig, ParallelConfig
from aexec.errors import ConfigError
from aexec.executor.multiproc.nodes.spread import names_of, spread


def ranks_of(tensor, pipeline, **settings):
    layout = ParallelConfig(tensor_parallel_size=tensor, pipeline_parallel_size=pipeline)
    return spread(ExecutorConfig(parallel=layout, **settings))


@given(st.integers(1, 8), st.lists(st.integers(1, 4), min_size=1, max_size=5))
def test_every_rank_is_on_one_node(tensor, counts):
    """MN-01: whether nodes have equally many or not, their ranks follow each other, the leader's first."""
    ranks = ranks_of(tensor, sum(counts), nnodes=len(counts), ranks_per_node=[tensor * count for count in counts])
    assert [rank for each in ranks for rank in each] == list(range(tensor * sum(counts)))
    assert list(map(len, ranks)) == [tensor * count for count in counts]


def test_nodes_have_equally_many_unless_told_otherwise():
    """A pipeline stage stays on its node, where tensor parallelism talks most."""
    assert ranks_of(2, 2, nnodes=2) == (range(2), range(2, 4))


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"nnodes": 2}, r"3 ranks do not divide among 2 nodes \(tensor_parallel_size=3 x .*ranks_per_node"),
        ({"nnodes": 2, "ranks_per_node": [3, 1]}, r"ranks_per_node is \[3, 1\], which is 4 ranks"),
    ],
)
def test_ranks_that_do_not_fit_are_refused(settings, text):
    """MN-01: with the numbers, and not by an assertion."""
    with pytest.raises(ConfigError, match=text):
        ranks_of(3, 1, **settings)


def test_ranks_are_named_for_people():
    """One, or from one to another."""
    assert [names_of(range(2, 3)), names_of(range(4))] == ["rank 2", "ranks 0 to 3"]
