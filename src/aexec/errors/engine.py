"""The engine takes no request just now: try again later, or somewhere else."""

from __future__ import annotations

from aexec.errors.workers import ExecutorUnavailable

__all__ = ("EngineDraining", "EngineRecovering")


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


def _when(retry_after: float | None) -> str:
    return "" if retry_after is None else f"; retry after {retry_after:.3g} s"
