"""One call of an ``async def`` method, from its acceptance to its end."""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

from aexec.errors import ActorStopped
from aexec.worker.stacks import awaited_frames

__all__ = ("AsyncCall", "Reply")


class Reply(Protocol):
    """Where a call's end goes; a ``Deferred`` is one."""

    def resolve(self, value: Any, /) -> object:
        """It ended well."""
        ...

    def fail(self, error: Exception, /) -> object:
        """It ended."""
        ...


class _Task(Protocol):
    def cancel(self) -> object: ...


class AsyncCall:
    """Runs on the loop; unlike device work it can be cancelled.

    Args:
        id: The executor's id of the call.
        name: What is called, for people.
        make: Begins the call; what it returns is awaited.
        reply: Where its end goes.
        failure: What its caller is given for what it raised.

    Attributes:
        task: The task that runs it, once there is one.
    """

    def __init__(
        self,
        id: int,  # noqa: A002 - it is the field's name
        name: str,
        make: Callable[[], Awaitable[Any]],
        reply: Reply,
        failure: Callable[[str, Exception], Exception],
    ) -> None:
        self.id, self.name = id, name
        self.task: _Task | None = None
        self._make, self._failure = make, failure
        self._reply: Reply | None = reply
        self._awaitable: Awaitable[Any] | None = None

    def __repr__(self) -> str:
        return f"<AsyncCall {self.id}: {self.name}, {'runs' if self.has_begun else 'has not begun'}>"

    @property
    def has_begun(self) -> bool:
        """True once the method's own code has run."""
        return self._awaitable is not None

    def cancel(self) -> None:
        """Cancel it, and answer."""
        self._fail(ActorStopped(self.name, "it was cancelled"))
        if self.task is not None:
            self.task.cancel()

    async def run(self) -> None:
        """Run it, and answer; nothing is raised but what ends a process, and cancellation."""
        try:
            self._awaitable = self._make()
            value = await self._awaitable
        except Exception as error:  # noqa: BLE001 - it belongs to whoever asked
            self._fail(self._failure(self.name, error))
        except asyncio.CancelledError as cancelled:
            if _is_cancelled_here():
                self._fail(ActorStopped(self.name, "it was cancelled"))
                raise
            own = RuntimeError("it awaited something that was cancelled, and nobody has cancelled the call itself")
            own.__cause__ = cancelled
            self._fail(self._failure(self.name, own))
        except BaseException:
            self._fail(ActorStopped(self.name, "its own code ended it"))
            raise
        else:
            reply, self._reply = self._reply, None
            if reply is not None:
                reply.resolve(value)

    def stack(self) -> str:
        """Where it is now, innermost frame last."""
        return f"async {self.name}:\n" + "".join(traceback.format_list(awaited_frames(self._awaitable)))

    def _fail(self, error: Exception) -> None:
        reply, self._reply = self._reply, None
        if reply is not None:
            reply.fail(error)


def _is_cancelled_here() -> bool:
    """True when somebody wants the task at hand to end."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
