"""Failure callbacks: plain or async, each run to its end, none able to spoil another."""

from __future__ import annotations

import asyncio
import inspect

import anyio

from aexec.errors import AexecError
from aexec.executor.base import FailureCallback
from aexec.observe import get_logger
from aexec.worker.names import name_of

__all__ = ("FailureCallbacks",)


class FailureCallbacks:
    """The callbacks of one executor; their tasks outlive its actors, so that they may close it."""

    def __init__(self) -> None:
        self.failure: AexecError | None = None
        self._waiting: list[FailureCallback] = []
        self._tasks: set[asyncio.Task[None]] = set()

    def __repr__(self) -> str:
        return f"<FailureCallbacks: {len(self._waiting)} waiting, {len(self._tasks)} running, failure {self.failure!r}>"

    def add(self, callback: FailureCallback) -> None:
        """Call it at the failure, or now if that is past."""
        if self.failure is None:
            self._waiting.append(callback)
        else:
            self._start(callback, self.failure)

    def fire(self, failure: AexecError) -> None:
        """Call all of them, now and for ever."""
        self.failure = failure
        waiting, self._waiting = self._waiting, []
        for callback in waiting:
            self._start(callback, failure)

    async def drain(self, grace: float) -> None:
        """Wait for those that run; cancel what still does after ``grace`` seconds."""
        others = self._tasks - {asyncio.current_task()}
        if not others:
            return
        with anyio.CancelScope(shield=True):
            _, late = await asyncio.wait(others, timeout=grace)
            for task in late:
                task.cancel()

    def _start(self, callback: FailureCallback, failure: AexecError) -> None:
        task = asyncio.get_running_loop().create_task(_run(callback, failure))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


async def _run(callback: FailureCallback, failure: AexecError) -> None:
    try:
        result = callback(failure)
        if inspect.isawaitable(result):
            await result
    except Exception:  # noqa: BLE001 - one callback's fault is not the others'
        get_logger("aexec.executor").exception("failure callback failed", callback=name_of(callback))
