"""The agent of a node: it has the node's ranks, and does with them what the leader says.

It outlives the generations of its ranks. It ends when the leader dismisses it, when it is told
to on its own node, and when the leader is gone: in each case its workers end before it does.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Protocol

import anyio

from aexec.actor import Actor, Deferred, Exit, handles
from aexec.errors import ActorDied, AexecError, ChannelClosed, ChannelFull, ExecutorClosed, LeaderLost
from aexec.executor.multiproc.nodes.hosted import HASTE, HostedRanks, NodePlace
from aexec.messages.base import Message
from aexec.messages.nodes import Begin, Begun, Chosen, Dismissed, Failed, Leaving, NotBegun, Stop, Stopped
from aexec.transport import Frame, Kind

__all__ = ("EndNode", "NodeAgent", "NodeLink", "WaitForEnd")

_FAREWELL = 0.5  # seconds for the last words to be on their way
_ALL_OF_THEM = -1  # see Failed.rank


class NodeLink(Protocol):
    """The line to the leader, as ``transport.curve`` has it."""

    def open(self, on_frame: Callable[[Frame], None], on_gone: Callable[[ChannelClosed], None]) -> None:
        """From now on its frames are heard, in order, those too that have come already.

        Args:
            on_frame: Told of each, on the loop.
            on_gone: Told once that no more will come.
        """
        ...

    def send(self, kind: Kind, call: int, value: Any = None, *, urgent: bool = False) -> None:
        """Send a frame; never blocks. An ``urgent`` one passes all that waits.

        Raises:
            AexecError: The value cannot travel, or too many frames wait (``ChannelFull``).
        """
        ...

    def limit_to(self, limit: int) -> None:
        """Send no message from now on that has more bytes."""
        ...

    async def flushed(self, timeout: float) -> None:
        """Wait until what was sent is on its way.

        Raises:
            TimeoutError: It is not, in so many seconds.
            ChannelClosed: It never will be.
        """
        ...

    def close(self) -> None:
        """End it; twice is once."""
        ...

    async def closed(self) -> None:
        """Wait until nothing of it is left."""
        ...


class WaitForEnd(Message[str], frozen=True):
    """Answered when the agent has ended all that it had; why, in words.

    The answer is a ``LeaderLost`` where the leader has gone without a word, or another error
    where the agent could not go on.
    """


class EndNode(Message[None], frozen=True):
    """End: tell the leader, and end the workers; answered when that is done.

    Attributes:
        why: In words, as in ``SIGTERM``.
        grace: Seconds for running work.
    """

    why: str
    grace: float


class NodeAgent(Actor):
    """Has the ranks of one node.

    Args:
        link: The line to the leader; both ends have agreed to work together.
        place: Which node this is.
        leader: Where the leader is, for people.
        told: Told in words what happens, for whoever watches.
    """

    def __init__(self, link: NodeLink, place: NodePlace, leader: str, told: Callable[[str], None]) -> None:
        self._link, self._place, self._leader, self._told = link, place, leader, told
        self._ranks: HostedRanks | None = None
        self._end: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._is_ending = False

    def __repr__(self) -> str:
        state = "ending" if self._is_ending else "at work" if self._ranks else "waiting for the leader"
        return f"<NodeAgent of {self._place}: {state}, {self._ranks!r}>"

    async def on_start(self) -> None:
        """Begin to listen to the leader."""
        self._link.open(self._heard, self._gone)

    async def on_stop(self, reason: Exit) -> None:
        """Leave nothing behind."""
        _ = reason
        self._link.close()  # where this is a failure, the leader knows it at once
        await self._stop_ranks(HASTE, in_haste=True)

    @handles(WaitForEnd)
    def wait_for_end(self, message: WaitForEnd) -> Deferred[str]:
        """Answer when all is over."""
        reply: Deferred[str] = self.context.defer(message)

        def answer(end: asyncio.Future[str]) -> None:
            error = end.exception()
            if error is None:
                reply.resolve(end.result())
            else:
                reply.fail(error)

        self._end.add_done_callback(answer)
        return reply

    @handles(EndNode)
    async def end_node(self, message: EndNode) -> None:
        """End in order; the leader is told first, so that nobody waits for these ranks any longer."""
        if not self._is_ending:
            self._is_ending = True
            self._tell(Kind.EVENT, 0, Leaving(message.why))
            await self._finish(message.why, None, message.grace)
        with contextlib.suppress(AexecError):
            await asyncio.shield(self._end)

    # Hearing.

    def _heard(self, frame: Frame) -> None:
        if frame.kind is Kind.MESSAGE:
            self._pass_on(frame)
        elif isinstance(frame.value, Begin):
            self._start(self._begin(frame.value))
        elif isinstance(frame.value, Stop):
            self._start(self._stop(frame.value))
        elif isinstance(frame.value, Dismissed):
            self._dismissed(frame.value)
        else:
            why = f"it said what is not understood here: {repr(frame)[:200]}"
            self._begin_to_end("", LeaderLost(self._leader, why))

    def _pass_on(self, frame: Frame) -> None:
        ranks = self._ranks
        if frame.error is not None:
            self._tell(Kind.FAILURE, frame.call, Failed(_ALL_OF_THEM, frame.error))
        elif ranks is None:
            return  # they were stopped, and the leader will know
        elif isinstance(frame.value, Chosen):
            ranks.send(frame.call, frame.value.message, frame.value.ranks)
        else:
            ranks.send(frame.call, frame.value, ranks.ranks)

    def _dismissed(self, message: Dismissed) -> None:
        error = None if message.orderly else ExecutorClosed(f"the leader at {self._leader} has given up: {message.why}")
        self._begin_to_end(message.why, error)

    def _gone(self, closed: ChannelClosed) -> None:
        self._begin_to_end("", LeaderLost(self._leader, closed.reason))

    # Doing.

    async def _begin(self, begin: Begin) -> None:
        await self._stop_ranks(HASTE, in_haste=True)  # of a generation that the leader has given up
        if self._is_ending:
            return
        self._link.limit_to(begin.arena_bytes)
        ranks = self._ranks = HostedRanks(begin, self._place, self.context, self._tell)
        self._told(f"starting {_names(ranks.ranks)} (generation {begin.generation})")
        news = await ranks.start()
        if news is None:
            return
        if isinstance(news, Begun):
            pids = ", ".join(str(hello.pid) for hello in news.hellos)
            self._told(f"{_names(ranks.ranks)} up (pid {pids})")
        else:
            self._told(f"{_names(ranks.ranks)} could not be started: {_first_line(news.error)}")
        self._report(news)

    async def _stop(self, stop: Stop) -> None:
        stopped = Stopped(generation=stop.generation)
        if self._ranks is not None and self._ranks.generation == stop.generation:
            stopped = await self._stop_ranks(stop.grace) or stopped
        self._tell(Kind.EVENT, 0, stopped)

    async def _stop_ranks(self, grace: float, *, in_haste: bool = False) -> Stopped | None:
        ranks = self._ranks
        if ranks is None:
            return None
        stopped = await ranks.stop(grace, in_haste=in_haste)
        if self._ranks is ranks:
            self._ranks = None
            self._told(f"{_names(ranks.ranks)} ended")
            for line in () if in_haste else stopped.lines:
                self._told(line)
        return stopped

    def _begin_to_end(self, why: str, error: AexecError | None) -> None:
        if not self._is_ending:
            self._is_ending = True
            self._start(self._finish(why, error, HASTE, in_haste=True))

    def _start(self, coroutine: Coroutine[Any, Any, None]) -> None:
        with contextlib.suppress(ActorDied):  # it ends anyhow, and leaves nothing
            self.context.start_task(coroutine)

    async def _finish(self, why: str, error: AexecError | None, grace: float, *, in_haste: bool = False) -> None:
        with anyio.CancelScope(shield=True):
            await self._stop_ranks(grace, in_haste=in_haste)
            with contextlib.suppress(TimeoutError, ChannelClosed):
                await self._link.flushed(_FAREWELL)
            self._link.close()
            await self._link.closed()
        if not self._end.done():
            if error is None:
                self._end.set_result(why)
            else:
                self._end.set_exception(error)

    # Saying.

    def _report(self, news: Begun | NotBegun) -> None:
        try:
            self._tell(Kind.EVENT, 0, news)
        except AexecError as error:  # what it chose, or an error, cannot travel
            self._tell(Kind.EVENT, 0, NotBegun(generation=news.generation, error=error))

    def _tell(self, kind: Kind, call: int, value: Any, *, urgent: bool = False) -> None:
        try:
            self._link.send(kind, call, value, urgent=urgent)
        except ChannelClosed:
            return  # what follows from that is done where it is heard
        except ChannelFull as error:
            self._gone(ChannelClosed("to the leader", str(error)))


def _names(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks[0]} to {ranks[-1]}"


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".partition("\n")[0]
