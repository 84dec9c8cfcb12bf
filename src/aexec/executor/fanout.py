"""Sends calls to the ranks of one generation, and sees to it that each of them ends.

The book of calls decides; this is the part that acts: it sends, keeps the one timer,
asks silent ranks what they are doing, and words the errors.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping
from typing import Any

import anyio

from aexec.actor import Context
from aexec.errors import ActorDied, AexecError, CallTimeout, note
from aexec.executor.calls import Wake
from aexec.executor.collective import Answers, Call, CallBook, Lane, Waiter
from aexec.executor.copies import own_copy
from aexec.executor.group import WorkerGroup
from aexec.messages.base import Message
from aexec.messages.control import Dump, Ping, Pong, Revoke
from aexec.messages.lifecycle import SlowCall
from aexec.worker.remote import caller_error

__all__ = ("STACK_GRACE", "Fanout", "Pending")

STACK_GRACE = 0.2  # seconds that a call past its deadline waits for the stacks of its ranks


class Pending:
    """A waiter for calls of the executor itself."""

    def __init__(self) -> None:
        self._done = anyio.Event()
        self._value: Any = None
        self._error: AexecError | None = None

    def resolve(self, value: Any, /) -> None:
        """It ended well."""
        self._value = value
        self._done.set()

    def fail(self, error: AexecError, /) -> None:
        """It ended."""
        self._error = error
        self._done.set()

    async def result(self) -> Any:
        """Wait for the end."""
        await self._done.wait()
        if self._error is not None:
            raise self._error
        return self._value


class Fanout:
    """The calls of one generation.

    Args:
        group: The workers.
        actor: The executor's context: its tasks and timers.
        ids: Call ids, unique over all generations.
        slow_every: Seconds after which a call is reported as slow.
        emit: Told of slow calls.
        timed_out: Told of calls past their limit that had started.
        look: What the system says of a rank: running, stopped or dead; empty: nothing.
    """

    def __init__(
        self,
        group: WorkerGroup,
        actor: Context,
        *,
        ids: itertools.count[int],
        world_size: int,
        slow_every: float,
        emit: Callable[[SlowCall], None],
        timed_out: Callable[[CallTimeout], None],
        look: Callable[[int], str],
    ) -> None:
        self.book = CallBook(world_size)
        self.group = group
        self.timeouts = self.errors = 0
        self._actor, self._ids, self._slow_every, self._emit = actor, ids, slow_every, emit
        self._everyone = tuple(range(world_size))
        self._accepted = group.accepted if group.is_replicated else None
        self._armed = math.inf
        self._timed_out, self._look = timed_out, look
        self._quiet: anyio.Event | None = None
        self._is_over = False

    def __repr__(self) -> str:
        return f"<Fanout: {self.book!r}, {self.timeouts} timed out>"

    def new_id(self) -> int:
        """Id of a call that is about to be submitted."""
        return next(self._ids)

    def submit(
        self,
        name: str,
        message: Message[Any],
        waiter: Waiter,
        *,
        lane: Lane,
        ranks: tuple[int, ...] | None = None,
        timeout: float | None = None,
        slow: bool = True,
        shape: Callable[[Answers], Any],
        on_end: Callable[[Call], None] | None = None,
        early: Any = None,
        call_id: int | None = None,
    ) -> Call:
        """Take a call, unless too many are open (``MailboxFull``); its waiter gets its end.

        Args:
            name: What is called, for people.
            message: What goes to the ranks.
            waiter: Where the end goes.
            lane: What the call may pass.
            ranks: Whom it goes to; None: all.
            timeout: Seconds; None: no limit.
            slow: Report it when it is slow.
            shape: From the answers by rank to the waiter's value.
            on_end: Told when all ranks have answered, whoever waits; see ``Call``.
            early: What the waiter is given as soon as the call is sent; None: it waits for the answers.
            call_id: From :meth:`new_id`, if the message had to know it.
        """
        now = time.monotonic()
        number = next(self._ids) if call_id is None else call_id
        where = self._everyone if ranks is None else ranks
        every = self._slow_every if slow else math.inf
        until = math.inf if timeout is None else now + timeout
        call = Call(
            number, name, lane, where, message, waiter, shape, now, set(where), timeout, until, every,
            now + every, on_end, early,
        )  # fmt: skip
        if self._is_over and lane is Lane.LIVENESS:  # the timer that would end it may be the next group's by now
            call.resolve()
            return call
        to_send = self.book.accept(call)
        if self._accepted is not None and lane is not Lane.LIVENESS:
            self._accepted(number, message, where)
        for ready in to_send:
            self._send(ready)
        if until < self._armed or call.slow_at < self._armed:
            self._arm(min(until, call.slow_at))
        return call

    async def ask(
        self,
        name: str,
        message: Callable[[int], Message[Any]],
        *,
        lane: Lane,
        ranks: Iterable[int] | None = None,
        timeout: float | None = None,
    ) -> Answers:
        """A call of the executor itself: the answers by rank.

        On the liveness lane ranks may be missing from them once the time is up.
        """
        pending = Pending()
        where = self._everyone if ranks is None else tuple(ranks)
        number = self.new_id()
        call = self.submit(
            name, message(number), pending, lane=lane, ranks=where, timeout=timeout, slow=False, shape=dict,
            call_id=number,
        )  # fmt: skip
        try:
            answers: Answers = await pending.result()
        finally:
            if call.waiter is not None:
                self.abandon(call)
        return answers

    def replied(self, call_id: int, rank: int, value: Any) -> None:
        """A rank has answered."""
        call = self.book.open.get(call_id)
        for ready in self.book.answer(call_id, rank, value, time.monotonic()):
            self._send(ready)
        if call is not None and call.errors and not call.missing:
            self._ended(call)
        elif self._quiet is not None:
            self._check_quiet()

    def failed(self, call_id: int, rank: int, error: BaseException) -> None:
        """A rank has answered with an error."""
        call = self.book.open.get(call_id)
        self._failed(
            call_id, rank, caller_error(error, rank=rank, method=call.name if call else "a call that has ended")
        )

    def _failed(self, call_id: int, rank: int, error: AexecError) -> None:
        self.errors += 1
        call = self.book.open.get(call_id)
        for ready in self.book.error(call_id, rank, error, time.monotonic()):
            self._send(ready)
        if call is None:
            return
        if call.waiter is not None:
            self._arm(call.fails_at)
        if not call.missing or call.early is not None:
            self._ended(call)

    def abandon(self, call: Call) -> None:
        """Its waiter is gone: take it back where that does no harm."""
        if call.waiter is None:
            return
        self._withdraw(call)
        self._check_quiet()
        if call.sent and _revocable(call):
            self._tell(Revoke(call.id), call)

    def fail_all(self, error: Callable[[Call], AexecError]) -> None:
        """End every call, and ask the ranks nothing more: they are gone, or will be."""
        self._is_over = True
        self.book.fail_all(error)
        self._check_quiet()

    async def until_quiet(self) -> None:
        """Wait until nobody waits for any call."""
        self._quiet = anyio.Event()
        self._check_quiet()
        await self._quiet.wait()
        self._quiet = None

    def wake(self) -> None:
        """The timer: end what is due, report what is slow."""
        self._armed = math.inf
        now = time.monotonic()
        for call in self.book.failing(now):
            call.fail_for_cause(now)
        for call in self.book.slow(now):
            self._start(self._report_slow(call))
        for call in self.book.due(now):
            self._expire(call)
        self._check_quiet()
        self._arm(self.book.next_wake())

    def _ended(self, call: Call) -> None:
        if call.on_end is not None:
            call.on_end(call)
        if self._quiet is not None:
            self._check_quiet()

    def _check_quiet(self) -> None:
        calls = self.book.open.values()
        if self._quiet is not None and not any(call.waiter and call.lane is not Lane.LIVENESS for call in calls):
            self._quiet.set()

    def _send(self, call: Call) -> None:
        try:
            self.group.send(call.id, call.message, call.ranks)
        except ActorDied:
            return  # the executor is ending, and ends its calls by itself
        except AexecError as error:  # it cannot travel
            call.sent = False
            for rank in call.ranks:  # a turn later: whoever sends it is in the middle of it
                self._actor.system.call_soon_threadsafe(self._failed, call.id, rank, own_copy(error))
        else:
            if call.early is not None:
                call.resolve_early()

    def _start(self, coroutine: Coroutine[Any, Any, None]) -> None:
        with contextlib.suppress(ActorDied):  # as above
            self._actor.start_task(coroutine)

    def _tell(self, message: Message[Any], call: Call) -> None:
        self.submit(
            "tell",
            message,
            Pending(),
            lane=Lane.LIVENESS,
            ranks=call.ranks,
            timeout=STACK_GRACE,
            slow=False,
            shape=dict,
        )

    def _arm(self, when: float) -> None:
        if when < self._armed:
            self._armed = when
            self._actor.after(max(when - time.monotonic(), 0.0), Wake())

    def _expire(self, call: Call) -> None:
        if call.lane is Lane.LIVENESS:
            call.resolve()
            self.book.forget(call)
            return
        waiter = call.take_waiter()  # whatever is answered from now on is late
        self.timeouts += 1
        if call.sent or call.lane is Lane.STEP:
            self._start(self._give_up(call, waiter))
        else:
            waiter.fail(_too_late(call, started=False, notes=self._ahead(call)))
            self._withdraw(call)

    def _withdraw(self, call: Call) -> None:
        """Its waiter is gone: what has not been sent never is, and makes room for others."""
        to_send = self.book.abandon(call)
        if self._accepted is not None and not call.sent and call.id not in self.book.open:
            self.group.withdrawn(call.id)
        for ready in to_send:
            self._send(ready)

    async def _give_up(self, call: Call, waiter: Waiter) -> None:
        """Find out what the ranks are doing, take the call back if that does no harm, and end it."""
        missing = sorted(call.missing)
        dump = self._ask_soon("dump", lambda _: Dump(), missing)
        if _revocable(call):
            stacks, revoked = await asyncio.gather(dump, self._ask_soon("revoke", lambda _: Revoke(call.id), missing))
            started = bool(call.answers) or not all(revoked.get(rank) for rank in missing)
        else:
            stacks, started = await dump, True
        notes = [f"rank {rank}: answered" for rank in sorted(call.answers)]
        notes += [f"rank {rank}: {stacks.get(rank, 'gives no answer').rstrip()}" for rank in missing]
        error = _too_late(call, started=started, notes=notes)
        waiter.fail(error)
        if started:
            self._timed_out(error)

    async def _ask_soon(self, name: str, message: Callable[[int], Message[Any]], ranks: list[int]) -> Answers:
        return await self.ask(name, message, lane=Lane.LIVENESS, ranks=ranks, timeout=STACK_GRACE)

    def _ahead(self, call: Call) -> list[str]:
        now = time.monotonic()
        running = ((rank, busy) for rank in call.ranks for busy in self.book.under_way(rank))
        return [f"rank {rank} has been in {busy.name} for {now - busy.since:.3g} s" for rank, busy in running]

    async def _report_slow(self, call: Call) -> None:
        pongs: dict[int, Pong] = await self.ask(
            "ping", lambda _: Ping(), lane=Lane.LIVENESS, ranks=sorted(call.missing), timeout=1.0
        )
        if call.waiter is None:
            return
        event = SlowCall(
            method=call.name,
            age=time.monotonic() - call.since,
            missing={rank: pongs[rank].phase if rank in pongs else "gives no answer" for rank in sorted(call.missing)},
            call=call.id,
            answered=sorted(call.answers),
            states={rank: self._state(rank, pongs) for rank in sorted(call.missing)},
        )
        self._actor.log.warning(
            "slow call",
            method=event.method,
            call=event.call,
            seconds=round(event.age, 3),
            missing=event.missing,
            states=event.states,
            answered=event.answered,
        )
        self._emit(event)

    def _state(self, rank: int, pongs: Mapping[int, Pong]) -> str:
        return self._look(rank) or ("running" if rank in pongs else "silent")


def _too_late(call: Call, *, started: bool, notes: Iterable[str]) -> CallTimeout:
    error = CallTimeout(call.text, call.timeout or 0.0, started=started)
    for line in notes:
        note(error, line)
    return error


def _revocable(call: Call) -> bool:
    """True where taking a call back cannot leave ranks that ran it waiting for ranks that will not."""
    return call.lane is Lane.ASYNC or (call.lane is Lane.SYNC and len(call.ranks) == 1)
