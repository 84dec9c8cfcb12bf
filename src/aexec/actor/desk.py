"""Where an actor's messages are handled, and answered or given up.

One task serves the mailbox. A plain handler runs inline in it; an ``async def`` is
awaited in it, so that messages are handled one at a time across their awaits. Two things
get tasks of their own: messages of ``concurrent=`` handlers and streams, and the urgent lane for as
long as the serving task is inside of an ``async def``.

Who waits for an answer is told at once when there will be none. A message that nobody
waits for any longer is in one of three places, and is given up there: in the mailbox it
is taken out, a running handler is cut short, a deferred reply is called off.
"""

from __future__ import annotations

import abc
import contextlib
from collections.abc import Callable, Coroutine
from typing import Any, Final

from aexec.actor.core import Core
from aexec.actor.deferred import Deferred
from aexec.actor.envelope import Envelope, Stage, here
from aexec.actor.inbox import NOT_BEGUN, Inbox, joins_late
from aexec.actor.logs import logger
from aexec.actor.runtime import Interrupted, Promise, Section, start_in
from aexec.errors import ActorError, CallTimeout, MessageNotPortable, note

__all__ = ("Desk",)

_RUNNING: Final = Stage.RUNNING  # looked up for each message, which takes an enum's member 70 ns


class Desk(Inbox):
    """The messages of one actor; ``cell.Cell`` adds its life.

    Attributes:
        actor: The actor; None before it is constructed and after its end.
        sides: Tasks that handle messages beside the serving task, by their sections.
        handled: Messages whose handler returned.
        failed: Messages whose handler raised.
        cancelled: Handlers that were cut short.
        busy_seconds: Seconds spent in handlers, their awaits included.
        in_hand: ``async def`` handlers that have begun and not ended.
        owed: Messages whose reply was deferred.
    """

    __slots__ = (
        "_awaiting",
        "_express",
        "_express_awaiting",
        "_section",
        "actor",
        "busy_seconds",
        "cancelled",
        "failed",
        "handled",
        "in_hand",
        "owed",
        "sides",
    )

    def __init__(self, core: Core, name: str, bound: int) -> None:
        super().__init__(core, name, bound)
        self.actor: Any = None
        self.sides: dict[Section, object] = {}
        self.handled = self.failed = self.cancelled = self.in_hand = 0
        self.busy_seconds = 0.0
        self.owed: set[Envelope] | None = None
        self._section: Section | None = None
        self._awaiting = self._express = self._express_awaiting = False

    # ------------------------------------------------------------ handled

    async def serve(self) -> None:
        """Handle messages until a signal comes."""
        core, mailbox = self.core, self.mailbox
        runtime, clock, time_slice = core.runtime, core.now, core.time_slice
        now = slice_start = clock()
        while not mailbox.signals:
            envelope = mailbox.pop(normal_only=self._express_awaiting)
            if envelope is None:
                self._waiter = waiter = runtime.promise()
                await waiter
                now = slice_start = clock()
                continue
            handler = envelope.handler
            if handler.aside:
                self._start_concurrent(envelope)
            elif self._may_begin(envelope, now):
                if handler.is_async:
                    self._awaiting = True
                    await self._await(envelope, self.section(), handler.function)
                    self._awaiting = False
                    now = clock()
                else:
                    began, now = now, self._call(envelope)
                    self.busy_seconds += now - began
            del envelope  # an idle actor holds on to no message
            if now - slice_start > time_slice:
                await runtime.checkpoint()
                now = slice_start = clock()

    def section(self) -> Section:
        """The section of the serving task."""
        if self._section is None:
            self._section = self.core.runtime.section()
        return self._section

    def _may_begin(self, envelope: Envelope, now: float) -> bool:
        """False: its asker has gone, or its deadline is past, and it is never started."""
        reply = envelope.reply
        if reply is None:
            envelope.stage = _RUNNING
            return True
        if reply.done():
            self._drop(envelope, "cancelled")
            return False
        if envelope.deadline is not None and envelope.deadline <= now and not joins_late(reply):
            reply.set_exception(CallTimeout(envelope.call, envelope.deadline - envelope.sent_at, started=False))
            self._drop(envelope, "expired")
            return False
        envelope.stage = _RUNNING
        return True

    def _call(self, envelope: Envelope) -> float:
        """Run a plain handler; returns when it ended."""
        here.set(envelope)
        try:
            value = envelope.handler.function(self.actor, envelope.message)
        except Exception as error:  # noqa: BLE001 - it belongs to the asker, or to the supervisor
            self._raised(envelope, error)
        except BaseException as error:
            self._broken(envelope, error)
            raise
        else:
            self._returned(envelope, value)
        return self.core.now()

    async def _run_in_turn(self, actor: Any, message: Any) -> Any:
        """Run a handler after those whose tasks were started before, and have not come to it yet."""
        await self.core.runtime.checkpoint()
        envelope = here.get()
        assert isinstance(envelope, Envelope)
        return await envelope.handler.function(actor, message)

    async def _await(self, envelope: Envelope, section: Section, function: Callable[[Any, Any], Any]) -> None:
        here.set(envelope)
        envelope.section = section
        self.in_hand += 1
        began = self.core.now()
        try:
            value = await section.run(function(self.actor, envelope.message))
        except Interrupted:
            self._interrupted(envelope)
        except Exception as error:  # noqa: BLE001 - it belongs to the asker, or to the supervisor
            self._raised(envelope, error)
        except BaseException as error:
            self._broken(envelope, error)
            raise
        else:
            self._returned(envelope, value)
        finally:
            envelope.section = None
            self.in_hand -= 1
            self.busy_seconds += self.core.now() - began

    def _start_concurrent(self, first: Envelope) -> None:
        """Handle a ``concurrent=`` message that has taken a slot, and those held back behind it."""
        envelope: Envelope | None = first
        while envelope is not None:
            if self._may_begin(envelope, self.core.now()):
                envelope.section = section = self.core.runtime.section()
                if self._start_side(envelope, self._handle_aside(envelope, section), section, first.handler.name):
                    return
            envelope = self.mailbox.release(first.handler)

    def _arrived(self, envelope: Envelope) -> None:
        if self._waiter is not None:
            self.wake()
        elif self._awaiting and not self._express and envelope.handler.lane == "urgent":
            self._express = True
            section = self.core.runtime.section()
            if not self._start_side(envelope, self._handle_urgent(section), section, "urgent"):
                self._express = False

    async def _handle_aside(self, envelope: Envelope | None, section: Section) -> None:
        """A ``concurrent=`` message, and then those that were held back for its slot."""
        while envelope is not None:
            handler = envelope.handler
            if envelope.stage is Stage.RUNNING:
                await self._await(envelope, section, handler.function)
            elif self._may_begin(envelope, self.core.now()):
                await self._await(envelope, section, self._run_in_turn)
            envelope = self.mailbox.release(handler)
            self.wake()  # there is room again, and what waited for it may be for now

    async def _handle_urgent(self, section: Section) -> None:
        """The urgent lane, while the serving task awaits a handler."""
        try:
            while not self.mailbox.signals and (envelope := self.mailbox.pop_urgent()) is not None:
                if envelope.handler.aside:
                    self._start_concurrent(envelope)
                elif self._may_begin(envelope, self.core.now()):
                    if envelope.handler.is_async:
                        self._express_awaiting = True
                        await self._await(envelope, section, envelope.handler.function)
                        self._express_awaiting = False
                    else:
                        self._call(envelope)
        finally:
            self._express = self._express_awaiting = False

    def _start_side(self, cause: Envelope, job: Coroutine[Any, Any, None], section: Section, what: str) -> bool:
        """Run something beside the serving task; the actor ends after it. False: ``cause`` has failed for it."""
        try:
            start_in(self.sides, self.core.runtime, self._run_side, job, section, f"{self.name}/{what}")
        except Exception as error:  # noqa: BLE001 - the loop makes no task: as if the handler had raised it
            if cause.stage in NOT_BEGUN:
                self.mailbox.discard(cause)
            self._raised(cause, error)
            return False
        return True

    async def _run_side(self, coroutine: Coroutine[Any, Any, None], section: Section) -> None:
        try:
            await coroutine
        except BaseException as error:
            self.broke(error)
            raise
        finally:
            del self.sides[section]
            self.side_ended()

    # ------------------------------------------------------------ answered

    def resolve(self, envelope: Envelope, value: Any) -> None:
        """Reply to an ask."""
        reply = envelope.reply
        if reply is not None:
            if reply.done():
                self.core.late_replies += 1
            elif self.core.carry is None:
                reply.set_result(value)
            else:
                self._resolve_copy(reply, value)
        if self.owed is not None:
            self.owed.discard(envelope)
        envelope.finish()

    def _resolve_copy(self, reply: Promise[Any], value: Any) -> None:
        assert self.core.carry is not None
        try:
            copy = self.core.carry(value)
        except MessageNotPortable as error:
            reply.set_exception(note(error, f"replied by actor {self.name}"))
        else:
            reply.set_result(copy)

    def reject(self, envelope: Envelope, error: BaseException) -> None:
        """Raise an error at an asker."""
        reply = envelope.reply
        if reply is not None:
            if reply.done():
                self.core.late_replies += 1
            else:
                reply.set_exception(self._presentable(envelope, error))
        self._finish(envelope)

    def _returned(self, envelope: Envelope, value: Any) -> None:
        self.handled += 1
        if not isinstance(value, Deferred):
            self.resolve(envelope, value)
        elif not value.is_for(envelope):
            self.reject(envelope, ActorError(f"{self.name} returned the deferred reply to another message: {value!r}"))
        elif envelope.stage is not Stage.OVER:
            envelope.stage = Stage.DEFERRED
            if self.owed is None:
                self.owed = set()
            self.owed.add(envelope)

    def _raised(self, envelope: Envelope, error: Exception) -> None:
        self.failed += 1
        if self.is_fatal(envelope, error):
            self.on_fatal(error)
        elif envelope.reply is None:
            self.on_tell_failure(envelope, error)
        self.reject(envelope, error)

    def is_fatal(self, envelope: Envelope, error: BaseException) -> bool:
        """True when the actor has to end after such an error."""
        return isinstance(error, (envelope.handler.fatal, getattr(self.actor, "fatal", ())))

    def _interrupted(self, envelope: Envelope) -> None:
        """It was cut short, as its asker has gone or the actor had to end."""
        self.cancelled += 1
        if envelope.reply is not None and not envelope.reply.done():
            envelope.reply.set_exception(self.why_cut_short(envelope))
        self._finish(envelope)

    def _broken(self, envelope: Envelope, error: BaseException) -> None:
        """It raised what nobody may swallow: the actor ends, and the error goes on."""
        if isinstance(error, GeneratorExit):
            return  # the loop is gone
        self.broke(error)
        self._interrupted(envelope)

    def _finish(self, envelope: Envelope) -> None:
        if self.owed is not None:
            self.owed.discard(envelope)
        envelope.finish()

    def _presentable(self, envelope: Envelope, error: BaseException) -> BaseException:
        """The error as an asker gets it: itself, unless a future would take it for something else."""
        if isinstance(error, StopIteration) or not isinstance(error, Exception):
            presentable = ActorError(f"{envelope.call} ended with {error!r}")
            presentable.__cause__ = error
            return presentable
        if not isinstance(error, getattr(self.actor, "self_explanatory", ())):
            note(error, f"raised by actor {self.name} while it handled {envelope.handler.kind.__name__}")
        return error

    # ------------------------------------------------------------ given up

    def expire(self, envelope: Envelope, limit: float) -> None:
        """The deadline of an asker, or of a teller that waits for room, has passed."""
        promise = envelope.reply or envelope.admitted
        assert promise is not None
        call = envelope.call
        started = not self.withdraw(envelope, "expired")
        promise.set_exception(CallTimeout(call, limit, started))
        if started:
            self.give_up(envelope)

    def abandon(self, envelope: Envelope, reply: Promise[Any]) -> None:
        """An ask ends with an exception: that of its reply, or since its asker was cancelled."""
        if reply.done() and not reply.cancelled():
            reply.exception()  # seen, even if the asker was cancelled in the very turn that brought it
            return
        reply.cancel()
        if not self.withdraw(envelope, "cancelled"):
            self.give_up(envelope)

    def reject_late(self, envelope: Envelope, error: BaseException) -> None:
        """Raise an error at the asker of a message whose reply was deferred."""
        fatal = envelope.stage is Stage.DEFERRED and self.is_fatal(envelope, error)
        self.reject(envelope, error)
        if fatal:
            self.failed += 1
            self.on_fatal(error)

    def reply_dropped(self, envelope: Envelope) -> None:
        """Its deferred reply was garbage-collected; called from any thread."""
        with contextlib.suppress(RuntimeError):  # the loop is closed, and nobody waits
            self.core.runtime.call_soon_threadsafe(self._reply_dropped, envelope)

    def _reply_dropped(self, envelope: Envelope) -> None:
        if envelope.stage is Stage.DEFERRED and envelope.reply is not None and not envelope.reply.done():
            self._record("no_reply", envelope)
            self.reject(
                envelope, ActorError(f"{self.name} dropped its deferred reply to {envelope.handler.kind.__name__}")
            )

    def give_up(self, envelope: Envelope) -> None:
        """Tell the handler that nobody waits any longer."""
        callbacks, envelope.on_gone = envelope.on_gone or (), None
        for callback in callbacks:
            self.call_guarded(callback)
        if envelope.section is not None and not envelope.handler.shield:
            envelope.section.interrupt()

    def call_guarded(self, callback: Callable[[], object]) -> None:
        """Call something of the user's; what it raises is logged."""
        try:
            callback()
        except Exception:  # noqa: BLE001 - one callback's fault is not its caller's
            logger(actor=self.name).exception("callback failed", callback=repr(callback))

    # ------------------------------------------------------------ seams for the life

    @abc.abstractmethod
    def on_tell_failure(self, envelope: Envelope, error: Exception) -> None:
        """A tell failed, and there is nobody to be told."""

    @abc.abstractmethod
    def on_fatal(self, error: BaseException) -> None:
        """A handler raised what ends the actor."""

    @abc.abstractmethod
    def why_cut_short(self, envelope: Envelope) -> ActorError:
        """What is raised at the asker of a message that was cut short on the actor's account."""

    @abc.abstractmethod
    def broke(self, error: BaseException) -> None:
        """The actor cannot go on."""

    @abc.abstractmethod
    def side_ended(self) -> None:
        """A side task has ended."""
