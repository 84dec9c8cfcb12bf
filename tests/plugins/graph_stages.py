"""Actors that are part of a graph without being workers: they answer on the graph's thread."""

from __future__ import annotations

import os
import threading
from typing import Any

from aexec.executor.ray.graph.stage import GraphStage
from aexec.messages.step import ExecuteModel, StepResult
from aexec.parallel.handoff import BUFFER_SETTING, NOTHING
from aexec.parallel.layout import RankLayout
from aexec.transport.codec import encode
from aexec.transport.flat import flatten, restore
from aexec.transport.frames import Kind
from aexec.worker.roads import WAKE

__all__ = ("Answering", "Stage")


class Answering:
    """Stands for ``Roads``: a stage hands its rank and the payload on, the last one answers with what came."""

    device = "cpu"

    def __init__(self, rank: int, layout: RankLayout) -> None:
        self.rank, self.layout, self.limit, self.incoming = rank, layout, 0, None

    def allow(self, limit: int, *, by_device: bool) -> None:
        assert not by_device
        self.limit = limit

    def take(self, message: bytes, incoming: Any = NOTHING) -> Any:
        if message == WAKE:
            return NOTHING
        frame = restore("graph", memoryview(message)[8 * self.layout.size :])
        is_last = self.layout.neighbour(self.rank, 1) is None
        if isinstance(frame.value, ExecuteModel):
            return self._execute(frame.value, incoming, is_last=is_last)
        if not is_last:
            return NOTHING
        result = StepResult(frame.value.step, [self.rank, self.incoming])
        return flatten(Kind.REPLY, frame.call, encode(result), self.limit, "", BUFFER_SETTING)

    def _execute(self, message: ExecuteModel, incoming: Any, *, is_last: bool) -> Any:
        if message.payload == "hang":
            threading.Event().wait(60)
        if message.payload == "raise":
            raise ValueError("a fault of the graph's own part")
        if is_last:
            self.incoming = restore("graph", incoming).value if incoming else None
            return NOTHING
        return flatten(Kind.MESSAGE, message.step, encode([self.rank, message.payload]), self.limit, "", BUFFER_SETTING)


class Stage(GraphStage):
    """The actor."""

    def become(self, rank: int, layout: RankLayout) -> int:
        """Take a place; the process."""
        self.roads: Any = Answering(rank, layout)
        return os.getpid()
