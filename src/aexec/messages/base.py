"""What every message is: a frozen, typed value that declares its reply.

``class Increment(Message[int])`` makes ``await ref.ask(Increment(by=2))`` an ``int`` to
the type checker, and a handler that returns anything else an error.
"""

from __future__ import annotations

from typing import Generic, TypeVar

import msgspec

__all__ = ("Message",)

R_co = TypeVar("R_co", covariant=True)


class Message(msgspec.Struct, Generic[R_co], frozen=True):
    """Base of all messages; ``R_co`` is the type of the reply.

    Subclasses are frozen structs (``class Ping(Message[Pong], frozen=True)``): in one
    process a mailbox passes the very object, so nobody may change it after sending.
    """
