"""The graph itself: one node for each rank, compiled and taken down by calls that block.

The driver's message goes to every rank directly; what a rank returns goes to the rank at its
place in the stage after, or, from the last stage, back to the driver.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import threading
from collections.abc import Generator, Sequence
from typing import Any

from aexec.executor.ray.api import actor_errors, ray
from aexec.executor.ray.graph.buffers import Buffers
from aexec.parallel.layout import RankLayout

__all__ = ("BuiltGraph", "build_graph")

_LOGGER = "ray.dag.compiled_dag_node"
_building = threading.Lock()  # what is set for one compilation holds for all of the process


class BuiltGraph:
    """A compiled graph, its channels and the loops that it runs in the actors.

    Attributes:
        inputs: Channels to write to.
        outputs: Channels to read from: one for each rank of the last stage, in order.
        loops: By rank: what comes of the loop that the graph runs there.
    """

    def __init__(self, compiled: Any, actors: Sequence[Any]) -> None:
        self._compiled: Any = compiled
        self.inputs: list[Any] = list(compiled.dag_input_channels)
        self.outputs: list[Any] = list(compiled.dag_output_channels)
        self.loops: list[Any] = [compiled.worker_task_refs[actor] for actor in actors]

    def __repr__(self) -> str:
        return f"<BuiltGraph {self._compiled}>"

    def write(self, message: bytes, timeout: float) -> None:
        """Write to all ranks; waits for a free buffer.

        Raises:
            Exception: Ray's, if the graph is broken or no buffer gets free in time.
        """
        for channel in self.inputs:
            channel.write(message, timeout)

    def take_down(self) -> None:
        """End the loops and give the buffers back; blocks while a rank is at a step, and then some."""
        self._compiled.teardown()
        proxy = getattr(
            self._compiled, "_proxy_actor", None
        )  # an actor of Ray's own, which lives as long as its handle
        self.inputs, self.outputs, self.loops = [], [], []
        self._compiled = None
        if proxy is not None:
            with contextlib.suppress(Exception):  # it is gone
                ray().kill(proxy)


def build_graph(
    actors: Sequence[Any], layout: RankLayout, buffers: Buffers, *, tensors: str | None, overlap: bool
) -> BuiltGraph:
    """Compile it; blocks.

    Args:
        actors: By rank; ``GraphStage`` is part of their class, and they were prepared.
        layout: Of the ranks.
        buffers: How many and how large.
        tensors: How Ray carries tensors between stages: ``nccl``, ``shm``, or None: there are none.
        overlap: Send while computing.

    Raises:
        Exception: Ray's.
    """
    dag: Any = importlib.import_module("ray.dag")
    logging.getLogger(_LOGGER).addFilter(_is_news)
    with dag.InputNode() as message:
        outputs = _last_stage(actors, layout, message, tensors)
        root = dag.MultiOutputNode(outputs)
    with _context(dag.DAGContext.get_current(), buffers):
        compiled = root.experimental_compile(
            _max_inflight_executions=buffers.number, _overlap_gpu_communication=overlap
        )
    return BuiltGraph(compiled, actors)


def _last_stage(actors: Sequence[Any], layout: RankLayout, message: Any, tensors: str | None) -> list[Any]:
    """The nodes of the last stage, each bound to what comes before it."""
    nodes: list[Any] = []
    for stage in range(layout.pipeline):
        chosen = [actors[layout.rank(stage, place)] for place in range(layout.tensor)]
        before = nodes or [None] * layout.tensor
        nodes = [
            actor.graph_step.bind(message) if node is None else actor.graph_step.bind(message, node)
            for actor, node in zip(chosen, before, strict=True)
        ]
        if tensors is not None and stage < layout.pipeline - 1:
            nodes = [node.with_tensor_transport(tensors) for node in nodes]
    return nodes


@contextlib.contextmanager
def _context(context: Any, buffers: Buffers) -> Generator[None]:
    """Ray takes the size of the driver's buffers from here, whatever it is given as an argument."""
    with _building:
        before = context.buffer_size_bytes
        context.buffer_size_bytes = buffers.size
        try:
            yield
        finally:
            context.buffer_size_bytes = before


def _is_news(record: logging.LogRecord) -> bool:
    """False for Ray's tracebacks of the fact that it could not cancel the loop of an actor that is dead."""
    error = record.exc_info[1] if record.exc_info else None
    return not isinstance(error, actor_errors())
