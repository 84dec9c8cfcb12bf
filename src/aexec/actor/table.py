"""Handlers, by the type of the message they take."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from aexec.messages.base import AnyMessage

__all__ = ("Handler", "HandlerTable", "Lane")

Lane = Literal["normal", "urgent"]


@dataclass(frozen=True, slots=True, eq=False)
class Handler:
    """One handler and how it is run.

    Attributes:
        kind: The type of its message.
        name: The method's name.
        function: The function behind the method.
        is_async: It is an ``async def``.
        lane: The lane of its messages.
        concurrent: How many of its messages may be in hand at a time.
        shield: Its asker's cancellation and deadline do not reach it.
        fatal: Errors that end the actor when it raises one.
        when: States of the actor in which its messages begin; None: in any.
        is_stream: It is an async generator, and its reply a stream.
        aside: Its messages run beside the serving task.
        gated: A message of it may have to be held back.
    """

    kind: type[AnyMessage]
    name: str
    function: Callable[[Any, Any], Any]
    is_async: bool
    lane: Lane
    concurrent: int
    shield: bool
    fatal: tuple[type[BaseException], ...] = ()
    when: frozenset[str] | None = None
    is_stream: bool = False
    aside: bool = field(init=False)
    gated: bool = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "aside", self.concurrent > 1 or self.is_stream)
        object.__setattr__(self, "gated", self.aside or self.when is not None)


class HandlerTable:
    """Handlers of a class by the type of their message; a subclass of a message goes to its handler.

    Attributes:
        starts: The class has an ``on_start`` of its own.
        stops: The class has an ``on_stop`` of its own.
    """

    __slots__ = ("_handlers", "_streams", "starts", "stops")

    def __init__(self, handlers: Mapping[type, Handler], *, starts: bool, stops: bool) -> None:
        self._handlers: dict[type, Handler | None] = {
            kind: handler for kind, handler in handlers.items() if not handler.is_stream
        }
        self._streams = {kind: handler for kind, handler in handlers.items() if handler.is_stream}
        self.starts, self.stops = starts, stops

    def __repr__(self) -> str:
        return f"<HandlerTable: {', '.join(self.names) or 'nothing'}>"

    def __iter__(self) -> Iterator[Handler]:
        known = {**self._handlers, **self._streams}
        return (handler for kind, handler in known.items() if handler is not None and handler.kind is kind)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the messages that are handled."""
        return tuple(f"{handler.kind.__name__}{' (a stream)' if handler.is_stream else ''}" for handler in self)

    def renew(self, table: HandlerTable) -> HandlerTable:
        """What an actor of this table has in its next incarnation, whose class has ``table``."""
        return table

    def find(self, kind: type) -> Handler | None:
        """The handler of messages of type ``kind`` that have one reply."""
        try:
            return self._handlers[kind]
        except KeyError:
            handler = next((found for base in kind.__mro__ if (found := self._handlers.get(base))), None)
            self._handlers[kind] = handler
            return handler

    def find_stream(self, kind: type) -> Handler | None:
        """The handler of messages of type ``kind`` whose reply is a stream."""
        return next((found for base in kind.__mro__ if (found := self._streams.get(base))), None)
