"""What is said to a driver whose decisions other ranks share, and what it says to itself."""

from __future__ import annotations

from aexec.engine.grammar.following import RequestGrammar
from aexec.engine.replicated.coming import Coming
from aexec.messages.base import Message
from aexec.messages.lifecycle import RoundResult

__all__ = ("AskRanks", "EndTurn", "GrammarsMade", "LookAtAgenda", "RanksHeard", "RanksLost", "TakeTurn")


class TakeTurn(Message[None], frozen=True, kw_only=True):
    """Call the executor beside the steps; answered when none is in flight on any rank, and nobody else does it.

    Attributes:
        what: What for; all ranks call it the same.
        key: Tells it from others of this rank.
    """

    what: str
    key: int


class EndTurn(Message[None], frozen=True, kw_only=True):
    """Steps go on once all ranks are through; fine too for a turn that did not come."""

    key: int


class AskRanks(Message[None], frozen=True):
    """Find out what all ranks have to say; ``insists``: they may have by now what they lacked."""

    insists: bool = False


class RanksHeard(Message[None], frozen=True):
    """What all ranks have said."""

    result: RoundResult


class RanksLost(Message[None], frozen=True):
    """The ranks cannot be asked any longer."""

    error: Exception


class GrammarsMade(Message[None], frozen=True):
    """The grammars of a request are there, by sample; or ``error`` is why not."""

    coming: Coming
    grammars: dict[str, RequestGrammar]
    error: Exception | None = None


class LookAtAgenda(Message[None], frozen=True):
    """Something may have waited for other ranks for too long."""
