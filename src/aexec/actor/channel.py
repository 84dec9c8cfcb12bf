"""How the items of a stream get from its handler to its consumer, a few at a time.

A stream is an ask whose reply is a :class:`Channel`: whatever ends an ask (its handler
has returned or raised, its actor has died, it was never begun) ends the stream, after
the items that were sent before.
"""

from __future__ import annotations

import contextlib
import functools
from collections import deque
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator
from typing import Any, Generic, TypeVar

from anyio import BusyResourceError

from aexec.actor.envelope import here
from aexec.actor.runtime import Promise
from aexec.messages.base import AnyMessage

__all__ = ("Channel", "pump")

T = TypeVar("T")


class Channel(Generic[T]):
    """Items on their way from one handler to one consumer; a ``runtime.Promise`` of the end.

    Args:
        make_promise: Makes what the two sides wait on.
        bound: Most items that have been sent and not taken.
        carry: What items pass through on their way; None: nothing.

    Attributes:
        items: What has been sent and not taken.
        is_closing: The consumer takes no more.
    """

    __slots__ = (
        "_bound",
        "_cancelled",
        "_carry",
        "_ended",
        "_error",
        "_make_promise",
        "_reader",
        "_writer",
        "is_closing",
        "items",
    )

    def __init__(
        self, make_promise: Callable[[], Promise[None]], bound: int, carry: Callable[[T], T] | None = None
    ) -> None:
        self._make_promise, self._bound, self._carry = make_promise, bound, carry
        self.items: deque[T] = deque()
        self.is_closing = False
        self._ended = self._cancelled = False
        self._error: BaseException | None = None
        self._reader: Promise[None] | None = None
        self._writer: Promise[None] | None = None

    def __repr__(self) -> str:
        state = "ended" if self._ended else "closing" if self.is_closing else "open"
        return f"<Channel {len(self.items)}/{self._bound}, {state}>"

    # ------------------------------------------------------------ its handler's side

    async def put(self, item: T) -> bool:
        """Hand an item over, and wait for room for the next one; False: no more are wanted."""
        if not self.is_closing:
            self.items.append(item if self._carry is None else self._carry(item))
            self.wake()
        while len(self.items) >= self._bound and not self.is_closing:
            self._writer = self._make_promise()
            try:
                await self._writer
            finally:
                self._writer = None
        return not self.is_closing

    # ------------------------------------------------------------ its consumer's side

    def take(self) -> T:
        """The next item, which has to be there."""
        item = self.items.popleft()
        _fulfil(self._writer)
        return item

    async def wait(self) -> None:
        """Wait until :meth:`wake` is called: there is an item, or the end, or time is up.

        Raises:
            BusyResourceError: Another task is waiting here.
        """
        if self._reader is not None and not self._reader.done():
            raise BusyResourceError("waiting for the items of")
        self._reader = reader = self._make_promise()
        try:
            await reader
        finally:
            if self._reader is reader:
                self._reader = None

    def wake(self) -> None:
        """Let the consumer look."""
        _fulfil(self._reader)

    def close(self) -> bool:
        """Take no more items; False: the handler does not wait for room, and has to be cut short."""
        self.is_closing = True
        self.items.clear()
        self.wake()  # whoever still waits for an item, as another task may
        if self._writer is None:
            return False
        _fulfil(self._writer)
        return True

    # ------------------------------------------------------------ the promise of its end

    def __await__(self) -> Generator[Any, Any, None]:
        while not self._ended:
            yield from self.wait().__await__()
        if self._error is not None:
            raise self._error

    def done(self) -> bool:
        """True when nothing more will come."""
        return self._ended

    def cancelled(self) -> bool:
        """True when its handler was cut short."""
        return self._cancelled

    def cancel(self) -> bool:
        """Its handler was cut short, or never begun."""
        self._cancelled = not self._ended
        self._end(None)
        return self._cancelled

    def set_result(self, result: None, /) -> None:
        """Its handler has returned."""
        self._end(result)

    def set_exception(self, exception: BaseException, /) -> None:
        """Its handler has raised, or its actor has ended."""
        self._end(exception)

    def exception(self) -> BaseException | None:
        """What ended it, when an error did."""
        return self._error

    def _end(self, error: BaseException | None) -> None:
        self._ended, self._error = True, error
        self.wake()


def _fulfil(promise: Promise[None] | None) -> None:
    if promise is not None and not promise.done():
        promise.set_result(None)


def pump(function: Callable[[Any, Any], AsyncGenerator[Any, None]]) -> Callable[[Any, Any], Coroutine[Any, Any, None]]:
    """A coroutine function that runs an async generator, and hands its items to the asker's channel."""

    @functools.wraps(function)
    async def run(actor: Any, message: AnyMessage) -> None:
        channel: Any = getattr(here.get(), "reply", None)
        async with contextlib.aclosing(function(actor, message)) as items:
            async for item in items:
                if not await channel.put(item):
                    return

    return run
