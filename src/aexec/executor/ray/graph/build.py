"""The graph itself: one node for each rank, compiled and taken down by calls that block.

The driver's message goes to every rank directly; what a rank returns goes to the rank at its
place in the stage after, or, from the last stage, back to the driver.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import threading
import traceback
from collections.abc import Generator, Sequence
from typing import Any

from aexec.executor.ray.api import actor_errors, ray
from aexec.executor.ray.graph.buffers import Buffers
from aexec.parallel.layout import RankLayout

__all__ = ("BufferSize", "BuiltGraph", "build_graph")

_LOGGER = "ray.dag.compiled_dag_node"


class BufferSize:
    """How large Ray makes the buffers of a driver: one setting for all that its process compiles.

    Compilations that take place at the same time get the largest of what they want. None waits
    for another, which may hang because an actor of its own does.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._wanted: list[int] = []
        self._before = 0

    def __repr__(self) -> str:
        return f"<BufferSize: wanted {self._wanted}>"

    @contextlib.contextmanager
    def at_least(self, context: Any, size: int) -> Generator[None]:
        """While a compilation lasts.

        Args:
            context: Ray's ``DAGContext``; it counts, whatever the compilation is given as an argument.
            size: What it wants, bytes.
        """
        with self._lock:
            if not self._wanted:
                self._before = context.buffer_size_bytes
            self._wanted.append(size)
            context.buffer_size_bytes = max(self._wanted)
        try:
            yield
        finally:
            with self._lock:
                self._wanted.remove(size)
                context.buffer_size_bytes = max(self._wanted, default=self._before)


_BUFFER_SIZE = BufferSize()


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
        proxy = getattr(self._compiled, "_proxy_actor", None)  # an actor of Ray's own: it lives as long as its handle
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
    with _BUFFER_SIZE.at_least(dag.DAGContext.get_current(), buffers.size):
        try:
            compiled = root.experimental_compile(
                _max_inflight_executions=buffers.number, _overlap_gpu_communication=overlap
            )
        except BaseException as error:
            traceback.clear_frames(error.__traceback__)  # they have all that was made by then, an actor as well
            raise
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


def _is_news(record: logging.LogRecord) -> bool:
    """False for Ray's tracebacks of the fact that it could not cancel the loop of an actor that is dead."""
    error = record.exc_info[1] if record.exc_info else None
    return not isinstance(error, actor_errors())
