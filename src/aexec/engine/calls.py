"""What is said to the driver, and what the driver says to itself."""

from __future__ import annotations

from typing import Any

from aexec.engine.scheduler import SchedulerStatistics
from aexec.engine.stream import TokenStream
from aexec.messages.base import Message
from aexec.messages.operations import PauseMode
from aexec.messages.request import SamplingParams
from aexec.messages.step import ForwardLaunched, StepId, StepResult

__all__ = (
    "Abort",
    "Generate",
    "GetStatistics",
    "Hold",
    "Release",
    "RunStep",
    "StepEnded",
    "StepFailed",
    "StepLaunched",
)


class Generate(Message[None], frozen=True, kw_only=True):
    """Run a request; answered once it is queued.

    Attributes:
        request_id: Its id.
        prompt: Token ids, not checked yet.
        sampling: How to sample.
        stream: Where its tokens go.
    """

    request_id: str
    prompt: tuple[object, ...]
    sampling: SamplingParams
    stream: TokenStream


class Abort(Message[bool], frozen=True, kw_only=True):
    """End a request now; False: there is no such request any longer.

    Attributes:
        request_id: Which.
        stream: Only if this is its stream: an id may be used again.
    """

    request_id: str
    stream: TokenStream | None = None


class GetStatistics(Message[SchedulerStatistics], frozen=True):
    """How many requests, blocks and steps are there?"""


class Hold(Message[None], frozen=True, kw_only=True):
    """Launch no step until :class:`Release`; answered when none is in flight.

    Attributes:
        reason: Whose hold it is; each is released by itself.
        mode: ``keep``: requests wait where they are. ``finish``: those that run go on to their
            end, and those that wait, wait. ``abort``: all end with the finish reason ``abort``.
    """

    reason: str
    mode: PauseMode = "keep"


class Release(Message[None], frozen=True, kw_only=True):
    """End a hold; steps are launched again once there is none.

    Attributes:
        reason: Whose.
        recompute: The KV cache is void: running requests compute their tokens again.
    """

    reason: str
    recompute: bool = False


class RunStep(Message[None], frozen=True):
    """There may be something to run."""


class StepLaunched(Message[None], frozen=True):
    """The executor has queued the forward pass of ``step``, or run it whole."""

    step: StepId
    reply: ForwardLaunched | StepResult


class StepEnded(Message[None], frozen=True):
    """The executor has sampled ``step``; ``output`` is what the output rank said."""

    step: StepId
    output: Any


class StepFailed(Message[None], frozen=True):
    """``step`` ended in an error."""

    step: StepId
    error: Exception
