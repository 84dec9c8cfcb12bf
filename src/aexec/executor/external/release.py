"""What a hub lets go of, and when: the replies, words and departures that wait for calls. Pure.

A reply goes out once all ranks have made its call alike, in the order in which it came; a
departure after all replies to calls that the departing rank has made. Who answers a call has
to hear that it was agreed: mostly a reply of another rank tells that, which is worth waiting
for a little, as it saves a frame.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from aexec.errors import ProtocolError
from aexec.executor.external.lockstep import Lockstep
from aexec.messages.peers import Called, Departed

__all__ = ("Agreed", "Forward", "Release")

_AMONG_OTHERS: Final = 1  # see Called.answers


class Agreed(NamedTuple):
    """These ranks are to hear that all have made this call."""

    ranks: tuple[int, ...]
    seq: int


class Forward(NamedTuple):
    """A reply of ``rank`` is to go to the others."""

    rank: int
    seq: int
    reply: Any


class Release:
    """What waits at one hub.

    Args:
        ranks: Who takes part; the first one is the hub's own, which is told at once, as that costs nothing.

    Attributes:
        lockstep: What the ranks ask for.
    """

    def __init__(self, ranks: Sequence[int]) -> None:
        self.lockstep = Lockstep(ranks)
        self._ranks, self._own = tuple(ranks), ranks[0]
        self._held: dict[int, list[Forward]] = {}
        self._failed: set[int] = set()  # calls that are not agreed, and that a rank has answered with an error
        self._untold: dict[int, int] = {}  # the last call that is agreed, of ranks that do not know it
        self._departing: list[Departed] = []

    def __repr__(self) -> str:
        return f"<Release: {self.lockstep!r}, {self.num_held} held, {len(self._untold)} untold>"

    @property
    def num_held(self) -> int:
        """Replies that wait."""
        return sum(map(len, self._held.values()))

    @property
    def has_untold(self) -> bool:
        """Some rank has yet to hear that its call is agreed."""
        return bool(self._untold)

    def called(self, rank: int, call: Called) -> Sequence[Agreed | Forward | Departed]:
        """A rank makes its next call; what goes out by that.

        Raises:
            RanksDiverged: It is too far ahead of another rank.
        """
        turn = self.lockstep.called(rank, call)
        if turn is None:
            return ()
        seq = self.lockstep.agreed
        out: list[Agreed | Forward | Departed] = []
        now = self._to_tell(seq, turn)
        if now:
            out.append(Agreed(now, seq))
        if self._held:
            out += self._held.pop(seq, ())
        if self._departing:
            out += [one for one in self._departing if one.last <= seq]
            self._departing = [one for one in self._departing if one.last > seq]
        return out

    def replied(self, rank: int, seq: int, reply: Any) -> Forward | None:
        """A rank has answered; what goes out at once.

        Raises:
            ProtocolError: It has not made that call.
        """
        forward = Forward(rank, seq, reply)
        if seq <= self.lockstep.agreed:
            return forward
        if seq > self.lockstep.made(rank):
            raise ProtocolError(f"rank {rank} answers call {seq}, which it has not made")
        self._held.setdefault(seq, []).append(forward)
        return None

    def failed(self, seq: int) -> Agreed | None:
        """A rank has answered with an error, which is on its way: replies beside it are to be told as well."""
        if seq <= self.lockstep.agreed:
            return Agreed(self._ranks, seq)
        self._failed.add(seq)
        return None

    def departs(self, departed: Departed) -> Departed | None:
        """A rank is through; what goes out at once."""
        if departed.why or departed.last <= self.lockstep.agreed:
            return departed
        self._departing.append(departed)
        return None

    def told(self, rank: int, seq: int) -> None:
        """A reply of another rank, which says that this call is agreed, goes to ``rank``."""
        if self._untold and self._untold.get(rank, seq + 1) <= seq:
            del self._untold[rank]

    def take_untold(self) -> list[Agreed]:
        """What has to be told, now that no reply has done it."""
        untold, self._untold = self._untold, {}
        return [Agreed((rank,), seq) for rank, seq in untold.items()]

    def take_departing(self) -> list[Departed]:
        """Departures that still wait, at the end."""
        departing, self._departing = self._departing, []
        return departing

    def clear(self) -> None:
        """The ranks differ: nothing goes out any more."""
        self._held.clear()
        self._untold.clear()

    def _to_tell(self, seq: int, turn: dict[int, Called]) -> tuple[int, ...]:
        """Who is told at once; others are if no reply tells them."""
        if seq in self._failed:
            self._failed.discard(seq)
            return self._ranks
        now: list[int] = []
        for rank, call in turn.items():
            if call.answers == _AMONG_OTHERS and rank != self._own:
                self._untold[rank] = seq
            elif call.answers:
                now.append(rank)
        return tuple(now)
