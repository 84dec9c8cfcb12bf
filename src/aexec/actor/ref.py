"""Addresses of actors: what the rest of a program holds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar, final

from aexec.actor.absent import find_cell
from aexec.actor.cell import Cell
from aexec.actor.envelope import here
from aexec.actor.inbox import DEFAULT, Timeout
from aexec.actor.lifecycle import ALIVE, Exit
from aexec.actor.statistics import ActorStatistics
from aexec.actor.stream import Stream
from aexec.messages.base import Message, StreamMessage

__all__ = ("Ref", "ref_to")

A_co = TypeVar("A_co", covariant=True)
R = TypeVar("R")


@final
class Ref(Generic[A_co]):
    """The address of an actor; equal to every other ref to it, and never the actor itself.

    Spawning returns one; ``system.find`` and ``system.ref`` look one up. It pickles as its
    address, and leads to the same actor wherever that actor's system is open.
    """

    __slots__ = ("_cell",)

    def __init__(self, cell: Cell) -> None:
        self._cell = cell

    def __repr__(self) -> str:
        return f"<Ref {self._cell.mailbox.describe(self._cell.state.value)}>"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Ref) and other._cell.address == self._cell.address

    def __hash__(self) -> int:
        return hash(self._cell.address)

    def __reduce__(self) -> tuple[Callable[[str], Ref[Any]], tuple[str]]:
        return ref_to, (self._cell.address,)

    def __cell__(self) -> Cell:
        """The actor's place, for the core."""
        return self._cell

    @property
    def name(self) -> str:
        """The actor's name, unique among the live actors of its system."""
        return self._cell.name

    @property
    def address(self) -> str:
        """The actor's name among all systems, and among all actors that ever had its name."""
        return self._cell.address

    @property
    def is_alive(self) -> bool:
        """True until it ends or is told to."""
        return self._cell.state in ALIVE

    @property
    def is_idle(self) -> bool:
        """True while it waits for messages, and none is there; to be asked on its loop."""
        return self._cell.is_idle

    def statistics(self) -> ActorStatistics:
        """The actor's figures."""
        return self._cell.statistics()

    async def ask(self, message: Message[R, A_co], *, timeout: Timeout = DEFAULT) -> R:
        """Send a message and await its reply.

        A cancelled ask cancels the handler, unless that is a plain method or shielded.

        Args:
            message: The message; nobody may change what it refers to afterwards.
            timeout: Seconds at most, waiting for room in the mailbox included; None: no
                limit. Within a handler the deadline of the message in hand holds as well.

        Raises:
            ActorDied: The actor failed, before or while it came to the message.
            ActorStopped: The actor was stopped.
            CallCycle: The actor waits for this very ask.
            CallTimeout: The limit has passed.
            UnhandledMessage: The actor has no handler for it.
            WrongLoop: The actor lives on another event loop.
            Exception: What the handler raised, with a note that names the actor.
        """
        cell = self._cell
        reply = cell.core.runtime.promise()
        envelope = cell.ask(message, timeout, reply)  # may be over already, where tasks are eager
        try:
            result: R = await reply
        except BaseException:
            cell.abandon(envelope, reply)
            raise
        finally:
            if envelope.limit is not None:
                cell.settled(envelope)
        return result

    async def tell(self, message: Message[Any, A_co], *, timeout: Timeout = DEFAULT) -> None:
        """Send a message and forget it; waits for room in the mailbox, and for nothing else.

        A message for an actor that has ended is a dead letter: counted and logged.

        Args:
            message: The message; nobody may change what it refers to afterwards.
            timeout: Seconds to wait for room at most; None: no limit.

        Raises:
            CallTimeout: There was no room in time.
            MailboxFull: There is no room, and the actor waits for the sender.
            UnhandledMessage: The actor has no handler for it.
            WrongLoop: The actor lives on another event loop.
        """
        envelope = self._cell.post(message)
        if envelope is not None:
            await self._cell.wait_for_room(envelope, timeout)

    def tell_nowait(self, message: Message[Any, A_co]) -> None:
        """Send a message and forget it, if there is room for it now.

        Raises:
            MailboxFull: There is none.
            UnhandledMessage: The actor has no handler for it.
            WrongLoop: The actor lives on another event loop.
        """
        self._cell.tell_nowait(message)

    def stream(self, message: StreamMessage[R, A_co], *, timeout: Timeout = DEFAULT, buffer: int = 16) -> Stream[R]:
        """Ask for a stream: ``async with ref.stream(message) as items: async for item in items: ...``.

        The message is sent on entering the block. Leaving the block closes the stream's
        generator, wherever it stands, and waits until it is closed.

        Args:
            message: The message; nobody may change what it refers to afterwards.
            timeout: Seconds at most from asking for an item to getting it; None: no limit.
                Within a handler the deadline of the message in hand holds as well.
            buffer: Most items that its handler is ahead; with that many it waits.

        Raises:
            ConfigError: ``buffer`` is not positive.
        """
        return Stream(self._cell, message, timeout, buffer)

    async def closed(self) -> Exit:
        """Wait until the actor is over, which this does not bring about; any number may wait.

        Raises:
            WrongLoop: The actor lives on another event loop.
        """
        self._cell.core.check_loop()
        return await self._cell.closed()

    async def stop(self, *, timeout: float | None = 10.0) -> Exit:
        """End the actor; returns when it is over, its children first.

        Messages in its mailbox are not handled any more: asks end with ``ActorStopped``
        at once, tells are dead letters. Running handlers may finish within the limit.

        Args:
            timeout: Seconds after which running handlers are cancelled; None: never.

        Raises:
            CallCycle: The actor waits for the caller; it may use ``context.stop()``.
        """
        cell = self._cell
        cell.core.check_loop()
        origin = here.get()
        if origin is not None:
            cell.check_cycle(origin.callers)
        cell.request_stop("it was told to stop", None if timeout is None else cell.core.runtime.now() + timeout)
        return await cell.closed()


def ref_to(address: str) -> Ref[Any]:
    """The ref with an address; one whose actor is not here says so when it is used."""
    return Ref(find_cell(address))
