"""The short way to the executor's actor: for what goes on to the ranks, and is answered by them.

An ask costs an envelope, two futures and three turns of the loop, which is as much as all the
rest of a step. Where the actor has nothing to do a plain handler of its may as well run in
the asker's own turn: messages are handled one at a time and in order, as ever. Whatever else
an ask does (a deadline that is inherited, a mailbox that is in use) takes the long way.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable, Generator
from typing import Any, Protocol

from aexec.errors import AexecError
from aexec.executor.calls import Collective
from aexec.messages.step import ExecuteModel, SampleTokens

__all__ = ("DirectReply", "Reply", "Taker")


class Reply(Protocol):
    """Where the end of a call goes, and who may leave before it; a ``Deferred`` is one."""

    def resolve(self, value: Any, /) -> None:
        """It ended well."""
        ...

    def fail(self, error: AexecError, /) -> None:
        """It ended."""
        ...

    def on_cancel(self, callback: Callable[[], object], /) -> None:
        """Call this once when the asker has gone."""
        ...


class Taker(Protocol):
    """What takes calls, on the loop of the executor."""

    def take_step(self, message: ExecuteModel, reply: Reply, until: float | None, /) -> None:
        """Launch a step; raises what refuses it."""
        ...

    def take_sampling(self, message: SampleTokens, reply: Reply, until: float | None, /) -> None:
        """Sample a step; raises what refuses it."""
        ...

    def take_call(self, message: Collective, reply: Reply, until: float | None, /) -> None:
        """Call a worker method; raises what refuses it."""
        ...


class DirectReply:
    """What one task awaits; it is back in the very turn of the loop in which the answer comes.

    A future would have it wait for the next turn, which takes a loop as long as the answer's
    way through the executor. So this is what a task sees of a future, and no more; where the
    answer comes from another task's turn, the next one it is.

    Args:
        loop: Of the task.

    Attributes:
        is_over: It was answered.
        value: The reply; None if it is an error, too.
    """

    __slots__ = (
        "_asyncio_future_blocking", "_cancelled", "_context", "_error", "_left", "_loop", "_wake", "is_over", "value",
    )  # fmt: skip

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self.is_over = self._asyncio_future_blocking = False
        self.value: Any = None
        self._error: AexecError | None = None
        self._left: Callable[[], object] | None = None
        self._wake: Callable[[Any], object] | None = None
        self._context: contextvars.Context | None = None
        self._cancelled: asyncio.CancelledError | None = None

    def __repr__(self) -> str:
        return f"<DirectReply: {'answered' if self.is_over else 'awaited' if self._wake else 'new'}>"

    def resolve(self, value: Any) -> None:
        """Give the reply, and let the asker go on before this returns, if it waits and no task runs.

        One that comes after its asker has gone is dropped.
        """
        self.value, self.is_over = value, True
        wake, self._wake = self._wake, None
        if wake is None:
            return
        if self._context is not None and asyncio.current_task(self._loop) is None:
            self._context.run(wake, self)
        else:
            self._loop.call_soon(wake, self, context=self._context)

    def fail(self, error: AexecError) -> None:
        """Raise ``error`` at the asker, in the next turn: whoever says so may be in the middle of more."""
        self._error, self.is_over = error, True
        wake, self._wake = self._wake, None
        if wake is not None:
            self._loop.call_soon(wake, self, context=self._context)

    def on_cancel(self, callback: Callable[[], object]) -> None:
        """Call this when the asker is cancelled."""
        self._left = callback

    def __await__(self) -> Generator[Any, None, Any]:
        """Wait for the reply; raises an error that it is."""
        if not self.is_over:
            self._asyncio_future_blocking = True
            try:
                yield self
            except asyncio.CancelledError:
                left, self._left = self._left, None
                if left is not None and not self.is_over:
                    left()
                raise
        if self._error is not None:
            error, self._error = self._error, None
            try:
                raise error
            finally:
                del error  # its traceback holds this frame: no cycle
        return self.value

    # What a task asks of whatever it waits for.

    def get_loop(self) -> asyncio.AbstractEventLoop:
        """Of the task."""
        return self._loop

    def add_done_callback(self, wake: Callable[[Any], object], *, context: contextvars.Context) -> None:
        """How to let the task go on."""
        self._wake, self._context = wake, context

    def cancel(self, msg: Any = None) -> bool:
        """The task is cancelled; False: it is about to go on anyway."""
        if self._wake is None:
            return False
        self._cancelled = asyncio.CancelledError() if msg is None else asyncio.CancelledError(msg)
        wake, self._wake = self._wake, None
        self._loop.call_soon(wake, self, context=self._context)
        return True

    def result(self) -> None:
        """Raise what the task is to be given in place of the reply."""
        if self._cancelled is not None:
            cancelled, self._cancelled = self._cancelled, None
            raise cancelled
