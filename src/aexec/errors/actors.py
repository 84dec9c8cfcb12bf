"""A message to an actor, or a call, did not end in a reply."""

from __future__ import annotations

from collections.abc import Sequence

from aexec.errors.root import AexecError

__all__ = (
    "ActorDied",
    "ActorError",
    "ActorRestarted",
    "ActorStopped",
    "CallCycle",
    "CallTimeout",
    "MailboxFull",
    "MessageNotPortable",
    "RestartsExhausted",
    "UnhandledMessage",
    "WrongLoop",
)


class ActorError(AexecError):
    """A message did not end in a reply."""


class ActorDied(ActorError):
    """The actor failed, and with it every message that waited for it.

    Attributes:
        actor: Its name.
        reason: Why it ended.
    """

    def __init__(self, actor: str, reason: str) -> None:
        super().__init__(actor, reason)
        self.actor, self.reason = actor, reason

    def __str__(self) -> str:
        return f"actor {self.actor} is dead: {self.reason}"


class ActorStopped(ActorDied):
    """The actor was stopped on purpose before it came to this message."""


class ActorRestarted(ActorError):
    """The actor was restarted while it had the message in hand, so that nobody knows how far it came.

    Attributes:
        actor: Its name.
        message: The type of the message.
        reason: Why it was restarted.
    """

    def __init__(self, actor: str, message: str, reason: str) -> None:
        super().__init__(actor, message, reason)
        self.actor, self.message, self.reason = actor, message, reason

    def __str__(self) -> str:
        return (
            f"actor {self.actor} was restarted while it had {self.message} in hand: {self.reason}; "
            "it lives, and may have done a part of it"
        )


class RestartsExhausted(ActorError):
    """The actor failed more often than its supervision allows.

    Attributes:
        actor: Its name.
        max_restarts: How many restarts it had.
        within: The window in seconds.
        last: The failure that was one too many, in words; it is the cause as well.
    """

    def __init__(self, actor: str, max_restarts: int, within: float, last: str) -> None:
        super().__init__(actor, max_restarts, within, last)
        self.actor, self.max_restarts, self.within, self.last = actor, max_restarts, within, last

    def __str__(self) -> str:
        restarts = "one restart" if self.max_restarts == 1 else f"{self.max_restarts} restarts"
        return (
            f"actor {self.actor} has used up its {restarts} within {self.within:g} s "
            f"(Supervision.max_restarts, Supervision.within); its last failure: {self.last}"
        )


class MailboxFull(ActorError):
    """A bounded mailbox has no room now.

    Attributes:
        actor: Whose mailbox.
        depth: Messages in it, which is its bound.
    """

    def __init__(self, actor: str, depth: int) -> None:
        super().__init__(actor, depth)
        self.actor, self.depth = actor, depth

    def __str__(self) -> str:
        return (
            f"the mailbox of {self.actor} is full ({self.depth} messages): "
            "await tell() to wait for room, or spawn the actor with a larger mailbox"
        )


class CallCycle(ActorError):
    """An ask would wait for an actor that waits for this very ask.

    Attributes:
        chain: Names of the actors from the first asker to the repeated one.
    """

    def __init__(self, chain: Sequence[str]) -> None:
        super().__init__(tuple(chain))
        self.chain = tuple(chain)

    def __str__(self) -> str:
        return f"call cycle {' -> '.join(self.chain)}: tell() instead of ask() at one of these hops"


class UnhandledMessage(ActorError, TypeError):
    """The actor has no handler for messages of this type.

    Attributes:
        actor: Its name.
        message: The type of the message.
        handled: Types it has handlers for.
    """

    def __init__(self, actor: str, message: str, handled: Sequence[str]) -> None:
        super().__init__(actor, message, tuple(handled))
        self.actor, self.message, self.handled = actor, message, tuple(handled)

    def __str__(self) -> str:
        handled = ", ".join(self.handled) or "nothing"
        return f"{self.actor} has no handler for {self.message}; it handles {handled}{self._hint}"

    @property
    def _hint(self) -> str:
        if f"{self.message} (a stream)" in self.handled:
            return ": what is a stream is opened by `async with ref.stream(...)`"
        return ": what is no stream is sent by ask() or tell()" if self.message in self.handled else ""


class MessageNotPortable(ActorError, TypeError):
    """A message or a reply cannot travel between processes, and its system checks that all can.

    Attributes:
        what: Its type.
        where: What of it cannot, as in ``payload['lock']``; empty: itself.
        kind: The type of that.
        why: What the codec says.
    """

    def __init__(self, what: str, where: str, kind: str, why: str) -> None:
        super().__init__(what, where, kind, why)
        self.what, self.where, self.kind, self.why = what, where, kind, why

    def __str__(self) -> str:
        what = f"{self.what} cannot travel: its {self.where} is a {self.kind}" if self.where else self._itself()
        return f"{what} ({self.why}); send plain data in its place"

    def _itself(self) -> str:
        return f"a {self.kind} cannot travel to another process"


class WrongLoop(ActorError, RuntimeError):
    """An actor system was used from another event loop than its own.

    Attributes:
        system: Its name.
        owner: The loop it was opened on.
        here: The loop it was used from.
    """

    def __init__(self, system: str, owner: str, here: str) -> None:
        super().__init__(system, owner, here)
        self.system, self.owner, self.here = system, owner, here

    def __str__(self) -> str:
        return (
            f"actor system {self.system} belongs to {self.owner} and was used from {self.here}: "
            "open an engine, executor or system on the loop that uses it; another one's system is reached with "
            "system.call_soon_threadsafe(), and an LLM from any thread"
        )


class CallTimeout(AexecError, TimeoutError):
    """A call's deadline passed.

    Attributes:
        call: What was called, as in ``Increment to counter-1`` or ``echo on ranks 0, 2``.
        timeout: The limit in seconds, 0 or less when the deadline was past already.
        started: False: it never ran, so that a retry is safe.
    """

    def __init__(self, call: str, timeout: float, started: bool) -> None:
        super().__init__(call, timeout, started)
        self.call, self.timeout, self.started = call, timeout, started

    def __str__(self) -> str:
        state = "it had started, and may still be running" if self.started else "it never started"
        return f"{self.call} passed its limit of {max(self.timeout, 0.0):.3g} s ({state})"
