"""Whether ranks make the same calls, and what all of them have. Pure.

Each rank makes calls 1, 2, 3 …; a **turn** is what the ranks asked for with calls of one
number. A turn is through, and with it *agreed*, once all have made that call with the same
digest. Ranks that are ahead of the slowest one have their calls kept, up to a bound.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import chain
from typing import Final, Generic, TypeVar

from aexec.errors import RanksDiverged
from aexec.messages.lifecycle import RoundResult
from aexec.messages.peers import Called

__all__ = ("MOST_AHEAD", "Gathering", "Lockstep", "result_of")

MOST_AHEAD: Final = 1024  # calls that a rank may be ahead of the slowest one
_NO_CALL = "has made no call yet"
_NOT_YET = "has not come to it"

T = TypeVar("T")


class _Turn:
    """The calls of one number."""

    __slots__ = ("differs", "first", "said")

    def __init__(self, first: bytes) -> None:
        self.first = first  # digest of whoever came first
        self.said: dict[int, Called] = {}
        self.differs = False


class Lockstep:
    """The turns of one replica.

    Args:
        ranks: Who takes part.
        most_ahead: Calls that a rank may be ahead of the slowest one.

    Attributes:
        agreed: The last turn that is through.
    """

    def __init__(self, ranks: Sequence[int], most_ahead: int = MOST_AHEAD) -> None:
        self.agreed = 0
        self._ranks, self._most_ahead = tuple(ranks), most_ahead
        self._made = dict.fromkeys(ranks, 0)
        self._last: dict[int, Called] = {}
        self._turns: deque[_Turn] = deque()  # from agreed + 1 on

    def __repr__(self) -> str:
        return f"<Lockstep: {self.agreed} agreed, {len(self._turns)} open, made {self._made}>"

    @property
    def num_open(self) -> int:
        """Turns that are not through."""
        return len(self._turns)

    @property
    def in_doubt(self) -> bool:
        """True if ranks differ in a turn, though not all may have said what they want of it."""
        return any(turn.differs for turn in self._turns)

    @property
    def is_clear(self) -> bool:
        """True if they differ, and all have said what they want."""
        return any(turn.differs and len(turn.said) == len(self._ranks) for turn in self._turns)

    def made(self, rank: int) -> int:
        """Number of the last call that a rank has made."""
        return self._made[rank]

    def last(self, rank: int) -> Called | None:
        """That call."""
        return self._last.get(rank)

    def called(self, rank: int, call: Called) -> dict[int, Called] | None:
        """A rank makes its next call; the turn that is through by that. None: none is, so far.

        Raises:
            RanksDiverged: It is too far ahead of another rank.
        """
        seq = self._made[rank] + 1
        index = seq - self.agreed - 1
        if index >= self._most_ahead:
            raise self._too_far(rank)
        self._made[rank], self._last[rank] = seq, call
        if index == len(self._turns):
            self._turns.append(_Turn(call.digest))
        turn = self._turns[index]
        turn.said[rank] = call
        turn.differs |= call.digest != turn.first
        if len(turn.said) < len(self._ranks) or self.in_doubt:
            return None
        self._turns.popleft()  # ranks come to their calls in order: it is the first one
        self.agreed += 1
        return turn.said

    def verdict(self) -> RanksDiverged:
        """What is wrong, as far as the ranks have said; only while they are ``in_doubt``."""
        index, turn = next((index, turn) for index, turn in enumerate(self._turns) if turn.differs)
        usual = _usual(turn.said)
        odd = next(rank for rank in sorted(turn.said) if turn.said[rank].digest != usual.digest)
        step = usual.step if usual.step is not None else turn.said[odd].step
        asked = {r: _asked(turn.said[r], usual) if r in turn.said else _NOT_YET for r in self._ranks}
        return RanksDiverged(odd, self.agreed + 1 + index, step, asked, self._problem(index, turn.said[odd], usual))

    def position(self, rank: int) -> str:
        """Where a rank is, for people."""
        last = self._last.get(rank)
        return _NO_CALL if last is None else f"call {self._made[rank]}: {last.text}"

    def _problem(self, index: int, odd: Called, usual: Called) -> str:
        later = next((k for k, turn in enumerate(self._turns) if k > index and turn.first == odd.digest), None)
        if later is not None and self._turns[later].first != usual.digest:
            return f"has skipped {_calls(later - index)}"
        if odd.step is not None and usual.step is not None and odd.step != usual.step:
            return f"is at step {odd.step} where step {usual.step} is due"
        return "does not ask for what the others ask for"

    def _too_far(self, rank: int) -> RanksDiverged:
        slow = min(self._ranks, key=lambda one: self._made[one])
        seq = self._made[slow] + 1
        asked = {one: f"was last at {self.position(one)}" if one in self._last else _NO_CALL for one in self._ranks}
        turn = self._turns[seq - self.agreed - 1]
        step = turn.said[rank].step
        return RanksDiverged(slow, seq, step, asked, f"is {_calls(self._made[rank] - seq + 1)} behind rank {rank}")


def _asked(call: Called, usual: Called) -> str:
    """What a rank asked for; if that is the same in words, that it is not in fact."""
    differs = call.text == usual.text and call.digest != usual.digest
    return f"asked for {call.text}{' with something else in it' * differs}"


def _usual(said: dict[int, Called]) -> Called:
    """What most ask for; if it is even, the side of the lowest rank."""
    sides: dict[bytes, list[int]] = {}
    for rank in sorted(said):
        sides.setdefault(said[rank].digest, []).append(rank)
    return said[max(sides.values(), key=len)[0]]


def _calls(count: int) -> str:
    return f"{count} call{'s' * (count != 1)}"


class Gathering(Generic[T]):
    """Collects what each rank brings, round by round.

    Args:
        ranks: Who takes part.
    """

    def __init__(self, ranks: Sequence[int]) -> None:
        self._ranks = tuple(ranks)
        self._brought: dict[int, T] = {}
        self.round = 1

    def __repr__(self) -> str:
        return f"<{type(self).__name__} round {self.round}: {sorted(self._brought)} of {len(self._ranks)}>"

    @property
    def missing(self) -> list[int]:
        """Who has brought nothing to this round."""
        return [rank for rank in self._ranks if rank not in self._brought]

    def bring(self, rank: int, value: T) -> list[T] | None:
        """What all have brought, in rank order, if this was the last one; then the next round begins.

        Raises:
            ValueError: The rank has brought something to this round.
        """
        if rank in self._brought:
            raise ValueError(f"rank {rank} comes to round {self.round} for the second time")
        self._brought[rank] = value
        if len(self._brought) < len(self._ranks):
            return None
        whole = [self._brought[one] for one in self._ranks]
        self._brought.clear()
        self.round += 1
        return whole


def result_of(said: Sequence[Sequence[str]]) -> RoundResult:
    """What came of a round in which each rank, in order, has said these keys.

    >>> result_of([["b", "a", "c"], ["c", "b", "d"]])
    RoundResult(keys=['b', 'c'], lacking={'a': [1], 'd': [0]})
    """
    sets = [set(keys) for keys in said]
    every = dict.fromkeys(chain.from_iterable(said))
    lacking = {key: [rank for rank, keys in enumerate(sets) if key not in keys] for key in every}
    common = [key for key in dict.fromkeys(said[0]) if not lacking[key]]
    return RoundResult(common, {key: ranks for key, ranks in lacking.items() if ranks})
