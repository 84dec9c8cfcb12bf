"""What an executor says to one worker beside the steps: control calls, and the liveness lane.

Control calls take their turn between steps; :class:`Ping`, :class:`Dump` and
:class:`Revoke` are answered while the compute thread is busy, or hangs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from aexec.messages.base import Message

__all__ = ("CallMethod", "Dump", "Greet", "Hello", "Ping", "Pong", "Revoke", "Shutdown")


class Hello(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker says of itself once its class is constructed.

    Attributes:
        rank: Its rank.
        pid: Its process id.
        node: Name of its node.
        worker: Name of the worker class.
        methods: Its methods; True for those that are ``async def``.
        dynamic: The class makes up methods with ``__getattr__``: an unlisted name may exist.
        attributes: Names of what else it has, for people.
    """

    rank: int
    pid: int
    node: str
    worker: str
    methods: dict[str, bool]
    dynamic: bool = False
    attributes: tuple[str, ...] = ()

    @property
    def public_methods(self) -> tuple[str, ...]:
        """Names of methods, for people."""
        return tuple(name for name in self.methods if not name.startswith("_"))


class Greet(Message[Hello], frozen=True):
    """Say who you are."""


class CallMethod(Message[Any], frozen=True, kw_only=True):
    """Call a method of the worker, or a callable with the worker as its first argument.

    Attributes:
        call: The executor's id of the call; see :class:`Revoke`.
        method: A name, or a callable.
        args: Positional arguments.
        kwargs: Keyword arguments.
        after: An ``async def`` method starts once the rank is through with so many step
            messages; for workers to which these come on another line.
        reply_rank: The only rank whose reply is wanted: others answer with None. None: all.
    """

    call: int
    method: str | Callable[..., Any]
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = {}
    after: int = 0
    reply_rank: int | None = None


class Pong(msgspec.Struct, frozen=True, kw_only=True):
    """The pulse of one rank.

    Attributes:
        rank: Whose.
        phase: What its compute thread is doing; ``idle`` if nothing.
        step: The last step it began; None before the first.
        age: Seconds since that phase began.
        queued: Jobs that wait for the compute thread; of a worker process, 1 if there are any.
    """

    rank: int
    phase: str
    step: int | None
    age: float
    queued: int = 0


class Ping(Message[Pong], frozen=True):
    """How are you?"""


class Dump(Message[str], frozen=True):
    """Where are you: the stack of the compute thread and of running ``async def`` methods."""


class Revoke(Message[bool], frozen=True):
    """Nobody waits for this control call any longer; True: it never ran, and never will.

    An ``async def`` method that runs is cancelled, a plain one may ask
    ``aexec.worker.cancelled()``.

    Attributes:
        call: Its id.
    """

    call: int


class Shutdown(Message[bool], frozen=True):
    """End: give up what is queued, run the ``shutdown`` hook, end the compute thread.

    True: all of it was done in time. False: the thread still works; it ends when it can.

    Attributes:
        grace: Seconds.
    """

    grace: float
