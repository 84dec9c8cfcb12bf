"""What every message is: a frozen, typed value that declares its reply, and may be addressed.

``class Increment(Message[int])`` makes ``await ref.ask(Increment(by=2))`` an ``int`` to
the type checker, and a handler that returns anything else an error. ``Message[int,
"Counter"]`` says besides who is meant: a type checker refuses it at a ref to anybody but a
``Counter`` or a subclass of it. At run time it is the receiver's handlers that count.
"""

from __future__ import annotations

from typing import Any, Generic, TypeVar

import msgspec
import typing_extensions

__all__ = ("AnyMessage", "Message", "StreamMessage")

R_co = TypeVar("R_co", covariant=True)
A_contra = typing_extensions.TypeVar("A_contra", contravariant=True, default=Any)


class AnyMessage(msgspec.Struct, frozen=True):
    """What all messages are: frozen structs.

    In one process a mailbox passes the very object, so nobody may change it after sending.
    """


class Message(AnyMessage, Generic[R_co, A_contra], frozen=True):
    """Base of the messages that have one reply, of type ``R_co``.

    Subclasses are frozen structs: ``class Ping(Message[Pong], frozen=True)`` for anybody,
    ``class Add(Message[int, "Counter"], frozen=True)`` for actors of type ``A_contra``.
    """


class StreamMessage(AnyMessage, Generic[R_co, A_contra], frozen=True):
    """Base of the messages whose reply is a stream of ``R_co``: ``ref.stream(message)``.

    Their handlers are async generators.
    """
