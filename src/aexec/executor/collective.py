"""The book of calls: who was asked what, who has answered, who may be sent what next.

Pure but for the waiters it ends: no await, no clock, no transport. The rules:

* A call has one waiter and ends it once: with all answers in rank order, with the first
  error of any rank, or with an error of our own. Answers that come later are counted
  and dropped by the call's id; nobody else ever gets them.
* The first error is the one that is raised; those that follow from it within
  :data:`CAUSE_WINDOW` become its notes. A rank that dies in that time is the cause, and
  a ``PeerLost`` never is, if the peer's own end comes within :data:`PEER_WINDOW`, or, where
  all ranks have answered, its death within :data:`DEATH_WINDOW`.
* Steps are sent at once, in order. A plain control call is sent when no other plain
  control call is under way on its ranks, so that one whose waiter is gone can still be
  taken back from all ranks alike: a rank that ran it alone would wait in a collective
  for the others. Nothing overtakes what waits for the same ranks, so order holds between
  steps and plain control calls. An ``async def`` call waits for steps only.
* Liveness calls wait for nothing.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable
from typing import Any, Protocol

import msgspec

from aexec.errors import ActorStopped, AexecError, MailboxFull, PeerLost, note
from aexec.messages.base import Message

__all__ = ("CAUSE_WINDOW", "DEATH_WINDOW", "MAX_OPEN", "PEER_WINDOW", "Answers", "Call", "CallBook", "Lane", "Waiter")

MAX_OPEN = 4096

CAUSE_WINDOW = 0.05  # seconds in which other ranks' errors count as following from the first one
DEATH_WINDOW = 0.1  # seconds for the event of a death that a peer has noticed already
PEER_WINDOW = 0.5  # seconds for what a rank says has happened to another one to be heard from there

Answers = dict[int, Any]


class Lane(enum.Enum):
    """What may pass what."""

    STEP = "step"
    SYNC = "control"
    ASYNC = "async control"
    LIVENESS = "liveness"


_STEP, _SYNC, _ASYNC, _LIVENESS = Lane  # looked up for each call, which takes an enum's member 70 ns


class Waiter(Protocol):
    """Where a call's end goes; a ``Deferred`` is one."""

    def resolve(self, value: Any, /) -> None:
        """It ended well."""
        ...

    def fail(self, error: AexecError, /) -> None:
        """It ended."""
        ...


class Call(msgspec.Struct, eq=False):
    """One call on some ranks; a struct, as that takes half the time to make.

    Attributes:
        id: Unique in the executor's life.
        name: What is called, for people.
        lane: What it may pass.
        ranks: Whom it goes to, in order.
        message: What goes there.
        since: When it was accepted.
        timeout: Seconds it was given; None: no limit.
        waiter: None once it has had its end.
        shape: From the answers by rank to the waiter's value.
        missing: Ranks that have not answered.
        deadline: When that time is up; infinity: never.
        slow_every: Seconds after which it is reported as slow.
        slow_at: When it is reported next.
        answers: By rank.
        errors: By rank, the first one first.
        sent: False while it waits for its turn, and again if it could not be sent then.
        fails_at: When its waiter is given the first error; infinity: there is none.
        counted: Its missing ranks count as busy with it.
        delivered: True once its waiter was given its value.
        on_end: Told when all ranks have answered, whoever waits, before the waiter is, unless
            there was an error; of an early call also of each error.
        early: What the waiter is given as soon as the call is sent; None: it waits for the
            answers. The ranks of an early call answer with an error, or need not answer.
    """

    id: int
    name: str
    lane: Lane
    ranks: tuple[int, ...]
    message: Message[Any]
    waiter: Waiter | None
    shape: Callable[[Answers], Any]
    since: float
    missing: set[int]
    timeout: float | None = None
    deadline: float = math.inf
    slow_every: float = math.inf
    slow_at: float = math.inf
    on_end: Callable[[Call], None] | None = None
    early: Any = None
    answers: Answers = {}
    errors: dict[int, AexecError] = {}
    sent: bool = False
    counted: bool = False
    delivered: bool = False
    fails_at: float = math.inf

    def __repr__(self) -> str:
        return f"<Call {self.id}: {self.text}, {len(self.answers)}/{len(self.ranks)} answered>"

    @property
    def text(self) -> str:
        """As in ``echo on ranks 0, 2``."""
        return f"{self.name} on rank{'s' * (len(self.ranks) > 1)} {', '.join(map(str, self.ranks))}"

    def take_waiter(self) -> Waiter:
        """Whoever takes it has to give it its end."""
        waiter, self.waiter = self.waiter, None
        assert waiter is not None
        return waiter

    def resolve(self) -> None:
        """Give the waiter all answers, unless it has had its end."""
        waiter, self.waiter = self.waiter, None
        if waiter is not None:
            self.delivered = True
            waiter.resolve(self.shape(self.answers))

    def end(self) -> None:
        """All ranks have answered well: first the book-keeping, for the waiter may go on in this very turn."""
        waiter, self.waiter = self.waiter, None
        if waiter is not None:
            self.delivered = True
        if self.on_end is not None:
            self.on_end(self)
        if waiter is not None:
            waiter.resolve(self.shape(self.answers))

    def resolve_early(self) -> None:
        """It was sent: that is all its waiter wants to know."""
        waiter, self.waiter = self.waiter, None
        if waiter is not None:
            self.delivered = True
            waiter.resolve(self.early)

    def fail(self, error: AexecError) -> None:
        """Give the waiter an error, unless it has had its end."""
        waiter, self.waiter = self.waiter, None
        if waiter is not None:
            waiter.fail(error)

    def fail_for_cause(self, now: float) -> None:
        """Give the waiter the first error that is a cause, with what became of the other ranks."""
        if self.waiter is None:
            return
        causes = (rank for rank, error in self.errors.items() if not isinstance(error, PeerLost))
        rank = next(causes, next(iter(self.errors)))
        error = self.errors[rank]
        for line in self.others(rank, now):
            note(error, line)
        self.fail(error)

    def others(self, rank: int, now: float) -> list[str]:
        """What became of the other ranks, for the notes of an error of ``rank``: a line on each, but for its like."""
        told = self.errors.get(rank)
        alike = [it for it in self.ranks if told and it != rank and _alike(self.errors.get(it), told)]
        lines = [f"rank{'s' * (len(alike) > 1)} {', '.join(map(str, alike))}: raised the same"] * bool(alike)
        return lines + [f"rank {it}: {self._state(it, now)}" for it in self.ranks if it != rank and it not in alike]

    def raised_by(self, rank: int) -> list[str]:
        """A line on what a rank has raised, if it has."""
        return [f"rank {rank} raised before: {_briefly(self.errors[rank])}"] if rank in self.errors else []

    def _state(self, rank: int, now: float) -> str:
        if rank in self.errors:
            return f"raised as well: {_briefly(self.errors[rank])}"
        return f"no answer after {now - self.since:.3g} s" if rank in self.missing else "answered"


