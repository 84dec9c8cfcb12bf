"""What a rank is told of the others, and what has to be known of the rank."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from aexec.errors import AexecError, RanksDiverged, WorkerDied
from aexec.messages.base import Message
from aexec.messages.peers import Answered, Asked
from aexec.worker.remote import caller_error

__all__ = ("Answer", "Launched", "PeerSink", "PeersStatistics", "Reply")


class Launched(Protocol):
    """What Peers has to know of the launcher; what ``launcher.py`` reads has more."""

    @property
    def rank(self) -> int:
        """This process, counted over all replicas."""
        ...

    @property
    def world_size(self) -> int:
        """All processes."""
        ...


class Answer(Protocol):
    """Takes the answer to a routed message: one of the two, once, on the loop."""

    def resolve(self, value: Any, /) -> None:
        """Answer it."""
        ...

    def fail(self, error: BaseException, /) -> None:
        """Refuse it."""
        ...


class PeerSink(Protocol):
    """Where Peers reports; called on the loop, never from within a call of Peers, and never blocks.

    Ranks are those of this replica, from 0.
    """

    def replied(self, seq: int, rank: int, value: Any) -> None:
        """A rank, this one too, has answered call ``seq``, which all have made alike."""
        ...

    def failed(self, seq: int, rank: int, error: BaseException) -> None:
        """A rank, this one too, has answered call ``seq`` with an error (live: rebuilt already)."""
        ...

    def died(self, error: WorkerDied, *, here: bool) -> None:
        """A rank has ended; said once, for the first one.

        Args:
            error: How; its rank is that of this replica if ``here``, else counted over all of them.
            here: It is of this replica.
        """
        ...

    def diverged(self, error: RanksDiverged) -> None:
        """The ranks of this replica do not do the same: all pending calls are to fail; said once."""
        ...

    def asked(self, source: int, message: Message[Any], answer: Answer) -> None:
        """Rank ``source`` (maybe this one) asks this rank, and waits for its ``answer``."""
        ...

    def answered(self, call: int, rank: int, value: Any) -> None:
        """The answer of ``rank`` to what was asked with ``ask(rank, call, message)``."""
        ...

    def refused(self, call: int, rank: int, error: BaseException) -> None:
        """There is none."""
        ...


@dataclass(frozen=True, slots=True)
class PeersStatistics:
    """What went on between the ranks.

    Attributes:
        made: Calls that this rank has made.
        agreed: The last call that all are known to have made alike; 0 where calls are not compared.
        pending: Calls whose ranks have not all answered.
        held: Outcomes that wait for a rank to make their call.
        asked: Routed messages without an answer.
        ranks: What each rank of the replica is known to have asked for last; on its hub only.
    """

    made: int
    agreed: int
    pending: int
    held: int
    asked: int
    ranks: dict[int, str]


class Reply:
    """Answers one message that another rank has asked."""

    def __init__(self, asked: Asked, send: Callable[[Answered], None]) -> None:
        self._asked, self._send = asked, send
        self._is_answered = False

    def __repr__(self) -> str:
        asked = self._asked
        state = "answered" if self._is_answered else "open"
        return f"<Reply to {type(asked.message).__name__} of rank {asked.source}: {state}>"

    def resolve(self, value: Any, /) -> None:
        """Answer it; once is enough."""
        self._give(value, None)

    def fail(self, error: BaseException, /) -> None:
        """Refuse it."""
        self._give(None, caller_error(error, rank=self._asked.target, method=type(self._asked.message).__name__))

    def _give(self, value: Any, error: AexecError | None) -> None:
        if not self._is_answered:
            self._is_answered = True
            asked = self._asked
            self._send(Answered(asked.target, asked.source, asked.call, value, error))
