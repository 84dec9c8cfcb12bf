"""Events for any number of listeners, none of whom can hold up who tells them."""

from __future__ import annotations

import weakref
from collections import deque
from typing import Generic, Self, TypeVar

import anyio

__all__ = ("MAX_EVENTS", "EventHub", "EventStream")

MAX_EVENTS = 1024

E = TypeVar("E")


class EventStream(Generic[E]):
    """One listener's events, from its creation until their source is closed.

    A listener that falls :data:`MAX_EVENTS` behind loses the oldest, and can tell by
    :attr:`lost`.

    Attributes:
        lost: Events that it lost.
    """

    def __init__(self) -> None:
        self.lost = 0
        self._events: deque[E] = deque()
        self._news = anyio.Event()
        self._closed = False

    def __repr__(self) -> str:
        return f"<EventStream: {len(self._events)}/{MAX_EVENTS} waiting, {self.lost} lost>"

    def __aiter__(self) -> Self:
        """Itself."""
        return self

    async def __anext__(self) -> E:
        """The next event."""
        while not self._events:
            if self._closed:
                raise StopAsyncIteration
            await self._news.wait()
        event = self._events.popleft()
        if not self._events and not self._closed:
            self._news = anyio.Event()
        return event

    async def aclose(self) -> None:
        """Listen no longer."""
        self.end()

    def push(self, event: E) -> None:
        """Add an event, at the cost of the oldest if need be."""
        if self._closed:
            return
        if len(self._events) == MAX_EVENTS:
            self._events.popleft()
            self.lost += 1
        self._events.append(event)
        self._news.set()

    def end(self) -> None:
        """No more events; those that wait can still be read."""
        self._closed = True
        self._news.set()


class EventHub(Generic[E]):
    """Hands each event to all listeners that are still there."""

    def __init__(self) -> None:
        self._streams: weakref.WeakSet[EventStream[E]] = weakref.WeakSet()
        self._closed = False

    def __repr__(self) -> str:
        return f"<EventHub: {len(self._streams)} listeners>"

    def listen(self) -> EventStream[E]:
        """A new listener."""
        stream = EventStream[E]()
        self._streams.add(stream)
        if self._closed:
            stream.end()
        return stream

    def emit(self, event: E) -> None:
        """Tell everybody."""
        for stream in list(self._streams):
            stream.push(event)

    def close(self) -> None:
        """The last event was told."""
        self._closed = True
        for stream in list(self._streams):
            stream.end()
