"""The part of a worker actor that a compiled graph runs."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import os
import sys
import threading
from collections.abc import Generator
from typing import Any

from aexec.parallel.handoff import NOTHING, Travelling
from aexec.parallel.layout import RankLayout
from aexec.transport import BlockingChannel
from aexec.worker.context import WorkerContext
from aexec.worker.process import Complete, MakeRoad
from aexec.worker.rank import RankState
from aexec.worker.roads import WAKE, Roads

__all__ = ("GraphStage",)

_NICER = 10  # than its process


class GraphStage:
    """Methods for an actor; the graph calls :meth:`graph_step` on a thread of Ray's.

    Attributes:
        roads: Of this rank; there from when it serves.
    """

    roads: Roads | None = None

    def graph_prepare(self, buffer_bytes: int, *, by_device: bool) -> bool:
        """Get ready for a compilation that follows; not on the device's thread.

        Args:
            buffer_bytes: Of each buffer that this rank writes to.
            by_device: Tensors go from device to device.

        Returns:
            Whether this rank uses torch, so that its hidden states are tensors.
        """
        context = importlib.import_module("ray.dag").DAGContext.get_current()
        context.buffer_size_bytes = buffer_bytes  # whoever writes to a channel makes it, as large as is said here
        roads = self.roads
        if roads is not None:
            roads.allow(buffer_bytes, by_device=by_device)
        _say_device(roads.device if by_device and roads is not None else None)
        return "torch" in sys.modules

    @contextlib.contextmanager
    def on_graph(self, layout: RankLayout) -> Generator[tuple[MakeRoad, Complete]]:
        """For ``serve_lines``: steps come by a graph, and hidden states with them.

        Args:
            layout: Of the ranks.
        """

        def make_road(line: BlockingChannel, rank: RankState) -> Roads:
            self.roads = Roads(line, rank, layout)
            return self.roads

        def complete(context: WorkerContext) -> WorkerContext:
            return dataclasses.replace(context, stage_link=self.roads.link if self.roads is not None else None)

        try:
            yield make_road, complete
        finally:
            if self.roads is not None:
                self.roads.close()

    def graph_step(self, message: bytes, incoming: Travelling = NOTHING) -> Travelling:
        """Run a step message; see :meth:`aexec.worker.roads.Roads.take`."""
        if message == WAKE:
            _make_way()
        return NOTHING if self.roads is None else self.roads.take(message, incoming)


def _make_way() -> None:
    """Let whoever has work go before this thread, in which Ray waits for the next message by polling.

    On a machine without a core to spare the device's thread waits for it else, milliseconds
    each time: measured on two cores, a step takes a third of the time it takes without this.
    """
    with contextlib.suppress(OSError):  # a sandbox that has no such notion
        own = os.getpriority(os.PRIO_PROCESS, os.getpid())  # of the main thread: this one has been here before
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), own + _NICER)


def _say_device(device: str | None) -> None:
    """Around each read and write Ray enters the CUDA device, which it guesses, and imports torch to do so.

    Args:
        device: The rank's, as in ``cuda:1``; None: no tensor goes by the device.
    """
    channels: Any = importlib.import_module("ray.experimental.channel").ChannelContext.get_current()
    if device is None:
        channels._torch_available = False  # noqa: SLF001 - it has no setter, and the import takes seconds
    elif ":" in device:
        channels.set_torch_device(importlib.import_module("torch").device(device))
