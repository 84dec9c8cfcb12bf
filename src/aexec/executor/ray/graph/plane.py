"""The graph as a step plane: built at start, taken down when idle, built again by the next step.

Steps queue while there is no graph, and while as many executions are in flight as there are
buffers. When it breaks off, whoever is in flight is told: by the group, at once, if a rank has
died, and by this plane a moment later if none has.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from aexec.config import ExecutorConfig
from aexec.errors import AexecError, CallTimeout, ProtocolError
from aexec.executor.ray.api import answer, off_loop, on_thread
from aexec.executor.ray.graph.buffers import most_in_flight, plan_buffers
from aexec.executor.ray.graph.build import BuiltGraph, build_graph
from aexec.executor.ray.graph.runner import GraphRunner
from aexec.executor.ray.graph.states import GraphEvent, GraphState, after
from aexec.executor.ray.plane import OnReply
from aexec.messages.step import ExecuteModel, SampleTokens
from aexec.observe import get_logger
from aexec.parallel.layout import RankLayout
from aexec.transport.flat import restore
from aexec.worker.roads import WAKE, step_message

__all__ = ("GraphPlane",)

_STEPS = 3  # of open(): prepared, compiled, warm
_TAKE_DOWN = 5.0  # seconds
_REST = 0.5  # seconds, likewise, before the workers end: they can be made to
_LET_DEATH_SPEAK = 1.0  # seconds from when the graph broke off, for the news that a rank has died


class GraphPlane:
    """The ``StepPlane`` over Ray's compiled graph, for one generation.

    Args:
        config: The executor's settings.
        actors: By rank; ``GraphStage`` is part of their class.
        transport: How tensors go from stage to stage: ``nccl`` or ``shm``.
        one_node: All ranks are on the driver's node.
        store: Bytes of the smallest object store of their nodes; None: not known.
        on_reply: Told of each answer that comes out of the graph.
        on_failure: Told of an answer that cannot be read.
        on_break: Told, a moment after the graph broke off, which rank's part of it has ended, and
            why: whoever is in flight waits for ever, unless that rank counts as dead.
        on_progress: Told how many of the steps of :meth:`open` are done.
    """

    def __init__(
        self,
        config: ExecutorConfig,
        actors: Sequence[Any],
        *,
        transport: str,
        one_node: bool,
        store: int | None,
        on_reply: OnReply,
        on_failure: Callable[[int, int, AexecError], None],
        on_break: Callable[[int, BaseException], None],
        on_progress: Callable[[int, int], None] = lambda _done, _total: None,
    ) -> None:
        self._config, self._actors, self._transport, self._one_node = config, actors, transport, one_node
        self._layout = RankLayout.of_replica(config.parallel)
        self._first_output = self._layout.output_rank()
        self._buffers = plan_buffers(self._layout, config.graph_buffer_bytes, store)
        self._limit = most_in_flight(self._buffers, one_node=one_node)
        self._on_progress = on_progress
        self._on_reply, self._on_failure, self._on_break = on_reply, on_failure, on_break
        self._state = GraphState.DOWN
        self._tensors: str | None = None
        self._graph: BuiltGraph | None = None
        self._runner: GraphRunner | None = None
        self._queue: deque[bytes] = deque()
        self._task: asyncio.Task[None] | None = None
        self._warm: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._used = 0.0  # when the last step came or was answered
        self._executed = self._most = self._built = 0
        self._build_seconds = 0.0

    def __repr__(self) -> str:
        flying = self._runner.in_flight if self._runner is not None else 0
        return (
            f"<GraphPlane graph: {self._state.value}, {flying} of {self._limit} in flight, "
            f"{len(self._queue)} wait, built {self._built} times>"
        )

    def statistics(self) -> Mapping[str, Any]:
        """Figures, for ``describe()`` and people."""
        return {
            "state": self._state.value,
            "executed": self._executed,
            "in_flight": self._runner.in_flight if self._runner is not None else 0,
            "waiting": len(self._queue),
            "most_in_flight": self._most,
            "buffers": self._buffers.number,
            "buffer_bytes": self._buffers.size,
            "tensors": self._tensors or "none",
            "built": self._built,
            "build_seconds": self._build_seconds,
        }

    async def open(self) -> None:
        """Build the graph and let one execution through it; all workers are constructed.

        Raises:
            AexecError: It cannot be built, or takes longer than ``graph_timeout``.
        """
        self._go(GraphEvent.WANTED)
        try:
            await self._prepare()
            self._on_progress(1, _STEPS)
            await self._build()
        except Exception as error:
            if self._state is GraphState.BUILDING:
                self._go(GraphEvent.BROKE)
            if isinstance(error, AexecError):
                raise
            await asyncio.sleep(_LET_DEATH_SPEAK)  # if a rank has died of it, that ends the start, and says more
            raise ProtocolError(f"Ray could not build the graph of the steps: {error!r}") from error
        self._on_progress(3, _STEPS)

    def submit(self, call: int, message: ExecuteModel | SampleTokens, calls_before: Sequence[int]) -> None:
        """Send a step message to all ranks, or queue it; never blocks.

        Raises:
            MessageTooLarge: It is larger than the graph's buffers.
            MessageNotPortable: It cannot travel.
        """
        data = step_message(call, message, calls_before, self._buffers.size)
        self._used = time.monotonic()
        runner = self._runner
        if self._state is GraphState.UP and runner is not None and not self._queue and runner.has_room():
            self._execute(runner, data)
            return
        self._queue.append(data)  # as many steps as the executor's gate lets through
        if self._state is GraphState.DOWN:
            self._go(GraphEvent.WANTED)
            self._task = asyncio.ensure_future(self._rebuild())

    async def rest(self) -> None:
        """Before the workers are told to end: if nothing is under way the graph goes first, for it would hold them up."""
        runner = self._runner
        if self._state is not GraphState.UP or self._queue or runner is None or runner.in_flight:
            return
        self._end()
        with contextlib.suppress(CallTimeout):
            await self._take_down(_REST)

    async def close(self) -> None:
        """Let go of everything, within a limit; twice is once. If the actors are dead by now, it is quick."""
        if self._state is not GraphState.CLOSED:
            self._end()
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.wait([task])
        try:
            await self._take_down(_TAKE_DOWN)
        except CallTimeout as late:
            get_logger("aexec.executor").warning("Ray does not take its graph down; left to itself", error=str(late))

    def abandon(self) -> None:
        """Let go without waiting for anything: a close was cut short; the threads end by themselves."""
        if self._state is not GraphState.CLOSED:
            self._end()
        if self._task is not None:
            self._task.cancel()
        runner, self._runner = self._runner, None
        graph, self._graph = self._graph, None
        if runner is not None:
            runner.stop()
        if graph is not None:
            on_thread("take the graph down", graph.take_down)

    # Steps.

    def _execute(self, runner: GraphRunner, data: bytes) -> None:
        try:
            runner.execute(data)
        except Exception as error:  # noqa: BLE001 - whatever Ray raises
            self._broke(error)
            return
        self._executed += 1
        self._most = max(self._most, runner.in_flight)

    def _answered(self, values: Sequence[Any]) -> None:
        """By rank of the last stage: what came out of one execution."""
        if self._warm is not None and not self._warm.done():
            self._warm.set_result(None)
        self._used = time.monotonic()
        for rank, value in enumerate(values, self._first_output):
            if isinstance(value, BaseException):
                self._broke(value)
            elif value:
                answers: Sequence[bytes] = (value,) if isinstance(value, bytes) else value
                for each in answers:
                    self._heard(rank, each)
        self._pump()

    def _heard(self, rank: int, value: bytes) -> None:
        frame = restore(f"graph of rank {rank}", value)
        if frame.error is not None:
            self._on_failure(frame.call, rank, frame.error)
        else:
            self._on_reply(frame.call, rank, frame.value)

    def _pump(self) -> None:
        runner = self._runner
        while self._queue and self._state is GraphState.UP and runner is not None and runner.has_room():
            self._execute(runner, self._queue.popleft())

    # The graph.

    def _go(self, event: GraphEvent) -> None:
        self._state = after(self._state, event)

    async def _rebuild(self) -> None:
        try:
            await self._build()
        except Exception as error:  # noqa: BLE001 - nobody awaits this: it is told
            self._broke(error)

    async def _prepare(self) -> None:
        by_device = self._transport == "nccl"
        asked = [actor.graph_prepare.remote(self._buffers.size, by_device=by_device) for actor in self._actors]
        have_tensors = await asyncio.gather(*map(answer, asked))
        if any(have_tensors) and self._layout.pipeline > 1:
            self._tensors = self._transport

    async def _build(self) -> None:
        began = time.monotonic()
        limit = self._config.graph_timeout
        self._graph = await off_loop("compile the graph", self._compile, timeout=limit, undo=BuiltGraph.take_down)
        if not self._built:
            self._on_progress(2, _STEPS)
        self._runner = GraphRunner(
            self._graph,
            self._limit,
            write_timeout=None if self._one_node else limit,
            on_result=self._answered,
            on_break=self._broke,
        )
        await self._warm_up(self._runner, limit)
        if self._state is not GraphState.BUILDING:
            raise ProtocolError("the graph broke off right after its first execution")
        self._built += 1
        self._build_seconds = time.monotonic() - began
        self._go(GraphEvent.BUILT)
        self._used = time.monotonic()
        self._pump()
        self._watch_idle()

    def _compile(self) -> BuiltGraph:
        overlap = self._config.graph_overlap and self._tensors == "nccl"
        return build_graph(self._actors, self._layout, self._buffers, tensors=self._tensors, overlap=overlap)

    async def _warm_up(self, runner: GraphRunner, limit: float) -> None:
        """The first execution imports and connects what the others use."""
        warm = self._warm = asyncio.get_running_loop().create_future()
        try:
            runner.execute(WAKE, heard=True)
            async with asyncio.timeout(limit):
                await warm
        except TimeoutError:
            raise CallTimeout("the first execution of the graph", limit, started=True) from None
        finally:
            self._warm = None

    def _broke(self, error: BaseException) -> None:
        """No more comes out of it."""
        if self._warm is not None and not self._warm.done():
            self._warm.set_exception(error)  # whoever builds it hears of it
            return
        if self._warm is not None and self._warm.exception() is not None:
            return  # as before
        if self._state in {GraphState.BROKEN, GraphState.CLOSED}:
            return
        self._go(GraphEvent.BROKE)
        self._cancel_timer()
        get_logger("aexec.executor").debug("the graph broke off", error=repr(error))
        self._timer = asyncio.get_running_loop().call_later(_LET_DEATH_SPEAK, self._tell, error)

    def _tell(self, error: BaseException) -> None:
        """No death was seen: the part of some rank has ended, or Ray has let go of it."""
        self._on_break(*(self._runner.culprit(error) if self._runner is not None else (0, error)))

    def _watch_idle(self) -> None:
        release = self._config.graph_idle_release
        if release is not None:
            wait = max(self._used + release - time.monotonic(), 0.0)
            self._timer = asyncio.get_running_loop().call_later(wait, self._look, release)

    def _look(self, release: float) -> None:
        runner = self._runner
        if self._state is not GraphState.UP or runner is None:
            return
        if runner.in_flight:
            self._used = time.monotonic()
        if self._queue or time.monotonic() - self._used < release:
            self._watch_idle()
            return
        self._go(GraphEvent.IDLE)
        self._task = asyncio.ensure_future(self._release())

    async def _release(self) -> None:
        try:
            await self._take_down(self._config.graph_timeout)  # a rank that a debugger holds may take long
        except Exception as error:  # noqa: BLE001 - nobody awaits this: it is told
            self._broke(error)
            return
        self._go(GraphEvent.RELEASED)
        if self._queue:
            self._go(GraphEvent.WANTED)
            await self._rebuild()

    async def _take_down(self, limit: float) -> None:
        """End the threads, and have Ray end the loops in the actors.

        Raises:
            CallTimeout: Ray does not; its thread goes on.
        """
        runner, self._runner = self._runner, None
        graph, self._graph = self._graph, None
        if runner is not None:
            await runner.end()
        if graph is not None:
            await off_loop("take the graph down", graph.take_down, timeout=limit)

    def _end(self) -> None:
        self._go(GraphEvent.CLOSE)
        self._queue.clear()
        self._cancel_timer()

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
