"""The two-phase step as messages, and its state machine as a table.

A step is two messages. :class:`ExecuteModel` queues the forward pass and is answered
as soon as it is queued; while the device works, the driver fills the grammar bitmask;
:class:`SampleTokens` masks and samples. Several steps may be in flight, each keyed by
its id; ids increase, and results come in step order.
"""

from __future__ import annotations

import enum
from typing import Any, NewType

import msgspec

from aexec.messages.base import Message
from aexec.messages.batch import GrammarOutput

__all__ = (
    "TRANSITIONS",
    "ExecuteModel",
    "ForwardLaunched",
    "PairedStep",
    "SampleTokens",
    "StepEvent",
    "StepId",
    "StepResult",
    "StepState",
)

StepId = NewType("StepId", int)
"""Names a step; the driver gives it, and it increases."""


class ForwardLaunched(msgspec.Struct, frozen=True):
    """The forward pass of ``step`` is queued on the device; sample it next."""

    step: StepId


class StepResult(msgspec.Struct, frozen=True):
    """The end of a step.

    Attributes:
        step: Which.
        output: What the output rank returned: a ``ModelRunnerOutput`` from our own
            runner, anything from a worker class of yours.
    """

    step: StepId
    output: Any


class ExecuteModel(Message[ForwardLaunched | StepResult], frozen=True):
    """Run the forward pass of one step.

    Attributes:
        step: The driver's step id; it increases.
        payload: What to run: a ``SchedulerOutput`` for our own runner; executors and
            transports never look inside.
        num_tokens: Tokens to run. 0: nothing will be sampled, the step runs at once and
            its reply is the ``StepResult``. None: not known, a ``SampleTokens`` follows.
    """

    step: StepId
    payload: Any = None
    num_tokens: int | None = None


class SampleTokens(Message[StepResult], frozen=True):
    """Sample the step whose forward pass was launched.

    Attributes:
        step: Which step.
        grammar: Bitmask of the requests that have a grammar; None allows every token.
    """

    step: StepId
    grammar: GrammarOutput | None = None


class PairedStep(msgspec.Struct, frozen=True):
    """Both messages of a step as one, as they may reach a rank that was asked for both in one breath.

    Attributes:
        launch: The first; its call is that of the frame.
        sampling: The call of the second, which has no bitmask.
    """

    launch: ExecuteModel
    sampling: int


class StepState(enum.Enum):
    """Where one step is on one rank."""

    NEW = "new"
    EXECUTING = "executing"
    EXECUTED = "executed"
    SAMPLED = "sampled"
    DROPPED = "dropped"

    __hash__ = object.__hash__  # members are unique: by identity, which takes no call of Python's


class StepEvent(enum.Enum):
    """What can happen to it."""

    EXECUTE = "ExecuteModel, to be sampled"
    EXECUTE_WHOLE = "ExecuteModel, nothing to sample"
    FORWARD_DONE = "the forward pass ended"
    SAMPLE = "SampleTokens"
    DROP = "abort, failure or new generation"

    __hash__ = object.__hash__  # as above


TRANSITIONS: dict[StepState, dict[StepEvent, StepState]] = {
    StepState.NEW: {
        StepEvent.EXECUTE: StepState.EXECUTING,
        StepEvent.EXECUTE_WHOLE: StepState.SAMPLED,
        StepEvent.DROP: StepState.DROPPED,
    },
    StepState.EXECUTING: {
        StepEvent.FORWARD_DONE: StepState.EXECUTED,
        StepEvent.SAMPLE: StepState.SAMPLED,
        StepEvent.DROP: StepState.DROPPED,
    },
    StepState.EXECUTED: {
        StepEvent.SAMPLE: StepState.SAMPLED,
        StepEvent.DROP: StepState.DROPPED,
    },
    StepState.SAMPLED: {},
    StepState.DROPPED: {},
}
