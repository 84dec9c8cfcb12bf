"""What a lost worker group means for the requests. Pure: time and the executor's state come as arguments.

The driver asks :func:`fate_of` about each error of a step. Where the group is lost and is to
be rebuilt, the steps in flight are dropped, requests keep their tokens, seeds and streams,
and once the group is there again all of them are scheduled afresh: each computes its tokens
again, and goes on with the next one. As a token depends on the tokens before it and the
request's seed only, no stream shows where that was.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Mapping
from typing import NamedTuple

from aexec.engine.suspects import STRIKES, Suspects
from aexec.errors import EngineRecovering, ExecutorPaused, PeerLost, RequestFailed
from aexec.executor.lifecycle import ExecutorState
from aexec.messages.step import StepId

__all__ = ("PEER_SECONDS", "Fate", "Outage", "Recovery", "RecoveryStatistics", "fate_of", "is_again")

#: Seconds in which the end of a rank is known here, after another one has missed it.
PEER_SECONDS = 2.0

_USUAL = 5.0  # seconds that an outage is taken to last before there was one
_LEAST = 1.0  # seconds after which a retry is worth it

_OVER = (ExecutorState.DRAINING, ExecutorState.FAILED, ExecutorState.CLOSING, ExecutorState.CLOSED)


class Fate(enum.Enum):
    """What an executor's error of a step means."""

    OWN = "the workers are well: what failed did so for reasons of its own, and its requests end with the error"
    UNSURE = "a rank misses another one, and nobody else does so far: wait for what becomes of that"
    AGAIN = "the step is lost, the workers are well: its requests compute it again, and the steps behind it land"
    WAIT = "the workers are lost and being rebuilt: keep all requests"
    REBUILT = "the workers were lost, and are there again: compute all requests again"
    ALL = "nothing will run any longer: all requests end with the error"


def fate_of(error: Exception | None, state: ExecutorState, *, is_new_generation: bool = False) -> Fate:
    """What is to be done.

    Args:
        error: What a step ended with; None: no step did, the workers were looked at.
        state: The executor's, now.
        is_new_generation: The group is another one than that which the step was sent to.
    """
    if state in _OVER:
        return Fate.ALL
    if state is not ExecutorState.READY:
        return Fate.WAIT
    if is_new_generation:
        return Fate.REBUILT
    if is_again(error):
        return Fate.AGAIN
    return Fate.UNSURE if isinstance(error, PeerLost) else Fate.OWN


def is_again(error: Exception | None) -> bool:
    """Nobody's fault: a step that ends with it, while the workers are well, is computed again."""
    return isinstance(error, ExecutorPaused)


class Outage(NamedTuple):
    """A time without workers.

    Attributes:
        number: Counts them, from 1.
        reason: What brought the workers down.
        since: When.
        lost_steps: Steps that were in flight.
        condemned: The request that did it, if one is known to have.
    """

    number: int
    reason: str
    since: float
    lost_steps: tuple[int, ...]
    condemned: str | None


class RecoveryStatistics(NamedTuple):
    """Crashes in numbers.

    Attributes:
        state: ``up``, ``down`` or ``failed``.
        num_outages: How often the workers were lost.
        num_lost_steps: Steps that were in flight then.
        num_recomputed_tokens: Tokens that had to be computed once more.
        num_condemned: Requests that failed for what they did to the workers.
        num_suspects: Requests that have to run alone for a step.
        seconds_down: How long no step could be launched, in all.
        longest_outage: The same of the longest one.
    """

    state: str = "up"
    num_outages: int = 0
    num_lost_steps: int = 0
    num_recomputed_tokens: int = 0
    num_condemned: int = 0
    num_suspects: int = 0
    seconds_down: float = 0.0
    longest_outage: float = 0.0


class Recovery:
    """What the driver knows of its workers.

    Args:
        generation: The executor's, now.
        timeout: Seconds that a request which has not begun waits for the workers; None: no limit.

    Attributes:
        outage: The present one; None: the workers are there.
        failure: Why they will never be again; None: they may.
        generation: The group that has the requests.
        suspects: Who may have done it.
        weights_are_given: The weights are not those that a rebuilt group loads.
        weights_are_lost: And it was rebuilt.
    """

    def __init__(self, generation: int, timeout: float | None) -> None:
        self.outage: Outage | None = None
        self.failure: Exception | None = None
        self.generation, self.timeout = generation, timeout
        self.suspects = Suspects()
        self.weights_are_given = self.weights_are_lost = False
        self._figures = RecoveryStatistics()
        self._last = _USUAL

    @property
    def is_up(self) -> bool:
        """True when steps may be launched."""
        return self.outage is None and self.failure is None

    def lose(self, reason: str, steps: Mapping[StepId, Collection[str]], now: float) -> Outage:
        """The workers are gone.

        Args:
            reason: Why.
            steps: The steps in flight, by id: their requests.
            now: The time.
        """
        condemned = self.suspects.accuse(list(steps.values()))
        figures = self._figures
        number = figures.num_outages + 1
        self._figures = figures._replace(num_outages=number, num_lost_steps=figures.num_lost_steps + len(steps))
        self.outage = Outage(number, reason.partition("\n")[0], now, tuple(steps), condemned)
        return self.outage

    def restore(self, generation: int, now: float) -> float:
        """The workers are there again; how long that took.

        Args:
            generation: The new group.
            now: The time.
        """
        seconds = 0.0 if self.outage is None else now - self.outage.since
        figures, self.outage, self.generation, self._last = self._figures, None, generation, seconds
        self._figures = figures._replace(
            seconds_down=figures.seconds_down + seconds, longest_outage=max(figures.longest_outage, seconds)
        )
        self.weights_are_lost = self.weights_are_given
        return seconds

    def recomputes(self, num_tokens: int) -> None:
        """So many tokens have to be computed again."""
        self._figures = self._figures._replace(num_recomputed_tokens=self._figures.num_recomputed_tokens + num_tokens)

    def fail(self, error: Exception) -> None:
        """The workers will not come back."""
        self.outage, self.failure = None, error

    def have_weights(self, generation: int, *, given: bool) -> None:
        """The workers have whole weights.

        Args:
            generation: Which workers; they may have been lost since.
            given: They are not those of the model's files, with which a rebuilt group begins.
        """
        self.weights_are_given, self.weights_are_lost = given, given and generation != self.generation

    def refusal(self, why: str, now: float) -> EngineRecovering:
        """What a request is told that may not wait for the workers.

        Args:
            why: Why it may not.
            now: The time.
        """
        assert self.outage is not None, "the workers are there"
        expected = self._last - (now - self.outage.since)
        return EngineRecovering(f"{self.outage.reason}; {why}", max(expected, _LEAST))

    def sentence(self, request_id: str) -> RequestFailed:
        """What a condemned request is told."""
        reason = "" if self.outage is None else f" ({self.outage.reason})"
        return RequestFailed(
            f"request {request_id} failed: the workers went down {STRIKES + 1} times in a row while it was running, "
            f"the last time alone{reason}; the other requests go on"
        )

    def statistics(self) -> RecoveryStatistics:
        """Crashes in numbers."""
        state = "failed" if self.failure is not None else "up" if self.outage is None else "down"
        suspects = self.suspects
        return self._figures._replace(state=state, num_condemned=suspects.num_condemned, num_suspects=len(suspects))

    def __repr__(self) -> str:
        """As in ``<Recovery: up, 2 outages>``."""
        figures = self.statistics()
        return f"<Recovery: {figures.state}, {figures.num_outages} outage{'s' * (figures.num_outages != 1)}>"
