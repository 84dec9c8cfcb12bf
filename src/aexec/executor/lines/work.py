"""What one rank has been told to do and has not ended: its phase, and where it was if it dies."""

from __future__ import annotations

from typing import Any

from aexec.messages.base import Message
from aexec.messages.control import CallMethod
from aexec.messages.step import ExecuteModel, SampleTokens
from aexec.worker.names import name_of

__all__ = ("RankWork",)


class RankWork:
    """Seen from the driver, without asking the rank: so it holds for one that hangs or has died.

    Attributes:
        step: The last step it was sent; None before the first.
        calls: Plain methods it was told to call, ever.
    """

    def __init__(self) -> None:
        self.step: int | None = None
        self.calls = 0
        self._open: dict[int, str | int] = {}  # by call, oldest first: a method, or the step that it is a half of
        self._beside: dict[int, str] = {}  # async methods
        self._launches: dict[int, int] = {}  # the call of a step's launch, which is not answered

    def __repr__(self) -> str:
        return f"<RankWork: {self.phase}, step {self.step}, {len(self._open)} open>"

    @property
    def phase(self) -> str:
        """The oldest that it has not ended; ``idle`` without one."""
        oldest = next(iter(self._open.values()), None)
        if oldest is None:
            return next(iter(self._beside.values()), "idle")
        if isinstance(oldest, str):
            return oldest
        is_launched = oldest in self._launches and list(self._open.values()).count(oldest) == 1
        return "execute_model" if is_launched else "sample_tokens"

    def step_sent(self, call: int, message: ExecuteModel | SampleTokens) -> None:
        """It was told one half of a step."""
        step = self._open[call] = message.step
        if isinstance(message, ExecuteModel):
            self.step = step
            self._launches.setdefault(step, call)

    def sent(self, call: int, message: Message[Any], *, beside: bool = False) -> None:
        """It was told to do something, maybe ``beside`` its other work; whatever is no work is left out."""
        if isinstance(message, ExecuteModel | SampleTokens):
            self.step_sent(call, message)
        elif isinstance(message, CallMethod):
            into = self._beside if beside else self._open
            self.calls += not beside
            into[call] = message.method if isinstance(message.method, str) else name_of(message.method)

    def step_of(self, call: int) -> int | None:
        """The step that a call it has not ended is about; None: it is about none."""
        found = self._open.get(call)
        return None if isinstance(found, str) else found

    def ended(self, call: int) -> None:
        """It has answered."""
        found = self._open.pop(call, None)
        if found is None:
            self._beside.pop(call, None)
        elif not isinstance(found, str):
            self._open.pop(self._launches.pop(found, call), None)
