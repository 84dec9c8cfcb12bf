"""A group of workers that have two lines each: how messages get to them, and what comes back.

Steps and plain methods go down the work line, in order, and are answered by the worker's
main thread; what must be answered while that thread computes, or hangs, goes down the
control line. All of it runs on the executor's loop, without a thread. How the processes come
to exist, and how they are made to end, is the backend's.
"""

from __future__ import annotations

import abc
import asyncio
import contextlib
import inspect
import socket
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Generic, TypeVar

import msgspec

from aexec.errors import AexecError, ChannelFull, MessageNotDecoded, WorkerDied
from aexec.executor.aside import run_aside
from aexec.executor.group import GroupPlan, WorkerGroup
from aexec.executor.lines.greeting import Greeting
from aexec.executor.lines.pairing import Pairing, reorder
from aexec.executor.lines.rank import RankLines
from aexec.messages.base import Message
from aexec.messages.control import CallMethod, Greet, Hello, Shutdown
from aexec.messages.process import Ended, Launch, PhaseReached, ProgressMade
from aexec.messages.step import ExecuteModel, SampleTokens, StepId
from aexec.transport import Frame, HotWindow, Kind, LoopChannel, Writer
from aexec.worker.remote import RemoteFailure, rebuild

__all__ = ("LineGroup", "is_beside")

RankT = TypeVar("RankT", bound=RankLines)

_STEPS = (ExecuteModel, SampleTokens)
_MESSAGE, _REPLY = Kind.MESSAGE, Kind.REPLY  # looked up once, and never hashed
_GREET, _SHUTDOWN = -1, -2  # calls of the group's own


