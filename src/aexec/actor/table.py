"""Handlers, by the type of the message they take."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from aexec.messages.base import Message

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
    """

    kind: type[Message[Any]]
    name: str
    function: Callable[[Any, Any], Any]
    is_async: bool
    lane: Lane
    concurrent: int
    shield: bool


class HandlerTable:
    """Handlers of a class by the type of their message; a subclass of a message goes to its handler.

    Attributes:
        starts: The class has an ``on_start`` of its own.
        stops: The class has an ``on_stop`` of its own.
    """

    __slots__ = ("_handlers", "starts", "stops")

    def __init__(self, handlers: Mapping[type, Handler], *, starts: bool, stops: bool) -> None:
        self._handlers: dict[type, Handler | None] = dict(handlers)
        self.starts, self.stops = starts, stops

    def __repr__(self) -> str:
        return f"<HandlerTable: {', '.join(self.names) or 'nothing'}>"

    def __iter__(self) -> Iterator[Handler]:
        return (handler for kind, handler in self._handlers.items() if handler is not None and handler.kind is kind)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the messages that are handled."""
        return tuple(handler.kind.__name__ for handler in self)

    def find(self, kind: type) -> Handler | None:
        """The handler of messages of type ``kind``."""
        try:
            return self._handlers[kind]
        except KeyError:
            handler = next((found for base in kind.__mro__ if (found := self._handlers.get(base))), None)
            self._handlers[kind] = handler
            return handler
