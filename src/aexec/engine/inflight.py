"""The steps in flight: which may be sampled now, which results may be taken, how full the pipeline is. Pure.

A step takes off when its ``ExecuteModel`` goes out and lands when its result is here. Steps
are sampled in the order of their ids, and their results are taken in that order whatever order
they come in. A step with a request that has a grammar waits for its bitmask before it is
sampled, while its forward pass runs; the steps behind it wait with it.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from aexec.errors import ConfigError, ProtocolError
from aexec.messages.batch import GrammarOutput, SchedulerOutput
from aexec.messages.step import StepId

__all__ = ("Flight", "FlightState", "InFlight", "InFlightStatistics")


class FlightState(enum.Enum):
    """How far a step in flight has come."""

    LAUNCHING = "launching"  # its ExecuteModel is on the way
    LAUNCHED = "launched"  # its forward pass is queued; it waits for its bitmask or its turn
    SAMPLING = "sampling"  # its SampleTokens is on the way, or it needs none
    LANDED = "landed"  # its result is here, and that of an earlier step is not


@dataclass(slots=True, eq=False)
class Flight:
    """One step in flight.

    Attributes:
        step: Its id.
        batch: What it runs.
        constrained: Requests that it samples under a grammar.
        state: How far it has come.
        is_mask_due: Its bitmask was asked for.
        mask: Its bitmask, once it is there; None too when it needs none.
        output: What the output rank said.
        error: Why there is no output.
    """

    step: StepId
    batch: SchedulerOutput
    constrained: frozenset[str] = frozenset()
    state: FlightState = FlightState.LAUNCHING
    is_mask_due: bool = False
    mask: GrammarOutput | None = None
    output: object = None
    error: Exception | None = None

    @property
    def lacks_mask(self) -> bool:
        """It cannot be sampled yet, whoever's turn it is."""
        return bool(self.constrained) and self.mask is None


class InFlightStatistics(NamedTuple):
    """The pipeline in numbers, which count from the start.

    Attributes:
        depth: Steps that may be in flight.
        num_in_flight: Steps in flight now.
        peak_in_flight: Most that were in flight at a time.
        num_landed: Steps whose result was taken.
        num_failed: Steps that ended in an error.
        busy_seconds: How long there was work.
        bubble: The share of step slots, over that time, that were empty; in [0, 1].
    """

    depth: int
    num_in_flight: int
    peak_in_flight: int
    num_landed: int
    num_failed: int
    busy_seconds: float
    bubble: float


