"""The short way to the executor's actor: for what goes on to the ranks, and is answered by them.

An ask costs an envelope, two futures and two turns of the loop, which is as much as all the
rest of a step. Where the actor has nothing to do a plain handler of its may as well run in
the asker's own turn: messages are handled one at a time and in order, as ever. Whatever else
an ask does (a deadline that is inherited, a mailbox that is in use) takes the long way.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
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
    """What one task awaits; there is a future only if it has to wait.

    Attributes:
        is_over: It was answered.
        value: The reply; None if it is an error, too.
    """

    __slots__ = ("_error", "_future", "_left", "is_over", "value")

    def __init__(self) -> None:
        self.is_over = False
        self.value: Any = None
        self._error: AexecError | None = None
        self._future: asyncio.Future[None] | None = None
        self._left: Callable[[], object] | None = None

    def __repr__(self) -> str:
        return f"<DirectReply: {'answered' if self.is_over else 'awaited' if self._future else 'new'}>"

    def resolve(self, value: Any) -> None:
        """Give the reply; one that comes after its asker has gone is dropped."""
        self.value, self.is_over = value, True
        if self._future is not None and not self._future.done():
            self._future.set_result(None)

    def fail(self, error: AexecError) -> None:
        """Raise ``error`` at the asker."""
        self._error, self.is_over = error, True
        if self._future is not None and not self._future.done():
            self._future.set_result(None)

    def on_cancel(self, callback: Callable[[], object]) -> None:
        """Call this when the asker is cancelled."""
        self._left = callback

    async def result(self, loop: asyncio.AbstractEventLoop) -> Any:
        """Wait for the reply.

        Raises:
            AexecError: It is an error.
        """
        if not self.is_over:
            self._future = loop.create_future()
            try:
                await self._future
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