class CallBook:
    """The open calls of one generation.

    Attributes:
        open: By id, in order of acceptance.
        late: Answers that came after their waiter's end.
        ended: Calls that had all their answers.
    """

    def __init__(self, world_size: int) -> None:
        self.open: dict[int, Call] = {}
        self.late = 0
        self.ended = 0
        self._world_size = world_size
        self._queue: dict[int, Call] = {}
        self._busy = [0] * world_size  # plain control calls under way, by rank

    def __repr__(self) -> str:
        return f"<CallBook: {len(self.open)} open, {len(self._queue)} queued, {self.late} late answers>"

    @property
    def queued(self) -> int:
        """Calls that wait for their turn."""
        return len(self._queue)

    def accept(self, call: Call) -> list[Call]:
        """Take a call; returns what to send now.

        Raises:
            MailboxFull: :data:`MAX_OPEN` calls are open.
        """
        if len(self.open) >= MAX_OPEN and call.lane is not _LIVENESS:
            raise MailboxFull("executor", len(self.open))
        self.open[call.id] = call
        if call.lane is _STEP and not self._queue:
            call.sent = True
            return [call]
        if not self._has_to_wait(call):
            return [self._send(call)]
        self._queue[call.id] = call
        return self._sendable()

    def answer(self, call_id: int, rank: int, value: Any, now: float) -> list[Call]:
        """Note the answer of one rank; returns what to send now."""
        call = self._heard(call_id, rank)
        if call is None:
            return []
        call.answers[rank] = value
        if call.waiter is None and call.early is None:
            self.late += 1
        if not call.missing:
            if call.errors:
                self._all_heard(call, now)
            else:
                call.end()
        return self._sendable() if self._queue else []

    def error(self, call_id: int, rank: int, error: AexecError, now: float) -> list[Call]:
        """Note the error of one rank: the first one ends the call, soon; returns what to send now."""
        call = self._heard(call_id, rank)
        if call is None:
            return []
        self.late += call.waiter is None and call.early is None
        if call.lane is not _LIVENESS:  # partial by nature: the rank counts as silent
            call.errors[rank] = error
            window = PEER_WINDOW if isinstance(error, PeerLost) else CAUSE_WINDOW
            call.fails_at = min(call.fails_at, now + window)
        if not call.missing:
            call.fails_at = min(call.fails_at, now + DEATH_WINDOW)
            self._all_heard(call, now)
        return self._sendable()

    def abandon(self, call: Call) -> list[Call]:
        """The waiter is gone: a control call that was not sent never will be; returns what to send instead.

        A step stays: whoever plans the next ones counts on it.
        """
        call.fail(ActorStopped(call.text, "its caller is gone"))
        if not call.missing:
            self.forget(call)
        if call.id in self._queue and call.lane is not _STEP:
            del self._queue[call.id], self.open[call.id]
        return self._sendable()

    def forget(self, call: Call) -> None:
        """A call that had its end, though not all ranks have answered: what comes later is late."""
        self.open.pop(call.id, None)

    def due(self, now: float) -> list[Call]:
        """Calls whose deadline has passed."""
        return [call for call in self.open.values() if call.waiter is not None and call.deadline <= now]

    def failing(self, now: float) -> list[Call]:
        """Calls with an error whose window for others is over; forgotten, if all ranks have answered."""
        over = [call for call in self.open.values() if call.fails_at <= now]
        for call in over:
            if not call.missing:
                self.forget(call)
        return [call for call in over if call.waiter is not None]

    def slow(self, now: float) -> list[Call]:
        """Calls to report as slow; each is reported ever more rarely."""
        found = [call for call in self.open.values() if call.waiter is not None and call.slow_at <= now]
        for call in found:
            call.slow_every *= 2
            call.slow_at = now + call.slow_every
        return found

    def next_wake(self) -> float:
        """When :meth:`due`, :meth:`slow` or :meth:`failing` will have something; infinity: never."""
        waiting = (call for call in self.open.values() if call.waiter is not None)
        return min((min(call.deadline, call.slow_at, call.fails_at) for call in waiting), default=math.inf)

    def fail_all(self, error: Callable[[Call], AexecError]) -> None:
        """End every waiter, and forget all calls; liveness calls make do with what they have."""
        calls = list(self.open.values())
        self.open.clear()
        self._queue.clear()
        self._busy = [0] * self._world_size
        for call in calls:
            if call.lane is _LIVENESS:
                call.resolve()
            else:
                call.fail(error(call))

    def under_way(self, rank: int) -> list[Call]:
        """Calls that the rank was sent and has not answered, the oldest first."""
        return [
            call for call in self.open.values() if call.sent and rank in call.missing and call.lane is not _LIVENESS
        ]

    def _heard(self, call_id: int, rank: int) -> Call | None:
        call = self.open.get(call_id)
        if call is None or rank not in call.missing:
            self.late += 1
            return None
        call.missing.discard(rank)
        if call.counted:
            self._busy[rank] -= 1
        if not call.missing:
            del self.open[call_id]
            self.ended += 1
        return call

    def _all_heard(self, call: Call, now: float) -> None:
        if not call.errors:
            call.resolve()
        elif call.waiter is not None and all(isinstance(error, PeerLost) for error in call.errors.values()):
            self.open[call.id] = call  # until its window is over, for the death that explains it
            call.deadline = call.slow_at = math.inf
        else:
            call.fail_for_cause(now)

    def _has_to_wait(self, call: Call) -> bool:
        """True when something ahead of it may have to go first."""
        if call.lane is _LIVENESS:
            return False
        if call.lane is _ASYNC:
            return any(ahead.lane is _STEP for ahead in self._queue.values())
        return bool(self._queue) or (call.lane is _SYNC and any(self._busy[rank] for rank in call.ranks))

    def _send(self, call: Call) -> Call:
        call.sent = True
        if call.lane is _SYNC:
            call.counted = True
            for rank in call.missing:  # of a replicated executor some may have answered their own program's call
                self._busy[rank] += 1
        return call

    def _sendable(self) -> list[Call]:
        ready: list[Call] = []
        blocked: set[int] = set()  # ranks that something ahead waits for
        behind_steps: set[int] = set()
        for call in self._queue.values():
            held = behind_steps if call.lane is _ASYNC else blocked
            busy = call.lane is _SYNC and any(self._busy[rank] for rank in call.ranks)
            if not busy and held.isdisjoint(call.ranks):
                ready.append(self._send(call))
            elif call.lane is not _ASYNC:
                blocked.update(call.ranks)
                behind_steps.update(call.ranks if call.lane is _STEP else ())
            if len(blocked) == self._world_size:
                break  # an async call is in the queue because of a step ahead of it, which waits too
        for call in ready:
            del self._queue[call.id]
        return ready


def _alike(error: AexecError | None, told: AexecError) -> bool:
    return error is not None and _said(error) == _said(told)


def _said(error: AexecError) -> str:
    """What it says, whatever rank it is of."""
    return f"{type(error).__name__}: {getattr(error, 'text', error)}"


def _briefly(error: AexecError) -> str:
    return f"{type(error).__name__}: {error}".partition("\n")[0]
