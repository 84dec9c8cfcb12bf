"""Who may call the executor beside the steps, on all ranks in the same order. Pure but for the replies."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from aexec.engine.replicated.answers import FirstAnswer

__all__ = ("Turn", "Turns")


@dataclass(slots=True, eq=False)
class Turn:
    """One of them.

    Attributes:
        key: Whose, on this rank.
        reply: Told when it begins.
        is_granted: All ranks have agreed upon it.
        has_begun: It was told so.
        is_left: Whoever wanted it is through.
    """

    key: int
    reply: FirstAnswer[None]
    is_granted: bool = False
    has_begun: bool = False
    is_left: bool = False


class Turns:
    """Those that are wanted here, and the row of those that are granted everywhere."""

    def __init__(self) -> None:
        self._wanted: dict[int, Turn] = {}
        self._row: deque[Turn] = deque()

    def __bool__(self) -> bool:
        """Somebody has a turn, or is next: no step is launched."""
        return bool(self._row)

    def __repr__(self) -> str:
        """As in ``<Turns: 1 granted, 2 wanted>``."""
        return f"<Turns: {len(self._row)} granted, {len(self._wanted)} wanted>"

    def wanted(self, key: int, reply: FirstAnswer[None]) -> Turn:
        """Somebody here wants one."""
        turn = self._wanted[key] = Turn(key, reply)
        return turn

    def granted(self, turn: Turn) -> None:
        """All ranks want it."""
        turn.is_granted = True
        self._row.append(turn)

    def begin(self) -> None:
        """No step is in flight: it is the first one's turn."""
        if self._row and not self._row[0].has_begun:
            self._row[0].has_begun = True
            self._row[0].reply.resolve(None)

    def left(self, key: int) -> Turn | None:
        """Whoever wanted it is through, or has gone; None: that was known."""
        turn = self._wanted.pop(key, None)
        if turn is not None:
            turn.is_left = True
        return turn

    def pop(self) -> None:
        """All ranks are through with the first one."""
        if self._row:
            self._row.popleft()

    def clear(self) -> None:
        """There is nothing to be called any longer: let all see for themselves."""
        row, self._row = self._row, deque()
        self._wanted.clear()
        for turn in row:
            turn.reply.resolve(None)
