"""Hidden states that travel with a step along a graph of processes, stage to stage.

A graph runs on a thread of its own in each process; the device belongs to another one. Each
execution of the graph is a :class:`Passage` here: what came in with it is there before the
device's thread begins with the step, and what goes out is given by that thread, which goes on;
the graph's thread waits for it and carries it.

What travels is a pair of step and tensor, which the graph knows how to carry best, or a string
of bytes: any other value, the word that nothing will come, or, empty, that nothing was to be said.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Any

from aexec.errors import MessageTooLarge, PeerLost, ProtocolError
from aexec.parallel.layout import RankLayout
from aexec.parallel.link import LinkStatistics
from aexec.parallel.streams import computed
from aexec.transport.codec import encode
from aexec.transport.flat import flatten, restore
from aexec.transport.frames import Kind

__all__ = ("BUFFER_SETTING", "NOTHING", "GraphLink", "Passage", "Travelling")

BUFFER_SETTING = "ExecutorConfig.graph_buffer_bytes"
SLACK = 1 << 12  # bytes that a tensor's own description may take

Travelling = bytes | tuple[int, Any] | list[bytes] | None
"""What goes from stage to stage: bytes, or a step and its tensor. From the last stage: bytes, or several of them."""

NOTHING = None  # and not b"": Ray never carries a value of no bytes to another node


class Passage:
    """One execution of the graph, as one rank sees it.

    Args:
        incoming: What came along with it from the stage before.

    Attributes:
        is_over: What goes out has been given.
    """

    def __init__(self, incoming: Travelling = NOTHING) -> None:
        self.incoming: Travelling = incoming
        self.is_over = False
        self._outgoing: Travelling = NOTHING
        self._ready: Callable[[], None] | None = None
        self._given = threading.Lock()
        self._given.acquire()

    def __repr__(self) -> str:
        return f"<Passage: {'through' if self.is_over else 'under way'}>"

    def give(self, outgoing: Travelling, ready: Callable[[], None] | None = None) -> None:
        """Let this go out; what is given later is dropped.

        Args:
            outgoing: What.
            ready: Called on the thread that waits, before it has it; see ``parallel.streams``.
        """
        if not self.is_over:
            self.is_over, self._ready, self._outgoing = True, ready, outgoing
            self._given.release()

    def wait(self) -> Travelling:
        """Wait for what goes out; by one thread, once."""
        self._given.acquire()
        if self._ready is not None:
            self._ready()
        return self._outgoing


class GraphLink:
    """A ``StageLink`` along a graph: used by the device's thread, with a passage for each step.

    Args:
        layout: Of one executor.
        rank: This rank.
        limit: Bytes that hidden states may have.

    Attributes:
        limit: The same.
        tensor_limit: The same for tensors; None: they go from device to device, through no buffer.
    """

    def __init__(self, layout: RankLayout, rank: int, limit: int) -> None:
        self.limit = limit
        self.tensor_limit: int | None = limit
        self._rank = rank
        self._before, self._after = layout.neighbour(rank, -1), layout.neighbour(rank, 1)
        self._passage: Passage | None = None
        self._received = self._sent = 0

    def __repr__(self) -> str:
        return f"<GraphLink of rank {self._rank}: {self._before} to {self._after}, {self._sent} sent>"

    def statistics(self) -> LinkStatistics:
        """The figures so far; it is the graph that waits for the stage before, and nobody here."""
        return LinkStatistics(self._received, self._sent, 0, 0.0)

    def open(self) -> None:
        """Nothing is left to do: whoever has the graph has opened it."""

    def close(self) -> None:
        """Forget the passage."""
        self._passage = None

    def begin(self, passage: Passage) -> None:
        """A step begins that came with this passage; what is not handed on before the next one never is."""
        self._passage = passage

    def receive(self, step: int, _into: object, /) -> Any:
        """Take the hidden states of a step, which came along with it.

        Raises:
            PeerLost: The stage before failed at this step, or handed nothing on.
            ProtocolError: It is at another step, or this one came by no graph.
        """
        passage = self._current(step)
        incoming, passage.incoming = passage.incoming, NOTHING  # nobody keeps it alive but the step itself
        doing = f"receive the hidden states of step {step}"
        if not incoming:
            raise PeerLost(self._rank, self._before, doing, "it handed nothing on at this step")
        sent_for, hidden, failed = _unpacked(incoming)
        if sent_for != step:
            raise ProtocolError(f"rank {self._rank} is at step {step}, and rank {self._before} sent step {sent_for}")
        if failed:
            raise PeerLost(self._rank, self._before, doing, "it failed at this step")
        self._received += 1
        return hidden

    def send(self, step: int, hidden: Any, /) -> None:
        """Hand hidden states on; they have to stay as they are.

        Raises:
            MessageTooLarge: They do not fit into the graph's buffers.
            ProtocolError: The step came by no graph.
        """
        passage, what = self._current(step), f"the hidden states of step {step}"
        if _is_tensor(hidden):
            size, limit = hidden.numel() * hidden.element_size() + SLACK, self.tensor_limit
            if limit is not None and size > limit:
                raise MessageTooLarge(what, size, limit, BUFFER_SETTING)
            passage.give((step, hidden), computed(hidden))
        else:
            passage.give(flatten(Kind.MESSAGE, step, encode(hidden), self.limit, what, BUFFER_SETTING))
        self._sent += 1

    def send_failure(self, step: int, _blank: object, /) -> None:
        """Tell the stage after that there will be nothing for this step."""
        self._current(step).give(flatten(Kind.FAILURE, step, encode(None), self.limit, "", BUFFER_SETTING))
        self._sent += 1

    def _current(self, step: int) -> Passage:
        if self._passage is None:
            raise ProtocolError(f"rank {self._rank} wants to hand on step {step}, which came by no graph")
        return self._passage


def _unpacked(incoming: Travelling) -> tuple[int, Any, bool]:
    """Step, hidden states, and whether the stage before failed."""
    if isinstance(incoming, tuple):
        step, tensor = incoming
        return step, tensor, False
    assert isinstance(incoming, bytes)
    frame = restore("graph", incoming)
    if frame.error is not None:
        raise frame.error
    return frame.call, frame.value, frame.kind is Kind.FAILURE


def _is_tensor(value: object) -> bool:
    torch: Any = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)
