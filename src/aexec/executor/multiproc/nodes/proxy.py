"""The ranks of one other node, for one generation: what its agent says of them goes to the group's sink."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from aexec.errors import AexecError, MessageNotDecoded, WorkerDied, note
from aexec.executor.copies import own_copy
from aexec.executor.group import GroupSink
from aexec.executor.lines.work import RankWork
from aexec.executor.multiproc.nodes.roster import JoinedNode
from aexec.executor.multiproc.nodes.spread import names_of
from aexec.messages.base import Message
from aexec.messages.control import Hello
from aexec.messages.lifecycle import RankPlace
from aexec.messages.nodes import (
    Answers,
    Begin,
    Begun,
    Chosen,
    Died,
    Failed,
    NotBegun,
    RankPhase,
    RankProgress,
    Stop,
    Stopped,
)
from aexec.messages.step import ExecuteModel, SampleTokens
from aexec.transport import Frame, Kind
from aexec.worker.remote import RemoteFailure, rebuild

__all__ = ("NodeProxy",)

_ALL_OF_THEM = -1  # see Failed.rank
_STEPS = (ExecuteModel, SampleTokens)


class NodeProxy:
    """Ranks that are on another node.

    Args:
        node: Which.
        ranks: Those ranks.
        generation: Of them.
        sink: Where what they say goes.

    Attributes:
        begun: What the node has said of its start.
        dead: Ranks that have ended, or are lost.
    """

    def __init__(self, node: JoinedNode, ranks: range, generation: int, sink: GroupSink) -> None:
        self.node, self.ranks = node, ranks
        self.dead: set[int] = set()
        self._generation, self._sink = generation, sink
        self._work = {rank: RankWork() for rank in ranks}
        self._phases = dict.fromkeys(ranks, "spawn")
        self._pids = dict.fromkeys(ranks, 0)
        self._start: asyncio.Future[Begun] = asyncio.get_running_loop().create_future()
        self._end: asyncio.Future[Sequence[str]] = asyncio.get_running_loop().create_future()
        self._has_begun = self._is_stopping = False
        node.events = self

    def __repr__(self) -> str:
        return f"<NodeProxy of {self.node}: {names_of(self.ranks)}, {len(self.dead)} dead>"

    @property
    def begun(self) -> Begun | None:
        """What the node has said once its ranks were up; None: they are not, or were not."""
        start = self._start
        return start.result() if start.done() and not start.cancelled() and start.exception() is None else None

    # Telling.

    async def start(self, begin: Begin) -> Sequence[Hello]:
        """Have the node start its ranks, and wait until each worker is constructed; what they say, in rank order.

        Raises:
            AexecError: What any of them raised, or that the node is lost.
        """
        self.node.link.send(Kind.EVENT, 0, begin)
        self._has_begun = True
        begun = await self._start
        return begun.hellos

    def parcel(self, message: Message[object], ranks: Sequence[int]) -> Message[object] | Chosen | None:
        """What the node is to be sent so that ``message`` gets to those of ``ranks`` that are its own; None: nothing."""
        if len(ranks) == len(self.ranks) and ranks[0] == self.ranks.start:
            return message
        own = [rank for rank in ranks if rank in self.ranks]
        if not own:
            return None
        return message if len(own) == len(self.ranks) else Chosen(own, message)

    def sent(self, call: int, message: Message[object], ranks: Sequence[int], *, beside: bool) -> None:
        """A message is on its way to ranks, those of other nodes among them."""
        for rank, work in self._work.items():
            if rank in ranks:
                work.sent(call, message, beside=beside)

    def phases(self) -> Mapping[int, str]:
        """While it starts, what a rank has come to; then the oldest that it was told and has not ended."""
        return {rank: self._phases[rank] or work.phase for rank, work in self._work.items()}

    def places(self) -> Sequence[RankPlace]:
        """Each rank's process and device there."""
        devices = dict(zip(self.ranks, self.begun.devices if self.begun else (), strict=False))
        return [RankPlace(rank, self.node.name, self._pids[rank], devices.get(rank, "")) for rank in self.ranks]

    async def stop(self, grace: float, limit: float) -> list[str]:
        """End all ranks.

        Args:
            grace: Seconds for running work and ``shutdown`` hooks.
            limit: Seconds that the node may take in all.

        Returns:
            A line on each worker that did not end by itself, and on a node that does not answer.
        """
        self._is_stopping = True
        self._start.cancel()
        if not self._has_begun:
            return []
        try:
            if not self._end.done():  # it is done already if the node is lost, and then says why
                self.node.link.send(Kind.EVENT, 0, Stop(generation=self._generation, grace=grace))
            return list(await asyncio.wait_for(self._end, limit))
        except TimeoutError:
            why = f"it did not say within {limit:g} s that they have ended"
            self.node.lose(why)
        except AexecError as error:
            why = str(error)
        return [f"{names_of(self.ranks)} on {self.node}: {why}; whatever is alive there ends its workers by itself"]

    def let_go(self) -> None:
        """Nothing of this generation is of interest any longer."""
        self._is_stopping = True
        self._start.cancel()
        self._end.cancel()
        if self.node.events is self:
            self.node.events = None

    # Hearing.

    def heard(self, frame: Frame) -> None:
        """See ``NodeEvents``."""
        kind, call, value, _, error = frame
        if error is not None:
            self._undecoded(kind, call, error)
        elif isinstance(value, Answers):
            for answer in value.answers:
                self._work[answer.rank].ended(answer.call)
                self._sink.replied(answer.call, answer.rank, answer.value)
        elif isinstance(value, Failed):
            self._failed(call, value)
        elif getattr(value, "generation", None) == self._generation:
            self._event(value)

    def lost(self, why: str) -> None:
        """See ``NodeEvents``: none of its ranks can be reached any longer."""
        cause = f"{self.node} is lost: {why}"
        if not self._end.done():
            self._end.set_exception(_Lost(f"it is lost: {why}"))
            self._end.exception()  # nobody may ever wait for it
        for rank in self.ranks:
            work, phase = self._work[rank], self._phases[rank]
            died = WorkerDied(
                rank, self._pids[rank], None, None, phase or work.phase, work.step, node=self.node.name, cause=cause
            )
            self._died(died)

    def _undecoded(self, kind: Kind, call: int, error: MessageNotDecoded) -> None:
        if call:
            self._failed(call, Failed(_ALL_OF_THEM, error))
        elif not self._start.done() and kind is Kind.EVENT:  # it is about the start, or should have been
            self._start.set_exception(error)

    def _failed(self, call: int, failed: Failed) -> None:
        error = failed.error
        error = rebuild(error) if isinstance(error, RemoteFailure) else error
        for line in failed.notes:
            if line not in getattr(error, "__notes__", ()):
                error.add_note(line)
        if failed.rank != _ALL_OF_THEM:
            self._work[failed.rank].ended(call)
            self._sink.failed(call, failed.rank, error)
            return
        for rank, work in self._work.items():  # of those that have answered, or were not asked, nobody waits for it
            work.ended(call)
            self._sink.failed(call, rank, own_copy(error) if isinstance(error, AexecError) else error)

    def _event(self, event: object) -> None:
        if isinstance(event, RankPhase):
            if self._phases[event.rank]:
                self._phases[event.rank] = event.phase
                self._sink.phase(event.rank, event.phase)
        elif isinstance(event, RankProgress):
            self._sink.progress(event.rank, event.phase, event.done, event.total)
        elif isinstance(event, Begun):
            self._is_up(event)
        elif isinstance(event, NotBegun):
            self._not_begun(event)
        elif isinstance(event, Died):
            self._died(event.error)
        elif isinstance(event, Stopped) and not self._end.done():
            self._end.set_result(event.lines)

    def _is_up(self, begun: Begun) -> None:
        for hello in begun.hellos:
            self._phases[hello.rank], self._pids[hello.rank] = "", hello.pid
        if not self._start.done():
            self._start.set_result(begun)

    def _not_begun(self, event: NotBegun) -> None:
        for line in event.notes:
            if line not in getattr(event.error, "__notes__", ()):
                note(event.error, line)
        if not self._start.done():
            self._start.set_exception(event.error)

    def _died(self, error: WorkerDied) -> None:
        if error.rank in self.dead or self._is_stopping:
            return
        self.dead.add(error.rank)
        self._sink.died(error)


class _Lost(AexecError):
    """The node is gone while its end is waited for."""
