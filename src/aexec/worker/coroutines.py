"""One call of an ``async def`` method, from its acceptance to its end."""

from __future__ import annotations

import traceback
from collections.abc import Awaitable, Callable
from typing import Any

import anyio
import anyio.lowlevel

from aexec.actor import Deferred
from aexec.errors import ActorStopped

__all__ = ("AsyncCall",)


class AsyncCall:
    """Runs on the loop; unlike device work it can be cancelled.

    Args:
        id: The executor's id of the call.
        name: What is called, for people.
        make: Begins the call; what it returns is awaited.
        reply: Where its end goes.
        failure: What its caller is given for what it raised.
    """

    def __init__(
        self,
        id: int,  # noqa: A002 - it is the field's name
        name: str,
        make: Callable[[], Awaitable[Any]],
        reply: Deferred[Any],
        failure: Callable[[str, Exception], Exception],
    ) -> None:
        self.id, self.name, self._reply = id, name, reply
        self._make, self._failure = make, failure
        self._scope = anyio.CancelScope()
        self._awaitable: Awaitable[Any] | None = None

    def __repr__(self) -> str:
        return f"<AsyncCall {self.id}: {self.name}, {'waits for steps' if self._awaitable is None else 'runs'}>"

    def cancel(self) -> bool:
        """Cancel it; True: it had not begun."""
        self._scope.cancel()
        return self._awaitable is None

    async def run(self) -> None:
        """Run it, and answer; nothing is raised but what ends a process, and cancellation."""
        with self._scope:
            try:
                await anyio.lowlevel.checkpoint_if_cancelled()
                self._awaitable = self._make()
                value = await self._awaitable
            except anyio.get_cancelled_exc_class():
                self._reply.fail(ActorStopped(self.name, "it was cancelled"))
                raise
            except Exception as error:  # noqa: BLE001 - it belongs to whoever asked
                self._reply.fail(self._failure(self.name, error))
            else:
                self._reply.resolve(value)

    def stack(self) -> str:
        """Where it is now, innermost frame last."""
        frames: list[traceback.FrameSummary] = []
        inner: Any = self._awaitable
        while (frame := getattr(inner, "cr_frame", None)) is not None:
            frames += traceback.StackSummary.extract([(frame, frame.f_lineno)])
            inner = inner.cr_await
        return f"async {self.name}:\n" + "".join(traceback.format_list(frames))
