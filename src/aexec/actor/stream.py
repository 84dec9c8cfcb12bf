"""The consumer's end of a stream: ``async with ref.stream(message) as items``."""

from __future__ import annotations

import math
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar, final

from aexec.actor.channel import Channel
from aexec.actor.envelope import Envelope, here
from aexec.actor.inbox import DEFAULT, NOT_BEGUN, Timeout
from aexec.errors import ActorError, CallTimeout, ConfigError, note
from aexec.messages.base import StreamMessage

if TYPE_CHECKING:
    from aexec.actor.desk import Desk

__all__ = ("Stream",)

T = TypeVar("T")


@final
class Stream(Generic[T]):
    """Items that an actor's async generator yields, for one consumer; made by ``Ref.stream``.

    Items come in order. What the generator raises, and the death of its actor, is raised
    in the consumer's loop, after the items before it.
    """

    __slots__ = ("_buffer", "_cell", "_channel", "_envelope", "_limit", "_message", "_taken")

    def __init__(self, cell: Desk, message: StreamMessage[T, Any], timeout: Timeout, buffer: int) -> None:
        if buffer < 1:
            raise ConfigError(f"buffer is {buffer}: expected at least 1 item")
        self._cell, self._message, self._buffer = cell, message, buffer
        self._limit = cell.core.timeout if timeout is DEFAULT else timeout
        self._channel: Channel[T] | None = None
        self._envelope: Envelope | None = None
        self._taken = 0

    def __repr__(self) -> str:
        state = "not entered" if self._channel is None else repr(self._channel)[1:-1].lower()
        return f"<Stream {self._call}: {self._taken} items taken, {state}>"

    @property
    def _call(self) -> str:
        return f"{type(self._message).__name__} to {self._cell.name}"

    async def __aenter__(self) -> Self:
        """Send the message.

        Raises:
            ActorDied: The actor has ended.
            CallCycle: The actor waits for whoever opens the stream.
            RuntimeError: It was entered before.
            UnhandledMessage: The actor has no such stream.
        """
        if self._channel is not None:
            raise RuntimeError(f"the stream {self._call} was entered before: ask for another one")
        origin = here.get()
        deadline = None if origin is None else origin.deadline
        core = self._cell.core
        self._channel = Channel(core.runtime.promise, self._buffer, core.carry)
        self._envelope = self._cell.ask_for(self._message, self._channel, deadline, is_stream=True)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            await self.aclose()
        except Exception as closing:
            if error is None:
                raise
            note(error, f"closing the stream {self._call} failed: {closing!r}")

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> T:
        """The next item.

        Raises:
            ActorDied: The actor has failed, or was stopped.
            BusyResourceError: Another task is waiting here.
            CallTimeout: It did not come in time; one may go on and ask for it again.
            RuntimeError: The block was not entered, or has been left.
            Exception: What the generator raised.
        """
        channel, by = self._opened(), self._deadline()
        while not channel.items:
            if channel.done():
                if (error := channel.exception()) is not None:
                    raise error
                raise StopAsyncIteration
            await self._wait(channel, by)
            self._opened()  # another task may have closed it meanwhile
            if not channel.items and not channel.done() and self._cell.core.runtime.now() >= by:
                raise self._timeout()
        self._taken += 1
        return channel.take()

    async def aclose(self) -> None:
        """Close the generator, and wait until it is closed, for as long as for an item; leaving the block does it.

        Raises:
            Exception: What the generator raised as it was closed.
        """
        channel, envelope = self._channel, self._envelope
        if channel is None or envelope is None or channel.is_closing:
            return
        waits_for_room = channel.close()
        if channel.done():
            return
        if self._cell.withdraw(envelope, "cancelled"):
            channel.cancel()
        elif not waits_for_room:
            self._cell.give_up(envelope)
        by = self._deadline()
        while not channel.done() and self._cell.core.runtime.now() < by:
            await self._wait(channel, by)
        error = channel.exception()
        if error is not None and not isinstance(error, ActorError):
            raise error

    def _opened(self) -> Channel[T]:
        channel = self._channel
        if channel is None or channel.is_closing:
            raise RuntimeError(f"the stream {self._call} is not open: `async with` opens it, and closes it")
        return channel

    def _deadline(self) -> float:
        """Until when the consumer waits from now on, in monotonic seconds."""
        envelope = self._envelope
        own = math.inf if self._limit is None else self._cell.core.runtime.now() + self._limit
        whole = None if envelope is None else envelope.deadline
        return own if whole is None else min(own, whole)

    async def _wait(self, channel: Channel[T], by: float) -> None:
        timer = None if by == math.inf else self._cell.core.deadlines.call_at(by, channel.wake)
        try:
            await channel.wait()
        finally:
            if timer is not None:
                timer.cancel()

    def _timeout(self) -> CallTimeout:
        envelope, now = self._envelope, self._cell.core.runtime.now()
        assert envelope is not None
        limit = self._limit
        if envelope.deadline is not None and envelope.deadline <= now:
            limit = envelope.deadline - envelope.sent_at
        return CallTimeout(self._call, limit or 0.0, started=envelope.stage not in NOT_BEGUN)
