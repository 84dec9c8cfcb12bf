"""The life of a graph, as a table."""

from __future__ import annotations

import pytest

from aexec.errors import ProtocolError
from aexec.executor.ray.graph.states import TRANSITIONS, GraphEvent, GraphState, after


def test_a_graph_goes_round():
    """Wanted, built, idle, released, and wanted again."""
    state = GraphState.DOWN
    seen = []
    for event in (GraphEvent.WANTED, GraphEvent.BUILT, GraphEvent.IDLE, GraphEvent.RELEASED, GraphEvent.WANTED):
        state = after(state, event)
        seen.append(state.value)
    assert seen == ["being built", "built", "being released", "released", "being built"]


def test_it_can_be_closed_at_any_time_and_only_once():
    """Whatever is under way."""
    closable = {state for state in GraphState if GraphEvent.CLOSE in TRANSITIONS[state]}
    assert closable == set(GraphState) - {GraphState.CLOSED}


def test_one_that_broke_is_never_used_again():
    """What its actors are at is not known."""
    assert set(TRANSITIONS[GraphState.BROKEN]) == {GraphEvent.CLOSE}


def test_what_cannot_happen_is_an_error_that_says_both():
    """A fault of ours."""
    with pytest.raises(ProtocolError, match="a graph that is released was told: it is compiled and warm"):
        after(GraphState.DOWN, GraphEvent.BUILT)
