"""One message to all ranks of a group, and what has come back so far.

Each rank's ask has a :class:`Part` for its reply, and all of them one :class:`Tally`,
which one task waits on. The deadline is the tally's: one budget over all ranks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Sequence
from typing import Any

from anyio import BusyResourceError

from aexec.actor.core import Core
from aexec.actor.deadlines import Timer
from aexec.actor.desk import Desk
from aexec.actor.envelope import Envelope
from aexec.actor.inbox import NOT_BEGUN, Joint, Timeout, deadline_of
from aexec.actor.logs import logger
from aexec.actor.runtime import Promise
from aexec.errors import ActorDied, ActorError, CallTimeout, note
from aexec.messages.base import AnyMessage

__all__ = ("Part", "Tally")


class Part(Joint):
    """The reply of one rank; a ``runtime.Promise``.

    Attributes:
        rank: The rank.
        cell: Its actor.
        envelope: Its message; None when it was refused.
        value: The reply.
        error: What was raised instead.
        is_left: Nobody waits for it any longer, and it is let run all the same.
    """

    __slots__ = ("_cancelled", "_done", "_tally", "cell", "envelope", "error", "is_left", "rank", "value")

    def __init__(self, tally: Tally, rank: int, cell: Desk) -> None:
        self._tally, self.rank, self.cell = tally, rank, cell
        self.envelope: Envelope | None = None
        self.value: Any = None
        self.error: BaseException | None = None
        self.is_left = self._done = self._cancelled = False

    @property
    def has_begun(self) -> bool:
        """True once its handler has, unless its actor died with it."""
        if self._done:
            is_answer = not self._cancelled and not isinstance(self.error, (ActorDied, CallTimeout))
            return self.envelope is not None and is_answer
        return self.envelope is not None and self.envelope.stage not in NOT_BEGUN

    @property
    def state(self) -> str:
        """Where it stands, in words."""
        if self._cancelled:
            return "has not begun"
        if self._done:
            return "has answered" if self.error is None else f"raised {self.error!r}"
        return "was refused" if self.envelope is None else self.envelope.stage.value

    def __await__(self) -> Generator[Any, Any, Any]:
        raise NotImplementedError("a part is awaited with all the others of its tally")

    def done(self) -> bool:
        """True once it has a value or an error, or nobody waits for it."""
        return self._done

    def cancelled(self) -> bool:
        """True when nobody waits for it."""
        return self._cancelled

    def cancel(self) -> bool:
        """Nobody waits for it any longer."""
        self._cancelled = not self._done
        self._done = True
        return self._cancelled

    def set_result(self, result: Any, /) -> None:
        """Its handler has returned."""
        self.value = result
        self._settle()

    def set_exception(self, exception: BaseException, /) -> None:
        """Its handler has raised, or its actor has ended; or it comes too late, and so does the call."""
        if self.envelope is not None and self.envelope.stage in NOT_BEGUN and isinstance(exception, CallTimeout):
            self.cancel()
            self._tally.came_too_late()
            return
        self.error = exception
        self._settle()

    def exception(self) -> BaseException | None:
        """What was raised."""
        return self.error

    def join_late(self) -> bool:
        """True: it is a shielded handler, and a rank that has begun it would be alone in a collective."""
        envelope = self.envelope
        if envelope is None or not envelope.handler.shield or not self._tally.has_begun:
            return False
        envelope.deadline = None
        return True

    def _settle(self) -> None:
        self._done = True
        self._tally.settled(self)
        if not self.is_left:
            return
        self.cell.core.late_replies += 1
        if self.error is not None and not isinstance(self.error, ActorError):
            logger(actor=self.cell.name).warning("failed after its group's answer", exc_info=self.error)


class Tally:
    """All parts of one message to a group; sends it.

    Args:
        name: The group's name, for errors.
        cells: Its actors, in rank order.
        message: The one message object.
        timeout: Seconds for all ranks together.

    Attributes:
        parts: In rank order.

    Raises:
        CallTimeout: The deadline of the handler that asks is past.
        WrongLoop: The group lives on another loop.
    """

    def __init__(self, name: str, cells: Sequence[Desk], message: AnyMessage, timeout: Timeout) -> None:
        self._core: Core = cells[0].core
        self._core.check_loop()
        self.call = f"{type(message).__name__} to {name}"
        self._sent_at = self._core.runtime.now()
        self._deadline = deadline_of(self._core, timeout)
        if self._deadline is not None and self._deadline <= self._sent_at:
            raise CallTimeout(self.call, self._deadline - self._sent_at, started=False)
        self._arrived: deque[Part] = deque()
        self._waiter: Promise[None] | None = None
        self.parts = [Part(self, rank, cell) for rank, cell in enumerate(cells)]
        self._num_taken = self._num_settled = 0
        self._is_left = self._is_ended = False
        self._timer: Timer | None = None
        for part in self.parts:
            self._send(part, message)
        if self._deadline is not None:
            self._timer = self._core.deadlines.call_at(self._deadline, self._expire)

    def __repr__(self) -> str:
        return f"<Tally {self.call}: {self._num_settled}/{len(self.parts)} have come>"

    @property
    def has_begun(self) -> bool:
        """True once the handler of any rank has."""
        return any(part.has_begun for part in self.parts)

    @property
    def is_over(self) -> bool:
        """True when no part is still to be taken."""
        return self._num_taken == len(self.parts)

    async def next(self) -> Part:
        """The part that has come first of those not taken, of lower rank first in one turn.

        Raises:
            BusyResourceError: Another task is waiting here.
            CallTimeout: There was none in time; names what each rank does.
            RuntimeError: Those that have not come were given up.
        """
        while not self._arrived:
            if self._deadline is not None and self._core.runtime.now() >= self._deadline:
                raise self._timeout(self._deadline)
            if self._is_ended:
                raise RuntimeError(f"the replies to {self.call} that had not come were given up: nobody waits for them")
            if self._waiter is not None and not self._waiter.done():
                raise BusyResourceError(f"waiting for the replies to {self.call} from")
            self._waiter = waiter = self._core.runtime.promise()
            try:
                await waiter
            finally:
                if self._waiter is waiter:
                    self._waiter = None
        self._num_taken += 1
        return self._arrived.popleft()

    async def next_reply(self) -> Part:
        """The next part, which is a reply.

        Raises:
            CallTimeout: There was none in time.
            Exception: It was an error instead; has a note of what the other ranks do.
        """
        part = await self.next()
        if part.error is not None:
            others = [f"rank {other.rank} {other.state}" for other in self.parts if other is not part]
            raise note(part.error, "; ".join([f"raised for rank {part.rank} of {self.call}", *others]))
        return part

    def settled(self, part: Part) -> None:
        """A part has come."""
        self._num_settled += 1
        self._arrived.append(part)
        self._wake()
        if self._num_settled == len(self.parts) and self._timer is not None:
            self._timer.cancel()

    def came_too_late(self) -> None:
        """A rank whose loop stood still has found the deadline past: those that have not begun either never will."""
        for part in self.parts:
            if part.envelope is not None and not part.done() and not part.has_begun:
                part.cell.abandon(part.envelope, part)
        self._wake()

    def end(self) -> None:
        """Nobody waits any longer: give up what has not come yet.

        A message that no rank has begun is taken back from all. Once one has, a shielded
        handler is begun and finished by all others too, as with a collective, which one
        rank cannot leave without hanging the rest; else each rank is given up on its own,
        as a single ask is.
        """
        self._is_ended = True
        self._wake()  # whoever still waits, as another task may
        if self._timer is not None:
            self._timer.cancel()
        has_begun = self.has_begun
        for part in self.parts:
            envelope = part.envelope
            if part.done() or envelope is None:
                continue
            if has_begun and envelope.handler.shield:
                part.is_left, envelope.deadline = True, None
            else:
                part.cell.abandon(envelope, part)

    def leave(self) -> None:
        """Nobody waits any longer: let all that has not come yet go on, until the deadline."""
        self._is_left = True
        for part in self.parts:
            part.is_left = True

    def _send(self, part: Part, message: AnyMessage) -> None:
        try:
            part.envelope = part.cell.ask_for(message, part, self._deadline)
        except ActorError as error:
            part.set_exception(error)

    def _timeout(self, deadline: float) -> CallTimeout:
        states = "; ".join(f"rank {part.rank} {part.state}" for part in self.parts)
        error: CallTimeout = note(CallTimeout(self.call, deadline - self._sent_at, self.has_begun), states)
        return error

    def _expire(self) -> None:
        if self._is_left:
            self.end()
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
