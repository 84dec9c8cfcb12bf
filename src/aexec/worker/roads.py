"""One order made of two roads: step messages that come by a graph, and plain calls that come by the work line.

The driver says with each message how many of the other kind it has sent to this rank before,
and so what comes next follows from the messages themselves. To the device's thread this is a
work line like any other; how a step's answer gets back, it need not know either.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

from aexec.messages.control import CallMethod
from aexec.messages.step import ExecuteModel, SampleTokens
from aexec.parallel.handoff import BUFFER_SETTING, NOTHING, SLACK, GraphLink, Passage, Travelling
from aexec.parallel.layout import RankLayout
from aexec.parallel.streams import arrived
from aexec.transport import BlockingChannel, Frame, Kind
from aexec.transport.codec import encode
from aexec.transport.flat import flatten, restore
from aexec.worker.rank import RankState

__all__ = ("WAKE", "RoadStatistics", "Roads", "step_message")

_COUNT = struct.Struct("<Q")
_LIMIT = 1 << 20  # bytes, until the driver says how large the graph's buffers are
_LONG = 3600.0  # seconds; a line that waits without any limit dozes, and would not hear that a step has come

#: A message that only wakes a graph up: no rank does anything. It is not empty: see ``NOTHING``.
WAKE = b"\0"


class RoadStatistics(NamedTuple):
    """Figures of one rank's roads.

    Attributes:
        steps: Step messages that came by the graph and were begun.
        calls: Plain calls that came by the line and were begun.
        steps_wait: Step messages that wait for their turn.
        calls_wait: Plain calls that do.
    """

    steps: int
    calls: int
    steps_wait: int
    calls_wait: int


class _Step(NamedTuple):
    before: int  # plain calls that come first
    frame: Frame
    passage: Passage


class Roads:
    """What the device's thread of one rank receives from, and answers on.

    Args:
        line: The work line.
        rank: What both threads of the process know.
        layout: Of the executor.

    Attributes:
        link: Where hidden states come along with steps; None for a single stage.
    """

    def __init__(self, line: BlockingChannel, rank: RankState, layout: RankLayout) -> None:
        self._line, self._rank = line, rank
        self._is_last = layout.neighbour(rank.rank, 1) is None
        self._samples = rank.rank == layout.output_rank()
        self._counts, self._count_at = layout.size * _COUNT.size, rank.rank * _COUNT.size
        self.link = GraphLink(layout, rank.rank, _LIMIT) if layout.pipeline > 1 else None
        self._limit = _LIMIT
        self._by_graph: deque[_Step] = deque()
        self._by_line: deque[Frame] = deque()
        self._steps = self._calls = 0
        self._now: _Step | None = None
        self._asked: dict[int, Passage] = {}  # by call: whose answer goes back by the graph
        self._late: set[int] = set()  # calls whose passage is over, and their answer has not been given
        self._outcome: list[bytes] = []  # answers that go back with the passage of now
        self._is_closed = False
        self._line_has_queued = rank.has_queued
        rank.has_queued = self.has_queued

    def __repr__(self) -> str:
        figures = self.statistics()
        return f"<Roads of rank {self._rank.rank}: {figures.steps} steps, {figures.calls} calls, {self.link!r}>"

    def statistics(self) -> RoadStatistics:
        """The figures so far."""
        return RoadStatistics(self._steps, self._calls, len(self._by_graph), len(self._by_line))

    def has_queued(self) -> bool:
        """Anything waits for the device's thread; from any thread."""
        return bool(self._by_graph or self._by_line) or self._line_has_queued()

    @property
    def device(self) -> str:
        """The device of this rank's worker, as its context has it; empty before there is one."""
        host = self._rank.host
        return "" if host is None else host.context.device

    def allow(self, limit: int, *, by_device: bool = False) -> None:
        """Say how large the graph's buffers are.

        Args:
            limit: Bytes that a message may have.
            by_device: Tensors go from device to device, through no buffer.
        """
        self._limit = limit
        if self.link is not None:
            self.link.limit, self.link.tensor_limit = limit, None if by_device else limit

    # The device's thread.

    def receive(self) -> Frame | None:
        """Wait for what is next; None: somebody has called ``wake`` on the work line.

        Raises:
            ChannelClosed: The driver is gone.
        """
        if self._now is not None:
            self._through(self._now)
        while True:
            frame = self._next()
            if frame is not None:
                return frame
            heard = self._line.receive(_LONG)
            if heard is None:
                return self._next()
            self._by_line.append(heard)

    def send(self, kind: Kind, call: int, value: Any = None, /) -> None:
        """Send a frame: the answer of a step on the last stage by the graph, all else by the line.

        An error goes by the line, at once: by the graph it would come behind older steps.

        Raises:
            ChannelClosed: The driver is gone.
            Exception: What is wrong with the value; something else may be sent instead.
        """
        passage, now = self._asked.get(call), self._now
        is_late = call in self._late and now is not None and not now.passage.is_over
        if kind is Kind.REPLY and (passage is not None or is_late):
            what = f"the answer of rank {self._rank.rank}"
            self._outcome.append(flatten(kind, call, encode(value), self._limit, what, BUFFER_SETTING))
        else:
            self._line.send(kind, call, value)
        self._late.discard(call)
        if passage is not None:
            del self._asked[call]
            if not self._late:  # else some of these may follow from the same message
                self._give(passage)

    # The graph's thread.

    def take(self, message: bytes, incoming: Travelling = NOTHING) -> Travelling:
        """Run a step message that the graph has brought; blocks until the graph can go on.

        Args:
            message: What :func:`step_message` made.
            incoming: What came along with it from the stage before.

        Returns:
            What the graph carries on: to the stage after, or back to the driver.
        """
        if message == WAKE:
            return NOTHING
        step = self._step(message, incoming)
        self._by_graph.append(step)
        self._line.wake()
        if self._is_closed:
            step.passage.give(NOTHING)
        return step.passage.wait()

    def close(self) -> None:
        """Let the graph go on with nothing, now and from now on; from any thread."""
        self._is_closed = True
        for step in list(self._by_graph):
            step.passage.give(NOTHING)
        for passage in list(self._asked.values()):
            passage.give(NOTHING)
        if self._now is not None:
            self._now.passage.give(NOTHING)

    # Both.

    def _step(self, message: bytes, incoming: Travelling) -> _Step:
        if isinstance(incoming, tuple):
            arrived(incoming[1])
        (before,) = _COUNT.unpack_from(message, self._count_at)
        frame = self._restored(memoryview(message)[self._counts :])
        passage = Passage(incoming)
        if not self._has_outcome(frame):
            passage.give(NOTHING)
        elif self._is_last:
            self._asked[frame.call] = passage
        return _Step(before, frame, passage)

    def _restored(self, data: memoryview) -> Frame:
        frame = restore("graph", data)
        message = frame.value
        if isinstance(message, SampleTokens) and message.grammar is not None and not self._samples:
            return frame._replace(value=SampleTokens(message.step))  # as on a line: it is for the rank that samples
        return frame

    def _has_outcome(self, frame: Frame) -> bool:
        """The graph waits for something that comes of this message; it goes on at once else."""
        if frame.error is not None:
            return False
        samples = isinstance(frame.value, SampleTokens)
        if not self._is_last:
            return not samples
        host = self._rank.host
        return samples or frame.value.num_tokens == 0 or host is None or not host.samples

    def _next(self) -> Frame | None:
        """What is due, whichever road it came by."""
        frame = self._due_by_line() if self._by_line else None
        if frame is None and self._by_graph and self._by_graph[0].before <= self._calls:
            step = self._now = self._by_graph.popleft()
            self._steps += 1
            if self.link is not None:
                self.link.begin(step.passage)
            frame = step.frame
        return frame

    def _due_by_line(self) -> Frame | None:
        frame = self._by_line[0]
        is_call = isinstance(frame.value, CallMethod)
        if is_call and frame.value.after > self._steps:
            return None
        self._calls += is_call or frame.error is not None  # one that cannot be read was sent as well
        return self._by_line.popleft()

    def _through(self, step: _Step) -> None:
        """The device's thread comes for the next: an answer that is not there by now goes along with a later one."""
        self._now = None
        if not step.passage.is_over:
            if self._asked.pop(step.frame.call, None) is not None:
                self._late.add(step.frame.call)
            self._give(step.passage)

    def _give(self, passage: Passage) -> None:
        outcome, self._outcome = self._outcome, []
        passage.give(outcome[0] if len(outcome) == 1 else outcome or NOTHING)


def step_message(call: int, message: ExecuteModel | SampleTokens, calls_before: Sequence[int], limit: int) -> bytes:
    """What :meth:`Roads.take` takes, the same for all ranks.

    Args:
        call: Its id.
        message: One half of a step.
        calls_before: By rank: the plain calls that were sent there before.
        limit: Bytes that it may have.

    Raises:
        MessageTooLarge: It has more.
        MessageNotPortable: It cannot travel.
    """
    what = f"the {type(message).__name__} of step {message.step}"
    counts = b"".join(map(_COUNT.pack, calls_before))
    return counts + flatten(Kind.MESSAGE, call, encode(message), limit - len(counts) - SLACK, what, BUFFER_SETTING)