class LineGroup(WorkerGroup, Generic[RankT]):
    """The workers of one generation. A backend fills ``_workers``, and connects and launches each.

    What it may override: :meth:`_send_step`, where step messages travel on another road, with
    :attr:`_plain_calls_wait` set, for then the two roads have to say what comes before what;
    :meth:`_make_up_for`, for the same reason; :meth:`_let_go`.

    Args:
        plan: What the group is made from.
        spin: Seconds that the driver polls for answers that are about to come; 0: never.
        ranks: Those that it holds, of all that the layout has; None: all of them.
    """

    _plain_calls_wait = False  # plain methods too are told how many step messages were sent before them

    def __init__(self, plan: GroupPlan, *, spin: float = 0.0, ranks: range | None = None) -> None:
        super().__init__(plan)
        held = range(plan.config.parallel.world_size) if ranks is None else ranks
        self._first, self._ranks = held.start, len(held)
        self._sink_replied = plan.sink.replied
        self._workers: list[RankT] = []
        self._greeting = Greeting(held)
        self._writer = Writer(int(plan.config.arena_bytes))
        self._pairing = Pairing(self._writer)
        self._lines: list[LoopChannel] = []  # the work lines, once all ranks are there; in any order
        self._spin = spin
        self._hot = HotWindow(spin) if spin else None
        self._methods: Mapping[str, bool] = {}
        self._steps = 0  # step messages sent so far
        self._stopping = self._stopped = False
        self._stop = asyncio.Lock()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} generation {self.plan.generation}: {self._workers!r}>"

    def send(self, call: int, message: Message[Any], ranks: Sequence[int]) -> None:
        """Encode a message once and send it down the lines that it belongs to."""
        chosen = self._workers if len(ranks) == self._ranks else [self._worker(rank) for rank in ranks]
        if isinstance(message, _STEPS):
            self._send_step(call, message, chosen)
            return
        beside = is_beside(message, self._methods)
        if isinstance(message, CallMethod) and (beside or self._plain_calls_wait):
            message = msgspec.structs.replace(message, after=self._steps)
        if beside or chosen is not self._workers:
            lines = [worker.control_line if beside else worker.work_line for worker in chosen]
        else:
            lines = self._lines or [worker.work_line for worker in chosen]
        reorder(lines, self._writer.send(lines, _MESSAGE, call, message))
        for worker in chosen:
            worker.work.sent(call, message, beside=beside)

    async def stop(self, grace: float) -> Sequence[str]:
        """Ask, wait, make: whatever state each worker is in."""
        async with self._stop:
            if self._stopped:
                return []
            self._stopping = True
            try:
                lines = await self._bring_down(grace)
                self._stopped = True
            finally:
                letting_go = self._let_go()
                self._stopped = True  # if this was cut short too: whoever comes next would wait for nothing
            await letting_go
            return lines

    def phases(self) -> Mapping[int, str]:
        """While it starts, what a rank has come to; then the oldest that it was told and has not ended."""
        return {worker.rank: worker.doing for worker in self._workers}

    def settings(self) -> Mapping[str, Any]:
        """What it chose."""
        return {"spin": self._spin}

    @abc.abstractmethod
    async def _bring_down(self, grace: float) -> list[str]:
        """End all workers; a line on each that did not end by itself."""

    def _let_go(self) -> asyncio.Future[None]:
        """Close everything here; done when the shared memory is given back, which takes a while if it is large."""
        for worker in self._workers:
            worker.close()
        return run_aside(self._writer.close)

    # Starting.

    def _connect(self, worker: RankT, work: socket.socket, control: socket.socket) -> None:
        """A rank has its lines; this process's ends are owned from here on."""
        worker.connect(work, control, self._writer, partial(self._heard, worker), self._hot)

    def _launch(self, worker: RankT, launch: Launch, fds: Sequence[int] = ()) -> None:
        """Tell a connected rank who it is, and wait for its hello; it may read that once it has come to life.

        Args:
            worker: The rank.
            launch: Who it is.
            fds: Go along with it.
        """
        worker.work_line.send(Kind.LAUNCH, 0, launch, fds)
        worker.control_line.send(Kind.MESSAGE, _GREET, Greet())

    async def _all_greeted(self) -> Sequence[Hello]:
        """Wait until each worker is constructed; what they say, in rank order.

        Raises:
            AexecError: The first that any rank raised; those of others are notes.
        """
        hellos = await self._greeting.all(self.phases)
        self._lines = [worker.work_line for worker in self._workers]
        self._methods = hellos[0].methods
        return hellos

    def _worker(self, rank: int) -> RankT:
        return self._workers[rank - self._first]

    def _reached(self, worker: RankT, phase: str) -> None:
        worker.phase = phase
        self.plan.sink.phase(worker.rank, phase)

    # Sending.

    def _send_step(self, call: int, message: ExecuteModel | SampleTokens, workers: Sequence[RankT]) -> None:
        lines = self._lines if workers is self._workers else [worker.work_line for worker in workers]
        if isinstance(message, ExecuteModel):
            waits = self._pairing.launch(lines, call, message)
            if self._hot is not None and not waits:
                self._hot.unanswered(len(workers))  # those that are answered after all are not waited for
        elif message.grammar is not None and len(workers) > 1:
            self._send_masked(call, message, {worker.rank: worker.work_line for worker in workers})
        else:
            self._pairing.sample(lines, call, message)
        self._steps += 1
        for worker in workers:
            worker.work.step_sent(call, message)

    def _send_masked(self, call: int, message: SampleTokens, lines: dict[int, LoopChannel]) -> None:
        """A bitmask goes to the rank that samples; the others are told to go on (SO-06)."""
        self._pairing.sampled(message.step)
        output_rank = self.plan.config.parallel.output_rank
        sampler = [line for rank, line in lines.items() if rank == output_rank]
        self._writer.send(sampler, Kind.MESSAGE, call, message)
        others = [line for rank, line in lines.items() if rank != output_rank]
        self._writer.send(others, Kind.MESSAGE, call, SampleTokens(message.step))

    def _make_up_for(self, worker: RankT, step: int) -> None:
        """A rank could not read a step message: it is told one that it can, so that it is through with as many.

        If it knows the step, it samples it, and holds up no later one; else it refuses. Nobody hears of it.
        """
        if worker.work_line.is_open:
            worker.work_line.send(Kind.MESSAGE, 0, SampleTokens(StepId(step)))

    def _ask_to_end(self, worker: RankT, grace: float) -> None:
        with contextlib.suppress(ChannelFull):  # it has long read nothing: it will be made to end
            worker.control_line.send(Kind.MESSAGE, _SHUTDOWN, Shutdown(grace))

    # Hearing.

    def _heard(self, worker: RankT, frame: Frame) -> None:
        kind, call, value, _, error = frame
        if error is not None:
            self._failed(worker.rank, call, error)
        elif kind is _REPLY:
            worker.work.ended(call)
            if call > 0:
                self._sink_replied(call, worker.rank, value)
            elif call == _GREET:
                worker.phase = ""
                self._greeting.answered(worker.rank, value)
        elif frame.kind is Kind.FAILURE:
            failure = frame.value
            step = worker.work.step_of(frame.call) if isinstance(failure, MessageNotDecoded) else None
            self._failed(worker.rank, frame.call, rebuild(failure) if isinstance(failure, RemoteFailure) else failure)
            if step is not None:
                self._make_up_for(worker, step)
        else:
            self._event(worker, frame.value)

    def _failed(self, rank: int, call: int, error: AexecError) -> None:
        self._worker(rank).work.ended(call)
        if call > 0:
            self.plan.sink.failed(call, rank, error)
        elif call == _GREET:
            self._greeting.failed(rank, error)

    def _event(self, worker: RankT, event: object) -> None:
        if isinstance(event, PhaseReached):
            if worker.phase:  # its hello may have come first, by its other line
                self._reached(worker, event.phase)
        elif isinstance(event, ProgressMade):
            self.plan.sink.progress(worker.rank, event.phase, event.done, event.total)
        elif isinstance(event, Ended):
            worker.ending(event)

    def _died(self, error: WorkerDied) -> None:
        """A rank has ended; said unless it was told to."""
        if not self._stopping:
            self.plan.sink.died(error)


def is_beside(message: Message[Any], methods: Mapping[str, bool]) -> bool:
    """True for what the control line carries."""
    if isinstance(message, CallMethod):
        if isinstance(message.method, str):
            return methods.get(message.method, False)
        return inspect.iscoroutinefunction(message.method)
    return not isinstance(message, _STEPS)
