"""The road that step messages take, where it is not the workers' lines.

On the ``channel`` plane there is none: steps go down the work lines, as in ``mp``. The
``compiled_graph`` plane is one: it carries the step messages to the ranks, the hidden states from
stage to stage, and the output rank's result back. Everything else stays on the lines: plain
calls, errors of any rank, answers of the other ranks, liveness.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from aexec.messages.step import ExecuteModel, SampleTokens

__all__ = ("OnFailure", "OnReply", "StepPlane")

OnReply = Callable[[int, int, Any], None]  # on_reply(call, rank, value), on the executor's loop
OnFailure = Callable[[int, int, BaseException], None]  # on_failure(call, rank, error), likewise


class StepPlane(Protocol):
    """One such road, for one generation of workers."""

    async def open(self) -> None:
        """Get ready for the first step; all workers are constructed.

        Raises:
            AexecError: It cannot be; names the setting or the command that mends it.
        """
        ...

    def submit(self, call: int, message: ExecuteModel | SampleTokens, calls_before: Sequence[int]) -> None:
        """Send a step message to all ranks; never blocks.

        Args:
            call: Its id.
            message: What to send.
            calls_before: By rank: the plain calls that were sent to it before, and which it has
                to be through with first.

        Raises:
            AexecError: The message cannot travel; nobody was sent anything.
        """
        ...

    async def rest(self) -> None:
        """Before the workers are told to end: let go of what would hold them up, if nothing is under way."""
        ...

    async def close(self) -> None:
        """Let go of everything, within a limit of its own; called once no actor lives, and maybe twice."""
        ...

    def abandon(self) -> None:
        """Let go without waiting for anything, as after a close that was cut short; never blocks."""
        ...

    def statistics(self) -> Mapping[str, Any]:
        """Figures, for ``describe()`` and people."""
        ...
