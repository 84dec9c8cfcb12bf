"""The engine takes no request just now: try again later, or somewhere else."""

from __future__ import annotations

from collections.abc import Sequence

from aexec.errors.root import AexecError
from aexec.errors.workers import ExecutorUnavailable

__all__ = ("EngineDraining", "EngineRecovering", "RanksDisagree")


class EngineRecovering(ExecutorUnavailable):
    """The workers are being rebuilt, and the request was not begun: send it again after ``retry_after`` seconds.

    ``reason`` says what brought them down and why the request may not wait for them any longer.
    """

    def __str__(self) -> str:
        return f"the engine recovers: {self.reason}{_when(self.retry_after)}"


class EngineDraining(ExecutorUnavailable):
    """``drain()`` was called: what has begun comes to its end, and nothing new is taken until ``resume()``.

    Another replica can take the request at once; ``retry_after`` is None, as nobody knows when this one will.
    """

    def __str__(self) -> str:
        return f"the engine drains: {self.reason}{_when(self.retry_after)}"


class RanksDisagree(AexecError, TimeoutError):
    """Every rank has an engine of its own, and something was asked of this one and not of all: mend the program.

    Attributes:
        what: What it was, as in ``request request-3``.
        seconds: How long the others were waited for.
        ranks: Those that were not asked; empty: not known.
    """

    def __init__(self, what: str, seconds: float, ranks: Sequence[int] = ()) -> None:
        super().__init__(what, seconds, ranks)
        self.what, self.seconds, self.ranks = what, seconds, tuple(ranks)

    def __reduce__(self) -> tuple[type[RanksDisagree], tuple[str, float, tuple[int, ...]]]:
        return type(self), (self.what, self.seconds, self.ranks)

    def __str__(self) -> str:
        who = "not of all others" if not self.ranks else f"not of rank {', '.join(map(str, self.ranks))}"
        return (
            f"{self.what!r} was asked of this rank's engine and {who} within {self.seconds:g} s: all ranks have to ask "
            "the same of theirs, as the same program does that is run by all of them"
        )


def _when(retry_after: float | None) -> str:
    return "" if retry_after is None else f"; retry after {retry_after:.3g} s"
