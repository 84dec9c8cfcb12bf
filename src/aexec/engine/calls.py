"""What is said to the driver, and what the driver says to itself."""

from __future__ import annotations

from typing import Any

from aexec.engine.grammar.following import RequestGrammar
from aexec.engine.masks import Masks
from aexec.engine.request import Request
from aexec.engine.statistics import EngineStatistics
from aexec.engine.stream import TokenStream
from aexec.messages.base import Message
from aexec.messages.operations import PauseMode
from aexec.messages.request import RequestOptions, SamplingParams
from aexec.messages.step import ForwardLaunched, StepId, StepResult

__all__ = (
    "Abort",
    "Drain",
    "Expire",
    "Generate",
    "GetStatistics",
    "GrammarReady",
    "GroupLost",
    "GroupReady",
    "HaveWeights",
    "Hold",
    "MaskReady",
    "Release",
    "ResetPrefixCache",
    "RunStep",
    "StepEnded",
    "StepFailed",
    "StepLaunched",
    "TakeRequests",
    "WaitedForWorkers",
)


class Generate(Message[None], frozen=True, kw_only=True):
    """Run a request; answered once it is queued.

    Attributes:
        request_id: Its id.
        prompt: Token ids, not checked yet.
        sampling: How to sample.
        options: How it is scheduled.
        streams: Where the tokens of each of its samples go.
    """

    request_id: str
    prompt: tuple[object, ...]
    sampling: SamplingParams
    options: RequestOptions = RequestOptions()
    streams: tuple[TokenStream, ...]


class Abort(Message[bool], frozen=True, kw_only=True):
    """End a request now; False: there is no such request any longer.

    Attributes:
        request_id: Which.
        stream: Only if this is its stream: an id may be used again.
    """

    request_id: str
    stream: TokenStream | None = None


class Expire(Message[None], frozen=True):
    """``request`` has taken ``seconds``, which is all that it may."""

    request: Request
    seconds: float


class GetStatistics(Message[EngineStatistics], frozen=True):
    """How many requests, blocks and steps are there?"""


class Hold(Message[None], frozen=True, kw_only=True):
    """Launch no step until :class:`Release`; answered when none is in flight.

    Attributes:
        reason: Whose hold it is; each is released by itself.
        mode: ``keep``: requests wait where they are. ``finish``: those that run go on to their
            end, and those that wait, wait. ``abort``: all end with the finish reason ``abort``.
        key: Tells it from others of the same reason. One whose asker leaves before the answer is gone.
    """

    reason: str
    mode: PauseMode = "keep"
    key: int = 0


class Release(Message[None], frozen=True, kw_only=True):
    """End a hold; steps are launched again once there is none.

    Attributes:
        reason: Whose.
        key: Only that one; None: all of this reason.
        recompute: The KV cache is void: running requests compute their tokens again.
    """

    reason: str
    key: int | None = None
    recompute: bool = False


class Drain(Message[None], frozen=True):
    """Take no new requests; answered when all have ended."""


class TakeRequests(Message[None], frozen=True):
    """The end of :class:`Drain`."""


class HaveWeights(Message[None], frozen=True):
    """The workers have whole weights.

    Attributes:
        given: They are not those with which the workers begin after a restart.
        generation: Which workers.
    """

    given: bool
    generation: int


class GroupLost(Message[None], frozen=True):
    """The executor says that a worker has died.

    Attributes:
        error: How.
        is_final: There will be no others.
    """

    error: Exception
    is_final: bool = False


class GroupReady(Message[None], frozen=True):
    """The executor says that its workers are rebuilt."""


class WaitedForWorkers(Message[None], frozen=True):
    """A request has waited for the workers for as long as it may.

    Attributes:
        outage: In which outage.
        request_id: Which.
    """

    outage: int
    request_id: str


class ResetPrefixCache(Message[bool], frozen=True):
    """Share no KV that is stored now; False: there is no prefix cache."""


class RunStep(Message[None], frozen=True):
    """There may be something to run."""


class StepLaunched(Message[None], frozen=True):
    """The executor has queued the forward pass of ``step``, or run it whole."""

    step: StepId
    reply: ForwardLaunched | StepResult


class GrammarReady(Message[None], frozen=True):
    """The grammar of ``request`` is compiled; None: it could not be, and ``error`` is why."""

    request: Request
    grammar: RequestGrammar | None
    error: Exception | None = None


class MaskReady(Message[None], frozen=True):
    """The bitmask of ``step`` is made; None: it could not be, and ``error`` is why."""

    step: StepId
    masks: Masks | None
    error: Exception | None = None


class StepEnded(Message[None], frozen=True):
    """The executor has sampled ``step``; ``output`` is what the output rank said."""

    step: StepId
    output: Any


class StepFailed(Message[None], frozen=True):
    """``step`` ended in an error.

    Attributes:
        step: Which.
        error: The executor's.
        was_waited: For what had to become of a rank that another one misses.
    """

    step: StepId
    error: Exception
    was_waited: bool = False