class InFlight:
    """The queue of steps in flight, the oldest first.

    Args:
        depth: Steps that may be in flight: the stages of the pipeline, or two to overlap.
        clock: Seconds, for the bubble.
    """

    def __init__(self, depth: int, clock: Callable[[], float]) -> None:
        if depth < 1:
            raise ConfigError(f"the depth of the pipeline is {depth}: expected at least one step in flight")
        self.depth, self._clock = depth, clock
        self._flights: deque[Flight] = deque()
        self._peak = self._num_landed = self._num_failed = 0
        self._since: float | None = None  # when the slots were counted last; None: there was no work
        self._slot_seconds = self._empty_seconds = 0.0

    def __len__(self) -> int:
        """Steps in flight."""
        return len(self._flights)

    def __repr__(self) -> str:
        """As in ``<InFlight: 2/4 steps: 11 sampling, 12 launching>``."""
        steps = ", ".join(f"{flight.step} {flight.state.value}" for flight in self._flights)
        return f"<InFlight: {len(self._flights)}/{self.depth} steps{': ' if steps else ''}{steps}>"

    @property
    def flights(self) -> tuple[Flight, ...]:
        """The steps, the oldest first."""
        return tuple(self._flights)

    @property
    def num_free(self) -> int:
        """Steps that may still take off."""
        return self.depth - len(self._flights)

    @property
    def all_sampled(self) -> bool:
        """No step waits for its ``SampleTokens`` to go out."""
        return not self._flights or self._flights[-1].state in _SENT

    def may_follow(self, step: StepId) -> bool:
        """No step before ``step`` waits for its ``SampleTokens`` to go out."""
        return all(flight.state in _SENT for flight in self._flights if flight.step < step)

    def knows(self, step: StepId) -> bool:
        """The step is in flight."""
        return self._find(step) is not None

    # ------------------------------------------------------------ a step's way

    def take_off(self, step: StepId, batch: SchedulerOutput, constrained: frozenset[str] = frozenset()) -> Flight:
        """A step goes out.

        Raises:
            ProtocolError: There is no room, or its id does not increase.
        """
        last = self._flights[-1].step if self._flights else 0
        if self.num_free <= 0 or step <= last:
            raise ProtocolError(f"step {step} cannot take off: {self!r}")
        self._count()
        flight = Flight(step, batch, constrained)
        self._flights.append(flight)
        self._peak = max(self._peak, len(self._flights))
        return flight

    def launched(self, step: StepId) -> None:
        """The forward pass of a step is queued."""
        flight = self._find(step)
        if flight is not None and flight.state is FlightState.LAUNCHING:
            flight.state = FlightState.LAUNCHED

    def masked(self, step: StepId, mask: GrammarOutput) -> None:
        """The bitmask of a step is there."""
        flight = self._find(step)
        if flight is not None:
            flight.mask = mask

    def unmask(self, step: StepId) -> frozenset[str]:
        """The bitmask of a step cannot be made: sample it without; returns whom it was for."""
        flight = self._find(step)
        if flight is None:
            return frozenset()
        constrained, flight.constrained = flight.constrained, frozenset()
        return constrained

    def due_masks(self) -> list[Flight]:
        """Steps whose bitmask can be made now, as no earlier step samples one of their constrained requests.

        Each is returned once.
        """
        due: list[Flight] = []
        earlier: frozenset[str] = frozenset()
        for flight in self._flights:
            if flight.constrained and not flight.is_mask_due and flight.constrained.isdisjoint(earlier):
                flight.is_mask_due = True
                due.append(flight)
            earlier |= flight.constrained
        return due

    def due_samples(self) -> list[Flight]:
        """Steps whose ``SampleTokens`` is to go out now, in order; each is returned once."""
        due: list[Flight] = []
        for flight in self._flights:
            if flight.state is FlightState.LAUNCHING or (flight.state is FlightState.LAUNCHED and flight.lacks_mask):
                break
            if flight.state is FlightState.LAUNCHED:
                flight.state = FlightState.SAMPLING
                due.append(flight)
        return due

    def land(self, step: StepId, output: object = None, error: Exception | None = None) -> list[Flight]:
        """A step has ended.

        Returns:
            The steps whose outcome is to be taken now, in order: none while an earlier one is in
            flight, or when this one is not known (any longer).
        """
        if not self.mark_landed(step, output, error):
            return []
        ready: list[Flight] = []
        while self.has_landed:
            ready.append(self.take_landed())
        return ready

    def mark_landed(self, step: StepId, output: object = None, error: Exception | None = None) -> bool:
        """The same, and take no outcome yet; False: the step is not known (any longer)."""
        flight = self._find(step)
        if flight is None:
            return False
        self._count()
        flight.state, flight.output, flight.error = FlightState.LANDED, output, error
        return True

    @property
    def has_landed(self) -> bool:
        """The outcome of the oldest step may be taken."""
        return bool(self._flights) and self._flights[0].state is FlightState.LANDED

    def take_landed(self) -> Flight:
        """The oldest step, which has landed: its slot is free."""
        self._count()
        flight = self._flights.popleft()
        self._num_landed += 1
        self._num_failed += flight.error is not None
        return flight

    def clear(self) -> list[Flight]:
        """Nothing comes of the steps in flight any longer: forget them, and return them."""
        self._count()
        lost = list(self._flights)
        self._flights.clear()
        return lost

    def rest(self) -> None:
        """There is no work: empty slots are no bubble until the next step takes off."""
        if not self._flights:
            self._count()
            self._since = None

    def statistics(self) -> InFlightStatistics:
        """The pipeline in numbers."""
        if self._since is not None:
            self._count()
        bubble = self._empty_seconds / self._slot_seconds if self._slot_seconds else 0.0
        return InFlightStatistics(
            self.depth,
            len(self._flights),
            self._peak,
            self._num_landed,
            self._num_failed,
            self._slot_seconds / self.depth,
            bubble,
        )

    def _find(self, step: StepId) -> Flight | None:
        for flight in self._flights:
            if flight.step == step:
                return flight
        return None

    def _count(self) -> None:
        """Add up the slots, full ones and empty ones, since the last change."""
        now = self._clock()
        if self._since is not None:
            self._slot_seconds += (now - self._since) * self.depth
            self._empty_seconds += (now - self._since) * self.num_free
        self._since = now


_SENT = frozenset({FlightState.SAMPLING, FlightState.LANDED})
