"""What is said to the host of a KV connector, and what it says to itself."""

from __future__ import annotations

from aexec.messages.base import Message
from aexec.messages.kv import KVHoldings

__all__ = ("AttachRanks", "FlushConnector", "RanksAttached", "RanksNotAttached")


class AttachRanks(Message[None], frozen=True):
    """The connector is detached: attach the ranks anew."""


class RanksAttached(Message[None], frozen=True):
    """All ranks are attached.

    Attributes:
        epoch: The attachment that it is.
        holdings: What each rank holds.
    """

    epoch: int
    holdings: list[KVHoldings]


class RanksNotAttached(Message[None], frozen=True):
    """A rank could not be attached.

    Attributes:
        error: Why.
    """

    error: Exception


class FlushConnector(Message[int], frozen=True):
    """Have the ranks store what the cache holds, while no step is in flight; how many blocks that was."""
