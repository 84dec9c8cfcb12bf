"""Where messages for an actor come in: checked, stamped, and put into its mailbox.

Every verb respects the bound: an ask and a tell wait for room in the order they came,
``tell_nowait`` does not wait. Whatever is wrong with a message is said to its sender at
once, so that nothing has to be found out by waiting for a deadline.
"""

from __future__ import annotations

import abc
import enum
from typing import Any, Final

from aexec.actor.core import Core
from aexec.actor.deadletters import DeadLetterKind
from aexec.actor.envelope import Envelope, Stage, here, seal
from aexec.actor.lifecycle import Exit, LifecycleState
from aexec.actor.mailbox import Mailbox
from aexec.actor.place import Place
from aexec.actor.runtime import Promise
from aexec.actor.table import HandlerTable
from aexec.errors import CallCycle, CallTimeout, MailboxFull, UnhandledMessage
from aexec.messages.base import AnyMessage, Message

__all__ = ("DEFAULT", "NOT_BEGUN", "Default", "Inbox", "Joint", "Timeout", "deadline_of", "joins_late")


class Default(enum.Enum):
    """Stands for a setting of the system's."""

    TIMEOUT = "the system's timeout"


DEFAULT: Final = Default.TIMEOUT
Timeout = float | Default | None

_NO_HANDLERS = HandlerTable({}, starts=False, stops=False)
NOT_BEGUN = frozenset({Stage.WAITING, Stage.QUEUED, Stage.HELD, Stage.POSTPONED})


class Joint(abc.ABC):
    """What comes back of a message that several actors handle together: a ``runtime.Promise`` of each of them."""

    __slots__ = ()

    @abc.abstractmethod
    def join_late(self) -> bool:
        """Its deadline has passed before it was begun. True: others are at it already, and need this one."""


def joins_late(reply: Promise[Any]) -> bool:
    """True for a message that is begun although its deadline has passed; see :class:`Joint`."""
    return isinstance(reply, Joint) and reply.join_late()


