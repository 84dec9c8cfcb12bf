"""What ``llm.events()`` tells: how the engine loses its workers, and what becomes of the requests."""

from __future__ import annotations

import msgspec

__all__ = ("EngineDown", "EngineEvent", "EngineFailed", "EngineRecovered", "RequestCondemned")


class EngineDown(msgspec.Struct, frozen=True, kw_only=True):
    """The workers are gone and being rebuilt; all requests are kept.

    Attributes:
        outage: Counts the outages of this engine, from 1.
        reason: What brought the workers down.
        lost_steps: Steps that were in flight, in order; none of them is applied any longer.
        num_running: Requests that will be computed again.
        num_waiting: Requests that had not begun.
    """

    outage: int
    reason: str
    lost_steps: tuple[int, ...]
    num_running: int
    num_waiting: int


class EngineRecovered(msgspec.Struct, frozen=True, kw_only=True):
    """The workers are back, and all requests go on.

    Attributes:
        outage: Which one is over.
        seconds: How long no step could be launched.
        generation: The executor's worker group, as in ``executor.generation``.
        num_requests: Requests that go on where they were.
        num_recomputed_tokens: Tokens that were computed already, and have to be once more.
    """

    outage: int
    seconds: float
    generation: int
    num_requests: int
    num_recomputed_tokens: int


class RequestCondemned(msgspec.Struct, frozen=True, kw_only=True):
    """A request was running in several crashes in a row, the last time alone: it has failed, the others go on.

    Attributes:
        request_id: Which.
        num_crashes: In how many.
        reason: The last of them.
    """

    request_id: str
    num_crashes: int
    reason: str


class EngineFailed(msgspec.Struct, frozen=True, kw_only=True):
    """The workers will not come back: every stream has ended with ``reason``, and nothing new is taken.

    Attributes:
        reason: The executor's last error, with why it is final.
        num_requests: Requests that ended with it.
    """

    reason: str
    num_requests: int


EngineEvent = EngineDown | EngineRecovered | RequestCondemned | EngineFailed
