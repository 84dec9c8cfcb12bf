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
        self._open: dict[int | tuple[int], str] = {}  # by call, or by step as (step,); oldest first
        self._beside: dict[int, str] = {}  # async methods
        self._steps: dict[int, int] = {}  # the step of a call
        self._launches: dict[int, int] = {}  # the call of a step's launch, which is not answered

    def __repr__(self) -> str:
        return f"<RankWork: {self.phase}, step {self.step}, {len(self._open)} open>"

    @property
    def phase(self) -> str:
        """The oldest that it has not ended; ``idle`` without one."""
        return next(iter(self._open.values()), None) or next(iter(self._beside.values()), "idle")

    def step_sent(self, call: int, message: ExecuteModel | SampleTokens) -> None:
        """It was told one half of a step."""
        step = self._steps[call] = message.step
        if isinstance(message, ExecuteModel):
            self.step = step
            self._launches[step] = call
            self._open[step,] = "execute_model"
        else:
            self._open[step,] = "sample_tokens"

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
        return self._steps.get(call)

    def ended(self, call: int) -> None:
        """It has answered."""
        step = self._steps.pop(call, None)
        if step is None:
            (self._open if call in self._open else self._beside).pop(call, None)
        else:
            self._steps.pop(self._launches.pop(step, call), None)
            self._open.pop((step,), None)
