"""Which step is where on one rank: the table of ``messages.step``, applied. Pure."""

from __future__ import annotations

from collections import OrderedDict

from aexec.errors import StepStateError
from aexec.messages.step import TRANSITIONS, StepEvent, StepId, StepState

__all__ = ("StepTable",)

_REMEMBERED = 1024  # ended steps whose fate an error can still tell

_WRONG = {
    (StepState.EXECUTING, StepEvent.EXECUTE): "was sent twice",
    (StepState.EXECUTED, StepEvent.EXECUTE): "was sent twice",
    (StepState.SAMPLED, StepEvent.EXECUTE): "was sent twice",
    (StepState.NEW, StepEvent.SAMPLE): "was never executed",
    (StepState.SAMPLED, StepEvent.SAMPLE): "was sampled already",
}


_NEW, _EXECUTING = StepState.NEW, StepState.EXECUTING  # looked up for each step, which takes an enum's member 70 ns
_EXECUTE, _SAMPLE, _DONE = StepEvent.EXECUTE, StepEvent.SAMPLE, StepEvent.FORWARD_DONE


class StepTable:
    """The states of all steps of one worker generation.

    >>> table = StepTable()
    >>> table.execute(StepId(7))
    >>> table.sample(StepId(8))
    Traceback (most recent call last):
    aexec.errors.StepStateError: step 8 was never executed (pending: 7)
    """

    def __init__(self) -> None:
        self.last: StepId | None = None
        self._open: dict[StepId, StepState] = {}
        self._ended: OrderedDict[StepId, str] = OrderedDict()

    def __repr__(self) -> str:
        states = ", ".join(f"{step} {state.value}" for step, state in self._open.items())
        return f"<StepTable: last {self.last}, {states or 'none open'}>"

    @property
    def pending(self) -> tuple[StepId, ...]:
        """Steps that wait for their sampling, oldest first."""
        return tuple(self._open)

    def state(self, step: StepId) -> StepState:
        """The state of one step; NEW when it was never heard of."""
        found = self._open.get(step)
        if found is not None:
            return found
        if step not in self._ended:
            return _NEW
        return StepState.DROPPED if self._ended[step] else StepState.SAMPLED

    def execute(self, step: StepId, *, whole: bool = False) -> None:
        """Accept a step; ``whole``: nothing will be sampled.

        Raises:
            StepStateError: It was sent before, or its id does not increase.
        """
        if self.last is not None and step <= self.last and self.state(step) is _NEW:
            raise StepStateError(step, f"comes after step {self.last}: step ids must increase", self.pending)
        self._move(step, StepEvent.EXECUTE_WHOLE if whole else _EXECUTE)
        self.last = step

    def forward_done(self, step: StepId) -> None:
        """Its forward pass ended; no matter if it is sampled or dropped by now."""
        if self._open.get(step) is _EXECUTING:
            self._move(step, _DONE)

    def sample(self, step: StepId) -> None:
        """Spend the step.

        Raises:
            StepStateError: It is unknown, sampled already, or was dropped.
        """
        self._move(step, _SAMPLE)

    def drop(self, step: StepId, why: str) -> None:
        """Give up a step; whoever asks for it later is told why."""
        if step in self._open:
            self._move(step, StepEvent.DROP, why)

    def spoil(self, step: StepId, why: str) -> None:
        """A step that was to have its result has none; whoever asks again is told why."""
        if step in self._ended:
            self._ended[step] = why

    def _move(self, step: StepId, event: StepEvent, why: str = "") -> None:
        state = self._open.get(step)
        after = TRANSITIONS[self.state(step) if state is None else state].get(event)
        if after is None:
            raise StepStateError(step, self._problem(step, event), self.pending)
        if TRANSITIONS[after]:
            self._open[step] = after
        else:
            self._end(step, why)

    def _end(self, step: StepId, why: str) -> None:
        self._open.pop(step, None)
        self._ended[step] = why
        if len(self._ended) > _REMEMBERED:
            self._ended.popitem(last=False)  # a plain dict takes ever longer to find its first

    def _problem(self, step: StepId, event: StepEvent) -> str:
        if self._ended.get(step):
            return f"was dropped: {self._ended[step]}"
        if len(self._ended) == _REMEMBERED and step < next(iter(self._ended)):
            return "ended long ago, if it ever was"
        kind = StepEvent.EXECUTE if event is StepEvent.EXECUTE_WHOLE else event
        return _WRONG[self.state(step), kind]
