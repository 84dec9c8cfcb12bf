"""Buffers of the graph: how many and how large, decided without Ray."""

from __future__ import annotations

import pytest

from aexec.errors import ConfigError
from aexec.executor.ray.graph.buffers import (
    DEFAULT_BYTES,
    LEAST_BYTES,
    STORE_SHARE,
    Buffers,
    most_in_flight,
    plan_buffers,
)
from aexec.parallel.layout import RankLayout


def test_each_stage_works_at_another_step_and_a_step_is_two_executions():
    """With fewer buffers a pipeline would stand still."""
    assert [plan_buffers(RankLayout(1, stages), None, None).number for stages in (1, 2, 4)] == [4, 6, 10]


def test_a_long_pipeline_has_no_more_than_it_can_use():
    """Buffers are memory."""
    assert plan_buffers(RankLayout(1, 64), None, None).number == 16


def test_what_is_asked_for_is_what_is_made():
    """It fits."""
    assert plan_buffers(RankLayout(2, 2), 3_000_000, 1 << 30).size == 3_000_000


def test_left_open_it_is_as_large_as_a_part_of_the_object_store_allows():
    """Others have objects there too; and a store of a few bytes still has to hold a step."""
    layout, store = RankLayout(2, 2), 200 << 20
    buffers = plan_buffers(layout, None, store)
    assert LEAST_BYTES < buffers.size < DEFAULT_BYTES
    assert buffers.size * buffers.number * (layout.size + 1) <= store * STORE_SHARE
    assert plan_buffers(layout, None, 1 << 40).size == plan_buffers(layout, None, None).size == DEFAULT_BYTES
    assert plan_buffers(layout, None, 1000).size == LEAST_BYTES


def test_more_than_the_object_store_has_is_refused_with_both_figures():
    """Ray would only say that it is full."""
    with pytest.raises(
        ConfigError, match=r"graph_buffer_bytes is 8,388,608: .* 240 MiB, and .* has 200 MiB; make them"
    ):
        plan_buffers(RankLayout(2, 2), 8 << 20, 200 << 20)


def test_over_nodes_no_message_waits_for_a_reader():
    """It would be the node's raylet that waits, for ever if the reader has died: so one at a time."""
    assert most_in_flight(Buffers(6, 1 << 20), one_node=True) == 6
    assert most_in_flight(Buffers(6, 1 << 20), one_node=False) == 1
