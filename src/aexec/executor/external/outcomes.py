"""One rank's account of how its calls end: who has yet to answer, and what may be told already. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

__all__ = ("MOST_HELD", "Outcome", "Outcomes", "TooManyHeld")

MOST_HELD: Final = 4096  # outcomes that wait for this rank to make their call, or for others to have made it
_MOST_OPEN: Final = 4096  # calls whose ranks have not all answered; the oldest make room


class TooManyHeld(Exception):
    """Others have answered more calls that this rank has not made than can be kept."""


class Outcome(NamedTuple):
    """How a call ended on a rank.

    Attributes:
        seq: Which call.
        rank: Which rank.
        value: Its reply, or the error.
        is_error: That.
    """

    seq: int
    rank: int
    value: Any
    is_error: bool = False


class Outcomes:
    """The calls of one rank.

    An outcome may be told once this rank has made its call; a reply besides once all ranks are
    known to have made that call alike.

    Args:
        check: They have to; False: a reply may be told at once.

    Attributes:
        made: The last call that this rank has made.
        agreed: The last call that all are known to have made alike; 0 if that is not asked for.
        num_held: Outcomes that may not be told yet.
    """

    def __init__(self, *, check: bool) -> None:
        self.made = self.agreed = self.num_held = 0
        self._check = check
        self._open: dict[int, set[int]] = {}
        self._held: dict[int, deque[Outcome]] = {}

    def __repr__(self) -> str:
        return f"<Outcomes: {self.made} made, {self.agreed} agreed, {self.num_open} open, {self.num_held} held>"

    @property
    def num_open(self) -> int:
        """Calls whose ranks have not all answered."""
        return len(self._open)

    def make(self, ranks: Sequence[int]) -> list[Outcome]:
        """This rank makes its next call, which ``ranks`` will answer; what may be told now."""
        self.made += 1
        if ranks:
            self._open[self.made] = set(ranks)
            if len(self._open) > _MOST_OPEN:  # given up by whoever made them
                del self._open[next(iter(self._open))]
        return self._tell(self.made) if self._held else []

    def hear(self, outcome: Outcome) -> list[Outcome]:
        """A rank has answered; what may be told now.

        Raises:
            TooManyHeld: It has to wait, and too many do.
        """
        if self._may_tell(outcome):
            self._answered(outcome)
            return [outcome]
        if self.num_held >= MOST_HELD:
            raise TooManyHeld
        self._held.setdefault(outcome.seq, deque()).append(outcome)
        self.num_held += 1
        return []

    def agree(self, seq: int) -> list[Outcome]:
        """All have made the calls up to this one alike; what may be told now."""
        if seq <= self.agreed:
            return []
        self.agreed = seq
        if not self._held:
            return []
        return [outcome for one in sorted(self._held) if one <= seq for outcome in self._tell(one)]

    def waiting_for(self, rank: int) -> list[int]:
        """Calls that this rank has made, and that ``rank`` has not answered; the oldest first."""
        return [seq for seq, ranks in self._open.items() if rank in ranks]

    def answered_by(self, rank: int) -> int:
        """The last call that ``rank`` has answered of those that wait here to be told; 0: none waits."""
        held = (outcome.seq for waiting in self._held.values() for outcome in waiting if outcome.rank == rank)
        return max(held, default=0)

    def clear(self) -> None:
        """Nothing is told any more."""
        self._open.clear()
        self._held.clear()
        self.num_held = 0

    def _may_tell(self, outcome: Outcome) -> bool:
        return outcome.seq <= self.made and (outcome.is_error or not self._check or outcome.seq <= self.agreed)

    def _tell(self, seq: int) -> list[Outcome]:
        waiting = self._held.pop(seq, None)
        if waiting is None:
            return []
        ready = [outcome for outcome in waiting if self._may_tell(outcome)]
        rest = deque(outcome for outcome in waiting if not self._may_tell(outcome))
        self.num_held -= len(ready)
        if rest:
            self._held[seq] = rest
        for outcome in ready:
            self._answered(outcome)
        return ready

    def _answered(self, outcome: Outcome) -> None:
        ranks = self._open.get(outcome.seq)
        if ranks is not None:
            ranks.discard(outcome.rank)
            if not ranks:
                del self._open[outcome.seq]
