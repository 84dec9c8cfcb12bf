"""The actor core on trio.

A system task holds one nursery, so that actors outlive the task that opened the system
and end with the run. Each handler that awaits gets a cancel scope of its own.
"""

from __future__ import annotations

import contextvars
import math
import time
from collections.abc import Callable, Coroutine, Generator
from contextlib import AbstractContextManager
from typing import Any, TypeVar, cast

import outcome
import trio

from aexec.actor.runtime import TIME_SLICE, Interrupted

__all__ = ("TrioRuntime",)

T = TypeVar("T")


class TrioPromise:
    """A value to come, for one waiter; the methods mean what asyncio's futures' do."""

    __slots__ = ("_cancelled", "_outcome", "_task")

    def __init__(self) -> None:
        self._outcome: outcome.Value[Any] | outcome.Error | None = None
        self._cancelled = False
        self._task: trio.lowlevel.Task | None = None

    def __await__(self) -> Generator[Any, Any, Any]:
        if self._outcome is None:
            self._task = trio.lowlevel.current_task()
            yield from trio.lowlevel.wait_task_rescheduled(self._abort).__await__()  # noqa: ASYNC105 - it is
        else:
            yield from trio.lowlevel.cancel_shielded_checkpoint().__await__()  # noqa: ASYNC105 - it is
        assert self._outcome is not None
        return self._outcome.unwrap()

    def done(self) -> bool:
        return self._cancelled or self._outcome is not None

    def cancelled(self) -> bool:
        return self._cancelled

    def cancel(self) -> bool:
        self._cancelled = self._outcome is None
        return self._cancelled

    def set_result(self, result: Any, /) -> None:
        self._set(outcome.Value(result))

    def set_exception(self, exception: BaseException, /) -> None:
        self._set(outcome.Error(exception))

    def exception(self) -> BaseException | None:
        return self._outcome.error if isinstance(self._outcome, outcome.Error) else None

    def _set(self, result: outcome.Value[Any] | outcome.Error) -> None:
        self._outcome = result
        if self._task is not None:
            task, self._task = self._task, None
            trio.lowlevel.reschedule(task)

    def _abort(self, _: Callable[[], None]) -> trio.lowlevel.Abort:
        self._task, self._cancelled = None, True
        return trio.lowlevel.Abort.SUCCEEDED


class TrioSection:
    """A stretch of a trio task; see ``runtime.Section``."""

    __slots__ = ("_interrupted", "_scope", "active")

    def __init__(self) -> None:
        self.active = False
        self._interrupted = False
        self._scope: trio.CancelScope | None = None

    async def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        if self._interrupted:
            self._interrupted = False
            coroutine.close()
            raise Interrupted
        self.active = True
        try:
            with trio.CancelScope() as self._scope:
                return await coroutine
        finally:
            self.active, self._interrupted, self._scope = False, False, None
        raise Interrupted

    def interrupt(self) -> None:
        self._interrupted = True
        if self._scope is not None:
            self._scope.cancel()


class TrioTimer:
    """A call to come, as a task that sleeps in a scope."""

    __slots__ = ("scope",)

    def __init__(self) -> None:
        self.scope = trio.CancelScope()

    def cancel(self) -> None:
        self.scope.cancel()

    async def run(self, seconds: float, callback: Callable[[], None]) -> None:
        with self.scope:
            await trio.sleep(seconds)
        if not self.scope.cancelled_caught:
            callback()


class TrioRuntime:
    """A trio run; see ``runtime.Runtime``."""

    cancelled = trio.Cancelled
    now = staticmethod(time.monotonic)
    time_slice = TIME_SLICE
    promise = TrioPromise
    section = TrioSection

    def __init__(self) -> None:
        self._token = trio.lowlevel.current_trio_token()
        self._context = contextvars.copy_context()
        self._nursery: trio.Nursery | None = None
        self._opened = trio.Event()
        self._closed = trio.Event()
        self._crash: BaseException | None = None

    def __str__(self) -> str:
        return f"trio run {id(self._token):#x}"

    @property
    def is_here(self) -> bool:
        try:
            return trio.lowlevel.current_trio_token() is self._token
        except RuntimeError:
            return False

    async def open(self) -> None:
        trio.lowlevel.spawn_system_task(self._root, name="aexec actors", context=self._context)
        await self._opened.wait()

    async def close(self) -> None:
        if self._nursery is not None:
            self._nursery.cancel_scope.cancel()
            await self._closed.wait()
        if self._crash is not None:
            crash, self._crash = self._crash, None
            raise crash

    def start(self, coroutine: Coroutine[Any, Any, None], name: str) -> object:
        self._spawn(self._own, coroutine, name=name)
        return None

    def shield(self) -> AbstractContextManager[object]:
        return cast("AbstractContextManager[object]", trio.CancelScope(shield=True))

    def call_later(self, seconds: float, callback: Callable[[], None]) -> TrioTimer:
        timer = TrioTimer()
        self._spawn(timer.run, min(seconds, math.inf), callback, name="aexec timer")
        return timer

    def call_soon_threadsafe(self, function: Callable[..., object], *args: Any) -> None:
        self._token.run_sync_soon(function, *args)

    async def checkpoint(self) -> None:
        await trio.lowlevel.checkpoint()

    def _spawn(self, function: Callable[..., Any], *args: Any, name: str) -> None:
        assert self._nursery is not None
        self._context.copy().run(self._nursery.start_soon, function, *args, name=name)

    async def _own(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """What no handler may swallow would end the run as an internal error of trio's; keep it for close()."""
        try:
            await coroutine
        except trio.Cancelled:
            raise
        except BaseException as error:  # noqa: BLE001 - close() raises it
            self._crash = error

    async def _root(self) -> None:
        try:
            async with trio.open_nursery() as self._nursery:
                self._opened.set()
                await trio.sleep_forever()
        finally:
            self._nursery = None
            self._closed.set()