class Inbox(abc.ABC):
    """The incoming side of one actor; ``desk.Desk`` handles what comes in.

    Attributes:
        core: What the actors of its system share.
        name: Its name.
        address: Its name among all systems.
        mailbox: Messages that have not begun.
        table: Its handlers.
        state: Where it is in its life.
        exit: Why it ends, or ended; None before.
        generation: Its incarnation, from 1.
        place: Its place in the group that it was spawned in; None without one.
    """

    __slots__ = ("_waiter", "address", "core", "exit", "generation", "mailbox", "name", "place", "state", "table")

    def __init__(self, core: Core, name: str, bound: int) -> None:
        self.core, self.name = core, name
        self.address = f"{core.uid}/{core.spawned}/{name}"  # the number tells it from others that had the name
        self.mailbox = Mailbox(name, bound)
        self.table = _NO_HANDLERS
        self.state = LifecycleState.STARTING
        self.exit: Exit | None = None
        self.generation: int = 1
        self.place: Place | None = None
        self._waiter: Promise[None] | None = None  # what the serving task awaits when there is nothing to do

    def ask(self, message: Message[Any], timeout: Timeout, reply: Promise[Any]) -> Envelope:
        """Accept a message; the caller awaits ``reply``.

        Raises:
            ActorDied: It has ended, or ends.
            CallCycle: It waits for the caller.
            CallTimeout: The deadline is past already.
            UnhandledMessage: It has no handler for ``message``.
        """
        envelope = self._letter(message, reply)
        if envelope.chain:
            self.check_cycle(envelope.chain)
        if self.exit is not None:
            self._record("closed", envelope)
            raise self.exit.as_error(self.name)
        try:
            envelope.deadline = self._set_deadline(envelope, timeout, envelope.deadline)
        except CallTimeout:
            self._record("expired", envelope)
            raise
        if self.mailbox.put(envelope):
            self._arrived(envelope)
        else:
            self.mailbox.wait(envelope)
        return envelope

    def ask_for(
        self, message: AnyMessage, reply: Promise[Any], deadline: float | None, *, is_stream: bool = False
    ) -> Envelope:
        """Accept a message for somebody who looks after its reply and deadline: a group, a stream.

        Raises:
            ActorDied: It has ended, or ends.
            CallCycle: It waits for the caller.
            UnhandledMessage: It has no handler for ``message``.
        """
        envelope = self._letter(message, reply, is_stream=is_stream)
        self.check_cycle(envelope.chain)
        if self.exit is not None:
            self._record("closed", envelope)
            raise self.exit.as_error(self.name)
        envelope.deadline = deadline
        if self.mailbox.put(envelope):
            self._arrived(envelope)
        else:
            self.mailbox.wait(envelope)
        return envelope

    def tell_nowait(self, message: Message[Any]) -> None:
        """Accept a message if there is room for it.

        Raises:
            MailboxFull: There is none.
            UnhandledMessage: It has no handler for ``message``.
        """
        envelope = self._letter(message, None)
        if not self._take_in(envelope):
            self._record("full", envelope)
            raise self._full()

    def post(self, message: Message[Any], *, own: bool = False) -> Envelope | None:
        """Accept a message, as soon as there is room.

        Args:
            message: What comes.
            own: It is the actor's own, whoever's turn it is now.

        Returns:
            The envelope when it has to wait.

        Raises:
            UnhandledMessage: It has no handler for ``message``.
        """
        envelope = self._letter(message, None)
        if own:
            envelope.sender = self
        if self._take_in(envelope):
            return None
        self.mailbox.wait(envelope)
        return envelope

    def tick(self, message: Message[Any], last: Envelope | None) -> Envelope:
        """Accept a message that is due again, unless ``last``, the one before, has not begun yet."""
        if last is not None and last.stage in NOT_BEGUN:
            return last
        envelope = self._letter(message, None)
        if not self._take_in(envelope):
            self.mailbox.wait(envelope)
        return envelope

    def enter(self, state: str) -> None:
        """The actor is in another of its states: what was postponed comes again."""
        for envelope in self.mailbox.enter(state):
            self._arrived(envelope)

    async def wait_for_room(self, envelope: Envelope, timeout: Timeout) -> None:
        """Wait until a message of :meth:`post` is in the mailbox, or its actor has ended.

        Raises:
            CallTimeout: There was no room in time.
            MailboxFull: There cannot be room, since the actor waits for the sender.
        """
        origin = here.get()
        if origin is not None and self.address in origin.callers:
            self.withdraw(envelope, "full")
            raise self._full()
        envelope.admitted = self.core.runtime.promise()
        try:
            self._set_deadline(envelope, timeout, None if origin is None else origin.deadline)
            await envelope.admitted
        except CallTimeout:
            self.withdraw(envelope, "expired")
            raise
        except BaseException:
            self.withdraw(envelope, "cancelled")
            raise
        finally:
            self.settled(envelope)

    def check_cycle(self, chain: tuple[str, ...]) -> None:
        """Refuse a call from an actor that this one waits for.

        Raises:
            CallCycle: It is in ``chain``.
        """
        if self.address in chain:
            first = chain.index(self.address)
            raise CallCycle([address.rpartition("/")[2] for address in (*chain[first:], self.address)])

    def settled(self, envelope: Envelope) -> None:
        """Whoever waited for ``envelope`` does so no longer."""
        if envelope.limit is not None:
            envelope.limit = None
            self.core.deadlines.forget()

    def withdraw(self, envelope: Envelope, kind: DeadLetterKind) -> bool:
        """Take a message out of the mailbox; False: it has begun, or is over."""
        if envelope.stage not in NOT_BEGUN:
            return False
        self.mailbox.discard(envelope)
        self._drop(envelope, kind)
        self.wake()  # there is room again, and what waited for it may be for now
        return True

    @property
    def is_idle(self) -> bool:
        """The serving task waits, and nothing has come since; False on any other thread or loop."""
        waiter = self._waiter
        return waiter is not None and not waiter.done() and self.exit is None and self.core.runtime.is_here

    def wake(self) -> None:
        """Let the serving task look into the mailbox."""
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    def _letter(self, message: AnyMessage, reply: Promise[Any] | None, *, is_stream: bool = False) -> Envelope:
        core = self.core
        if not core.runtime.is_here:
            core.check_loop()
        table = self.table
        handler = table.find_stream(message.__class__) if is_stream else table.find(message.__class__)
        if handler is None:
            core.dead_letters.record("undeliverable", self.name, type(message).__name__, silent=False)
            raise UnhandledMessage(self.name, _kind_of(message), self.table.names)
        if core.carry is not None:
            message = core.carry(message)
        core.sent += 1
        return seal(next(core.ids), message, handler, self, core.now(), here.get(), reply)

    def _set_deadline(self, envelope: Envelope, timeout: Timeout, inherited: float | None) -> float | None:
        """The lesser of the call's own limit and what the handler that makes it has left."""
        limit = self.core.timeout if timeout is DEFAULT else timeout
        deadline = None if limit is None else envelope.sent_at + limit
        if inherited is not None and (deadline is None or inherited < deadline):
            deadline, limit = inherited, inherited - envelope.sent_at
        if deadline is None or limit is None:
            return None
        if not limit > 0:
            raise CallTimeout(envelope.call, limit, started=False)
        envelope.limit = limit
        self.core.deadlines.add(deadline, envelope)
        return deadline

    def _take_in(self, envelope: Envelope) -> bool:
        """A tell; True when no more is to be done, for an actor that has ended as well."""
        if self.exit is not None:
            self._drop(envelope, "closed")
            return True
        if not self.mailbox.put(envelope):
            return False
        self._arrived(envelope)
        return True

    @abc.abstractmethod
    def expire(self, envelope: Envelope, limit: float) -> None:
        """The deadline of an asker, or of a teller that waits for room, has passed."""

    @abc.abstractmethod
    def _arrived(self, envelope: Envelope) -> None:
        """A message is in the mailbox."""

    def _full(self) -> MailboxFull:
        return MailboxFull(self.name, self.mailbox.statistics().bound)

    def _drop(self, envelope: Envelope, kind: DeadLetterKind) -> None:
        """A message comes to nothing."""
        self._record(kind, envelope)
        envelope.finish()

    def _record(self, kind: DeadLetterKind, envelope: Envelope) -> None:
        # What an actor sent itself is moot once it ends.
        silent = envelope.reply is None and kind == "closed" and envelope.sender is not self
        self.core.dead_letters.record(kind, self.name, envelope.handler.kind.__name__, silent=silent)


def deadline_of(core: Core, timeout: Timeout) -> float | None:
    """The lesser of a call's own limit and what the handler that makes it has left, in monotonic seconds."""
    limit, origin = core.timeout if timeout is DEFAULT else timeout, here.get()
    own = None if limit is None else core.runtime.now() + limit
    inherited = None if origin is None else origin.deadline
    return min((deadline for deadline in (own, inherited) if deadline is not None), default=None)


def _kind_of(message: object) -> str:
    """What an actor has no handler for, in words: often a class that was sent in the place of a message."""
    if isinstance(message, type):
        return f"the class {message.__name__} (a message is an instance, as in {message.__name__}(...))"
    return type(message).__name__
