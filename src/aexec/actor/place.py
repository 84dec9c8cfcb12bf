"""An actor's place in the group that it was spawned in."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ("Place",)


class Place(NamedTuple):
    """One of ``size`` actors of a kind.

    Attributes:
        rank: Which one, from 0.
        size: How many there are.
    """

    rank: int
    size: int
