"""The life of a graph that is built when it is needed, as a table. Pure."""

from __future__ import annotations

import enum

from aexec.errors import ProtocolError

__all__ = ("TRANSITIONS", "GraphEvent", "GraphState", "after")


class GraphState(enum.Enum):
    """Where the graph is; one that was never built counts as released."""

    DOWN = "released"
    BUILDING = "being built"
    UP = "built"
    RELEASING = "being released"
    BROKEN = "broken"
    CLOSED = "closed"


class GraphEvent(enum.Enum):
    """What can happen to it."""

    WANTED = "a step has come"
    BUILT = "it is compiled and warm"
    IDLE = "no step for a while"
    RELEASED = "it is taken down"
    BROKE = "it broke off, or could not be built or taken down"
    CLOSE = "the end"


_S, _E = GraphState, GraphEvent

TRANSITIONS: dict[GraphState, dict[GraphEvent, GraphState]] = {
    _S.DOWN: {_E.WANTED: _S.BUILDING, _E.CLOSE: _S.CLOSED},
    _S.BUILDING: {_E.BUILT: _S.UP, _E.BROKE: _S.BROKEN, _E.CLOSE: _S.CLOSED},
    _S.UP: {_E.IDLE: _S.RELEASING, _E.BROKE: _S.BROKEN, _E.CLOSE: _S.CLOSED},
    _S.RELEASING: {_E.RELEASED: _S.DOWN, _E.BROKE: _S.BROKEN, _E.CLOSE: _S.CLOSED},
    _S.BROKEN: {_E.CLOSE: _S.CLOSED},
    _S.CLOSED: {},
}


def after(state: GraphState, event: GraphEvent) -> GraphState:
    """The next state.

    Raises:
        ProtocolError: The event cannot happen there.
    """
    follows = TRANSITIONS[state].get(event)
    if follows is None:
        raise ProtocolError(f"a graph that is {state.value} was told: {event.value}")
    return follows
