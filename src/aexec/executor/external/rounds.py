"""Rounds in which all ranks of a replica say what they have, and hear what all have."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from aexec.errors import ProtocolError
from aexec.executor.external.once import Once
from aexec.messages.lifecycle import RoundResult

__all__ = ("Rounds",)


class Rounds:
    """Those of one rank, one at a time.

    Args:
        say: Tells the hub what this rank has in a round.
    """

    def __init__(self, say: Callable[[int, list[str]], None]) -> None:
        self._say = say
        self._number = 0
        self._open: Once[RoundResult] | None = None

    def __repr__(self) -> str:
        return f"<Rounds: {self.text}, {'open' if self._open else 'over'}>"

    @property
    def text(self) -> str:
        """The last one, for people."""
        return f"agree, round {self._number}"

    async def agree(self, keys: Sequence[str]) -> RoundResult:
        """Say what this rank has, and wait for what all have.

        Raises:
            ProtocolError: The round before is not over.
        """
        if self._open is not None:
            raise ProtocolError(f"{self.text}, is not over, as not all ranks have come: expected one at a time")
        self._number += 1
        result = self._open = Once()
        self._say(self._number, list(keys))
        return await result.get()

    def heard(self, result: RoundResult) -> None:
        """All have come."""
        waiting, self._open = self._open, None
        if waiting is not None:
            waiting.set(result)

    def fail(self, error: BaseException) -> None:
        """Not all will come."""
        if self._open is not None:
            self._open.fail(error)
