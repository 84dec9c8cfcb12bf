"""The life of an executor, as a table. Pure."""

from __future__ import annotations

import enum

from aexec.errors import AexecError, ExecutorClosed, ExecutorUnavailable, ProtocolError

__all__ = ("TRANSITIONS", "ExecutorEvent", "ExecutorState", "advance", "refusal")


class ExecutorState(enum.Enum):
    """Where the executor is."""

    STARTING = "starting"
    READY = "ready"
    DOWN = "down, to be restarted"
    DRAINING = "draining"
    FAILED = "failed"
    CLOSING = "closing"
    CLOSED = "closed"


class ExecutorEvent(enum.Enum):
    """What can happen to it."""

    STARTED = "all ranks are ready"
    DIED = "a rank died, and the restart budget has room"
    GAVE_UP = "a rank died, for good"
    DRAIN = "close(drain=...) was called"
    CLOSE = "close() was called"
    GONE = "all workers have ended"


_S, _E = ExecutorState, ExecutorEvent

TRANSITIONS: dict[ExecutorState, dict[ExecutorEvent, ExecutorState]] = {
    _S.STARTING: {_E.STARTED: _S.READY, _E.GAVE_UP: _S.FAILED, _E.CLOSE: _S.CLOSING},
    _S.READY: {_E.DIED: _S.DOWN, _E.GAVE_UP: _S.FAILED, _E.DRAIN: _S.DRAINING, _E.CLOSE: _S.CLOSING},
    _S.DOWN: {_E.STARTED: _S.READY, _E.GAVE_UP: _S.FAILED, _E.CLOSE: _S.CLOSING},
    _S.DRAINING: {_E.CLOSE: _S.CLOSING},
    _S.FAILED: {_E.CLOSE: _S.CLOSING},
    _S.CLOSING: {_E.GONE: _S.CLOSED},
    _S.CLOSED: {},
}


def advance(state: ExecutorState, event: ExecutorEvent) -> ExecutorState:
    """The state after ``event``.

    Raises:
        ProtocolError: It cannot happen in ``state``.
    """
    after = TRANSITIONS[state].get(event)
    if after is None:
        raise ProtocolError(f"an executor that is {state.value} was told: {event.value}")
    return after


def refusal(state: ExecutorState, reason: str = "", retry_after: float | None = None) -> AexecError | None:
    """Why a call cannot be taken in ``state``, unless it can or has failed; see ``ExecutorActor``."""
    if state in (_S.CLOSING, _S.CLOSED):
        return ExecutorClosed("the executor is closed" if state is _S.CLOSED else "the executor is closing")
    if state is _S.DRAINING:
        return ExecutorClosed("the executor is closing: it ends what runs, and takes nothing new")
    if state is _S.STARTING:
        return ExecutorUnavailable("its workers are starting", retry_after)
    if state is _S.DOWN:
        return ExecutorUnavailable(reason, retry_after)
    return None
