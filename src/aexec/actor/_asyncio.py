"""The actor core on asyncio, uvloop included.

A handler is cancelled natively: its task is ``cancel()``led, the section catches the
``CancelledError`` and takes the request back with ``uncancel()``, as ``asyncio.timeout``
does. That costs nothing per message, where a cancel scope costs 6 µs. A cancellation
that somebody else asked for at the same time still goes through.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import time
from collections.abc import Callable, Coroutine
from threading import get_ident
from typing import Any, TypeVar

from aexec.actor.runtime import TIME_SLICE, Interrupted
from aexec.errors import ActorError

__all__ = ("AsyncioRuntime",)

T = TypeVar("T")


class AsyncioSection:
    """A stretch of an asyncio task; see ``runtime.Section``."""

    __slots__ = ("_interrupts", "_task", "active")

    def __init__(self) -> None:
        self.active = False
        self._interrupts = 0
        self._task: asyncio.Task[Any] | None = None

    async def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        if self._interrupts:
            self._interrupts = 0
            coroutine.close()
            raise Interrupted
        self._task = asyncio.current_task()
        self.active = True
        try:
            return await coroutine
        except asyncio.CancelledError as error:
            ours = self._interrupts > 0
            if self._settle():
                raise  # somebody outside asked for it too, or alone
            if ours:
                raise Interrupted from None
            raise ActorError("the handler awaited something that somebody else had cancelled") from error
        finally:
            self._settle()
            self.active = False

    def interrupt(self) -> None:
        self._interrupts += 1
        if self.active and self._task is not None:
            self._task.cancel()

    def _settle(self) -> int:
        """Take our requests back; returns how many of others' are left."""
        task = self._task
        assert task is not None
        while self._interrupts:
            self._interrupts -= 1
            task.uncancel()
        return task.cancelling()


class AsyncioRuntime:
    """An asyncio loop; see ``runtime.Runtime``."""

    __slots__ = ("_context", "_is_running", "_loop", "_thread", "promise")

    cancelled = asyncio.CancelledError
    now = staticmethod(time.monotonic)
    time_slice = TIME_SLICE
    section = AsyncioSection

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._thread, self._is_running = get_ident(), loop.is_running
        self._context = contextvars.copy_context()
        self.promise = loop.create_future

    def __str__(self) -> str:
        return f"asyncio {type(self._loop).__name__} {id(self._loop):#x}"

    @property
    def is_here(self) -> bool:
        if get_ident() == self._thread and self._is_running():
            return True  # and no system call, such as get_running_loop() makes
        try:
            return asyncio.get_running_loop() is self._loop
        except RuntimeError:
            return False

    async def open(self) -> None:
        """Nothing to do: asyncio's tasks belong to the loop."""

    async def close(self) -> None:
        """Nothing to do."""

    def start(self, coroutine: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        return self._loop.create_task(coroutine, name=name, context=self._context.copy())

    def shield(self) -> contextlib.nullcontext[None]:
        """Asyncio cancels a task once, so there is nothing to hold off."""
        return contextlib.nullcontext()

    def call_later(self, seconds: float, callback: Callable[[], None]) -> asyncio.TimerHandle:
        return self._loop.call_later(seconds, callback, context=self._context)

    def call_soon_threadsafe(self, function: Callable[..., object], *args: Any) -> None:
        self._loop.call_soon_threadsafe(function, *args)

    async def checkpoint(self) -> None:
        await asyncio.sleep(0)
