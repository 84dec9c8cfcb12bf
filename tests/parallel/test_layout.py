from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aexec.config import ParallelConfig
from aexec.errors import ConfigError
from aexec.parallel.layout import Coordinates, Place, RankLayout, coordinates


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


sizes = st.integers(1, 4)
layouts = st.builds(RankLayout, tensor=sizes, pipeline=sizes, data=sizes)


@given(layouts)
def test_every_rank_has_one_place_and_every_place_one_rank(layout):
    """RNK-01: DP is slowest, then PP, and TP is fastest."""
    places = [layout.place(rank) for rank in range(layout.size)]
    assert places == sorted(places)
    assert [layout.rank(place.pp_rank, place.tp_rank, place.dp_rank) for place in places] == list(range(layout.size))


@given(layouts)
def test_groups_of_each_kind_cover_all_ranks_once(layout):
    """RNK-02: and all members of a group differ in one coordinate only."""
    kinds = {"tp_rank": layout.tensor_groups, "pp_rank": layout.pipeline_groups, "dp_rank": layout.data_groups}
    for free, groups in kinds.items():
        assert sorted(rank for group in groups for rank in group) == list(range(layout.size))
        for group in groups:
            places = [layout.place(rank)._asdict() for rank in group]
            assert [place.pop(free) for place in places] == list(range(len(group)))
            assert all(place == places[0] for place in places)


def test_eight_ranks_with_tensor_parallel_two_make_four_groups():
    """G53: the layout follows from the settings, never from the size of the world."""
    layout = RankLayout.of_all(ParallelConfig(tensor_parallel_size=2, pipeline_parallel_size=2, data_parallel_size=2))
    assert layout.tensor_groups == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert layout.pipeline_groups == ((0, 2), (1, 3), (4, 6), (5, 7))
    assert layout.data_groups == ((0, 4), (1, 5), (2, 6), (3, 7))


@given(layouts)
def test_each_replica_has_its_output_rank_in_its_last_stage(layout):
    """RNK-03: the first rank of it, the same that the settings name for a replica by itself."""
    for replica in range(layout.data):
        assert layout.place(layout.output_rank(replica)) == Place(replica, layout.pipeline - 1, 0)
    alone = ParallelConfig(tensor_parallel_size=layout.tensor, pipeline_parallel_size=layout.pipeline)
    assert RankLayout.of_replica(alone).output_rank() == alone.output_rank


@given(layouts)
def test_hidden_states_go_to_the_same_place_of_the_next_stage(layout):
    """The last stage has nobody after it, the first nobody before, and each replica keeps to itself."""
    for rank in range(layout.size):
        place, after = layout.place(rank), layout.neighbour(rank, 1)
        if place.pp_rank == layout.pipeline - 1:
            assert after is None
        else:
            assert layout.place(after) == place._replace(pp_rank=place.pp_rank + 1)
            assert layout.neighbour(after, -1) == rank


def test_ranks_are_counted_anew_on_each_node():
    """Nodes take equally many ranks, in order."""
    layout = RankLayout(tensor=2, pipeline=3)
    assert [layout.local_rank(rank, 2) for rank in range(6)] == [0, 1, 2, 0, 1, 2]
    with pytest.raises(ConfigError, match="6 ranks on 4 nodes: expected a number that divides 6"):
        layout.local_rank(0, 4)


def test_a_place_that_is_not_there_is_refused():
    """The error names the rank and the ranks there are."""
    with pytest.raises(ConfigError, match="rank is 6: expected 0 to 5"):
        RankLayout(tensor=2, pipeline=3).place(6)
