"""The wait for all ranks to say hello, or for the first of them to fail."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence

from aexec.errors import AexecError, note
from aexec.messages.control import Hello

__all__ = ("Greeting",)

_AFTERMATH = 0.1  # seconds in which others may fail for the same reason, or because of it


class Greeting:
    """What the ranks have said so far; the earliest failure is the cause, and the others follow from it.

    Args:
        ranks: Who they are.
    """

    def __init__(self, ranks: range) -> None:
        self._ranks = ranks
        self._hellos: dict[int, Hello] = {}
        self._failures: dict[int, AexecError] = {}
        self._news = asyncio.Event()

    def __repr__(self) -> str:
        return f"<Greeting: {len(self._hellos)}/{len(self._ranks)} ranks, {len(self._failures)} failed>"

    def answered(self, rank: int, hello: Hello) -> None:
        """A rank is there."""
        self._hellos[rank] = hello
        self._tell()

    def failed(self, rank: int, error: AexecError) -> None:
        """A rank will not be there."""
        self._failures.setdefault(rank, error)
        self._tell()

    async def all(self, phases: Callable[[], Mapping[int, str]]) -> Sequence[Hello]:
        """Wait; what they said, in rank order.

        Args:
            phases: Where each rank is, for the notes.

        Raises:
            AexecError: The first failure, with what became of the other ranks.
        """
        await self._news.wait()
        if not self._failures:
            return [self._hellos[rank] for rank in self._ranks]
        await asyncio.sleep(_AFTERMATH)
        rank, cause = next(iter(self._failures.items()))
        for other, phase in phases().items():
            if other != rank:
                note(cause, self._of(other, phase))
        raise cause

    def _tell(self) -> None:
        if self._failures or len(self._hellos) == len(self._ranks):
            self._news.set()

    def _of(self, rank: int, phase: str) -> str:
        error = self._failures.get(rank)
        if error is None:
            return f"rank {rank}: no failure of its own, at {phase}"
        first_line = str(error).partition("\n")[0]
        return f"rank {rank}: {type(error).__name__}: {first_line}"
