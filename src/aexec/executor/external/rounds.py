"""Rounds in which all ranks of a replica say what they have, and hear what all have."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from aexec.errors import ProtocolError
from aexec.executor.external.once import Once

__all__ = ("Rounds",)


class Rounds:
    """Those of one rank, one at a time.

    Args:
        say: Tells the hub what this rank has in a round.
    """

    def __init__(self, say: Callable[[int, list[str]], None]) -> None:
        self._say = say
        self._number = 0
        self._open: Once[list[str]] | None = None

    def __repr__(self) -> str:
        return f"<Rounds: {self.text}, {'open' if self._open else 'over'}>"

    @property
    def text(self) -> str:
        """The last one, for people."""
        return f"agree, round {self._number}"

    async def agree(self, keys: Sequence[str]) -> list[str]:
        """Say what this rank has, and wait for what all have.

        Raises:
            ProtocolError: The round before is not over.
        """
        if self._open is not None:
            raise ProtocolError(f"{self.text}, is not over, as not all ranks have come: expected one at a time")
        self._number += 1
        common = self._open = Once()
        self._say(self._number, list(keys))
        return await common.get()

    def heard(self, keys: list[str]) -> None:
        """All have come."""
        common, self._open = self._open, None
        if common is not None:
            common.set(keys)

    def fail(self, error: BaseException) -> None:
        """Not all will come."""
        if self._open is not None:
            self._open.fail(error)
