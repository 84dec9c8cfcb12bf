"""An actor that stands in for another one: it takes any message, and a test says what comes of it.

::

    probe = await spawn_probe(system)
    await greeter.ask(Introduce(probe.ref))
    hello = await probe.expect(Hello)
    probe.reply("nice to meet you")
    await probe.expect_nothing()
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar, final

from aexec.actor import Actor, Deferred, Message, Ref, Spawner, handles
from aexec.actor.table import Handler, HandlerTable
from aexec.errors import ActorDied, CallTimeout
from aexec.messages.base import AnyMessage

__all__ = ("Probe", "Received", "spawn_probe")

M = TypeVar("M", bound=AnyMessage)

SHOWN = 12  # messages in the text of a failure


@dataclass(slots=True, eq=False)
class Received:
    """A message that a probe has received.

    Attributes:
        message: The message.
        sender: The actor that sent it; None when it came from outside of actors.
        at: When the probe took it, in seconds of the system's clock.
        is_expected: A test has expected it.
    """

    message: AnyMessage
    sender: Ref[Any] | None
    at: float
    is_expected: bool = False
    _reply: Deferred[Any] | None = field(default=None, repr=False)
    _answer: str = field(default="told", repr=False)

    def __str__(self) -> str:
        sender = "outside" if self.sender is None else self.sender.name
        seen = "expected" if self.is_expected else "not expected yet"
        return f"{self.message!r} from {sender}, {self._answer}, {seen}"

    def answer(self, how: str) -> Deferred[Any]:
        """Its reply, which is given now.

        Raises:
            AssertionError: It was told, or is answered.
        """
        reply, self._reply = self._reply, None
        if reply is None:
            raise AssertionError(f"there is no reply to be given to {self}")
        self._answer = how
        return reply


class _Next(Message[Received], frozen=True):
    """Take the next message that is not expected yet, as soon as there is one."""


class _Everything(HandlerTable):
    """Handles messages of every type."""

    __slots__ = ("_next", "_take")

    def __init__(self, own: HandlerTable, take: Callable[[Any, Any], Any]) -> None:
        super().__init__({}, starts=own.starts, stops=own.stops)
        self._next, self._take = own.find(_Next), take

    def find(self, kind: type) -> Handler | None:
        if kind is _Next:
            return self._next
        return Handler(kind, "take", self._take, is_async=False, lane="normal", concurrent=1, shield=False)


class _ProbeActor(Actor):
    """Writes down what it receives."""

    def __init__(self) -> None:
        self.received: list[Received] = []
        self.fresh: deque[Received] = deque()
        self.waiting: deque[Deferred[Received]] = deque()

    def take(self, message: AnyMessage) -> Deferred[Any] | None:
        """Any message."""
        reply = self.context.defer()
        owed = (reply, "not answered yet") if reply.is_awaited else (None, "told")
        received = Received(message, self.context.sender, self.context.now(), False, *owed)
        self.received.append(received)
        while self.waiting:
            waiting = self.waiting.popleft()
            if waiting.is_awaited:
                waiting.resolve(received)
                break
        else:
            self.fresh.append(received)
        return reply if reply.is_awaited else None

    @handles(_Next)
    def next(self, message: _Next) -> Received | Deferred[Received]:
        """What ``expect`` asks for."""
        if self.fresh:
            return self.fresh.popleft()
        reply = self.context.defer(message)
        reply.on_cancel(lambda: self._forget(reply))
        self.waiting.append(reply)
        return reply

    def _forget(self, reply: Deferred[Received]) -> None:
        self.waiting.remove(reply)
        reply.fail(LookupError("nothing came"))


_ProbeActor.__handlers__ = _Everything(_ProbeActor.__handlers__, _ProbeActor.take)


@final
class Probe:
    """An actor in the hands of a test; made by :func:`spawn_probe`.

    Attributes:
        ref: Its address: an actor may be given it in place of any other's.
    """

    def __init__(self, ref: Ref[Any], actor: _ProbeActor) -> None:
        self.ref, self._actor = ref, actor
        self._last: Received | None = None

    def __repr__(self) -> str:
        return f"<Probe {self.ref.name}: {len(self.received)} received, {len(self._actor.fresh)} not expected yet>"

    @property
    def received(self) -> tuple[Received, ...]:
        """All that it has received, in order."""
        return tuple(self._actor.received)

    async def expect(self, kind: type[M], *, timeout: float = 3.0, where: Callable[[M], object] | None = None) -> M:
        """The next message, which has to be a ``kind``.

        Args:
            kind: Its type, or a base of it.
            timeout: Seconds to wait for it, by the system's clock.
            where: Says whether it is the right one.

        Raises:
            AssertionError: It is another one, or none came; lists all that did.
        """
        self._last = received = await self._next(timeout)
        wanted = kind.__name__ if where is None else f"{kind.__name__} with {getattr(where, '__name__', where)}"
        if received is None:
            raise AssertionError(self._report(f"expected {wanted} within {timeout:g} s, and nothing came"))
        received.is_expected = True
        message = received.message
        if not isinstance(message, kind) or (where is not None and not where(message)):
            raise AssertionError(self._report(f"expected {wanted}, and {message!r} came"))
        return message

    async def expect_nothing(self, seconds: float = 0.1) -> None:
        """See that nothing comes for a time, by the system's clock.

        Raises:
            AssertionError: Something did, or had come before and was not expected.
        """
        received = await self._next(seconds)
        if received is not None:
            raise AssertionError(self._report(f"expected nothing within {seconds:g} s, and {received.message!r} came"))

    def reply(self, value: Any = None) -> None:
        """Answer the ask that was expected last.

        Raises:
            AssertionError: It was a tell, it is answered already, or nothing was expected.
        """
        self._expected().answer(f"answered {value!r}").resolve(value)

    def fail(self, error: BaseException) -> None:
        """Raise ``error`` at the asker whose message was expected last.

        Raises:
            AssertionError: It was a tell, it is answered already, or nothing was expected.
        """
        self._expected().answer(f"failed with {error!r}").fail(error)

    def _expected(self) -> Received:
        if self._last is None:
            raise AssertionError(f"{self!r} can answer what expect() has returned: expect a message first")
        return self._last

    async def _next(self, timeout: float) -> Received | None:
        try:
            return await self.ref.ask(_Next(), timeout=timeout)
        except CallTimeout:
            return None
        except ActorDied as error:
            raise AssertionError(self._report(str(error))) from error

    def _report(self, problem: str) -> str:
        received = self.received
        if not received:
            return f"{problem}; {self.ref.name} has received nothing at all"
        first = max(0, len(received) - SHOWN)
        lines = [f"  {number}. at {one.at:.3f} s: {one}" for number, one in enumerate(received[first:], first + 1)]
        return "\n".join([f"{problem}; {self.ref.name} has received", *(["  ..."] if first else []), *lines])


async def spawn_probe(system: Spawner, *, name: str | None = None) -> Probe:
    """Spawn an actor that takes any message, and does what the test says.

    Args:
        system: Where it is to live: a system, or what its ``using`` returns.
        name: Its name; None: ``probe-1``, ``probe-2``, ...
    """
    actor = _ProbeActor()

    def probe() -> _ProbeActor:
        return actor

    return Probe(await (system if name is None else system.using(name=name)).spawn(probe), actor)
