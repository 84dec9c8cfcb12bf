"""Actors of one kind, addressed together by rank: what an executor does with its workers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from types import TracebackType
from typing import Any, Generic, Self, TypeVar, final

from anyio import BusyResourceError

from aexec.actor.cell import Cell
from aexec.actor.envelope import Stage, here
from aexec.actor.inbox import DEFAULT, Timeout, deadline_of
from aexec.actor.lifecycle import Exit
from aexec.actor.ref import Ref
from aexec.actor.tally import Tally
from aexec.errors import ConfigError
from aexec.messages.base import Message

__all__ = ("AsDone", "RefGroup")

A = TypeVar("A")
A_co = TypeVar("A_co", covariant=True)
R = TypeVar("R")


@final
class RefGroup(Generic[A_co]):
    """The addresses of some actors in rank order; ``spawner.spawn_group`` or :meth:`of` makes one.

    All ranks get the one message object. A call's timeout is one budget over all ranks,
    waiting for room in their mailboxes included. A call that ends early (with an error,
    by its deadline, as its caller is cancelled) is taken back from all ranks when none
    has begun. Once one has, ranks with a ``shield=True`` handler begin and finish it
    nevertheless, as with a collective that hangs when one rank does not take part; others
    are given up one by one, as a single ask is.
    """

    __slots__ = ("_refs", "name")

    def __init__(self, refs: Iterable[Ref[A_co]], name: str) -> None:
        self._refs, self.name = tuple(refs), name
        if not self._refs:
            raise ConfigError(f"the group {name} has no member: a group has at least one")

    @classmethod
    def of(cls, refs: Iterable[Ref[A]], *, name: str = "group") -> RefGroup[A]:
        """A group of actors that are there already.

        Args:
            refs: Their refs; the position is the rank.
            name: Names the group in errors.

        Raises:
            ConfigError: There are none.
        """
        return RefGroup(refs, name)

    def __repr__(self) -> str:
        alive = sum(ref.is_alive for ref in self._refs)
        return f"<RefGroup {self.name}: {len(self)} ranks, {alive} alive>"

    def __len__(self) -> int:
        return len(self._refs)

    def __iter__(self) -> Iterator[Ref[A_co]]:
        return iter(self._refs)

    def __getitem__(self, rank: int) -> Ref[A_co]:
        return self._refs[rank]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, RefGroup):
            return NotImplemented
        return other._refs == self._refs  # pyright: ignore[reportUnknownMemberType] - whatever it is a group of

    def __hash__(self) -> int:
        return hash(self._refs)

    async def ask_all(self, message: Message[R, A_co], *, timeout: Timeout = DEFAULT) -> list[R]:
        """Send a message to all ranks and await all replies.

        Args:
            message: The message.
            timeout: Seconds for all ranks together; None: no limit.

        Returns:
            The replies, in rank order.

        Raises:
            ActorDied: One of them has ended.
            CallCycle: One of them waits for this very call.
            CallTimeout: The limit has passed.
            UnhandledMessage: One of them has no handler for it.
            Exception: What came first of what any rank raised, at once, with what the
                others do as a note.
        """
        tally = self._send(message, timeout)
        try:
            while not tally.is_over:
                await tally.next_reply()
        finally:
            tally.end()
        return [part.value for part in tally.parts]

    async def ask_one(self, rank: int, message: Message[R, A_co], *, timeout: Timeout = DEFAULT) -> R:
        """Send a message to all ranks and await the reply of one; all of them run it.

        What any rank raises before that reply is raised at once; what one raises later is
        logged.

        Args:
            rank: Whose reply it is; negative counts from the end.
            message: The message.
            timeout: Seconds at most; None: no limit.

        Raises:
            IndexError: There is no such rank.
            Exception: As with :meth:`ask_all`.
        """
        wanted = range(len(self))[rank]
        tally = self._send(message, timeout)
        try:
            while (part := await tally.next_reply()).rank != wanted:
                pass
        except BaseException:
            tally.end()
            raise
        tally.leave()
        reply: R = part.value
        return reply

    def as_done(self, message: Message[R, A_co], *, timeout: Timeout = DEFAULT) -> AsDone[R]:
        """Send a message to all ranks; iterate over ``(rank, reply or error)`` as they come.

        ``async with group.as_done(message) as done: async for rank, reply in done: ...``
        gives up what has not come when the block is left; a bare ``async for`` lets it run.

        Args:
            message: The message.
            timeout: Seconds for all ranks together; then the iteration raises ``CallTimeout``.
        """
        return AsDone(self._send(message, timeout))

    async def tell_all(self, message: Message[Any, A_co], *, timeout: Timeout = DEFAULT) -> None:
        """Send a message to all ranks, and wait until all have room for it.

        Args:
            message: The message.
            timeout: Seconds to wait for room, for all ranks together; None: no limit.

        Raises:
            CallTimeout: There was no room in time; the ranks that had room have it.
            MailboxFull: A rank has no room, and waits for the sender.
            UnhandledMessage: One of them has no handler for it.
        """
        cells = self._cells()
        core = cells[0].core
        posted = [(cell, cell.post(message)) for cell in cells]
        deadline = deadline_of(core, timeout)
        waiting = [(cell, envelope) for cell, envelope in posted if envelope is not None]
        try:
            for cell, envelope in waiting:
                if envelope.stage is Stage.WAITING:
                    left = None if deadline is None else deadline - envelope.sent_at
                    await cell.wait_for_room(envelope, left)
        except BaseException:
            for cell, envelope in waiting:
                if envelope.stage is Stage.WAITING:
                    cell.withdraw(envelope, "cancelled")
            raise

    async def stop(self, *, timeout: float | None = 10.0) -> list[Exit]:
        """End all of them, at the same time; returns when all are over.

        Args:
            timeout: Seconds after which running handlers are cancelled; None: never.

        Raises:
            CallCycle: One of them waits for the caller.
        """
        cells, origin = self._cells(), here.get()
        for cell in cells:
            cell.core.check_loop()
            cell.check_cycle(() if origin is None else origin.callers)
        by = None if timeout is None else cells[0].core.runtime.now() + timeout
        for cell in cells:
            cell.request_stop(f"its group {self.name} was told to stop", by)
        return [await cell.closed() for cell in cells]

    def _send(self, message: Message[Any, Any], timeout: Timeout) -> Tally:
        return Tally(self.name, self._cells(), message, timeout)

    def _cells(self) -> list[Cell]:
        return [ref.__cell__() for ref in self._refs]


@final
class AsDone(Generic[R]):
    """Replies of a group as they come; made by ``RefGroup.as_done``."""

    __slots__ = ("_tally",)

    def __init__(self, tally: Tally) -> None:
        self._tally = tally

    def __repr__(self) -> str:
        return f"<AsDone {repr(self._tally)[1:-1]}>"

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> tuple[int, R | BaseException]:
        """The next rank and its reply, or its error.

        Raises:
            BusyResourceError: Another task is waiting here.
            CallTimeout: The limit has passed.
            RuntimeError: The block was left, or a wait in it cancelled, before this one had come.
        """
        if self._tally.is_over:
            raise StopAsyncIteration
        try:
            part = await self._tally.next()
        except BusyResourceError:  # another task waits, and goes on
            raise
        except BaseException:
            self._tally.end()
            raise
        return part.rank, part.value if part.error is None else part.error

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._tally.end()
