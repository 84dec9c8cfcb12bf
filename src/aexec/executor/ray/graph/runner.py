"""One graph in use: written to on the executor's loop, read by one thread, and watched.

Nobody but these touches its channels, so no cancelled or timed-out waiter can reach them. Where
all ranks are on the driver's node a write finds a free buffer, as no more executions are in
flight than there are buffers, and takes microseconds; else a second thread writes, for then each
write waits until the one before has crossed the network.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
import time
from collections.abc import Callable
from typing import Any

from aexec.executor.ray.api import actor_errors, ray
from aexec.executor.ray.graph.build import BuiltGraph

__all__ = ("GraphRunner",)

_SPIN = 0.002  # seconds that a read may last, for Ray waits by polling, with all of a core
_PAUSE = 1 / 20  # of the time waited so far, between two looks at what takes longer
_PAUSES = (1e-4, 1e-2)  # seconds, at least and at most
_AT_ONCE = (
    0.25  # seconds for a write that finds a free buffer; of none at all a reader that just looks would be too much
)
_TO_END = 1.0

OnResult = Callable[[list[Any]], None]


class _Ending(Exception):
    """The thread is to end."""


class GraphRunner:
    """Runs executions of a graph, in order.

    Args:
        graph: The graph; the caller takes it down, after :meth:`end`.
        buffers: Executions that may be in flight.
        write_timeout: Seconds for a write of the second thread; None: the loop itself writes.
        on_result: Told on the loop of what comes out of an execution, by rank of the last
            stage; not told of one that has nothing to say.
        on_break: Told on the loop, once, that no more will come, and why.
    """

    def __init__(
        self,
        graph: BuiltGraph,
        buffers: int,
        *,
        write_timeout: float | None,
        on_result: OnResult,
        on_break: Callable[[BaseException], None],
    ) -> None:
        self._graph, self._buffers, self._write_timeout = graph, buffers, write_timeout
        self._on_result, self._on_break = on_result, on_break
        self._loop = asyncio.get_running_loop()
        self._to_read: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._to_write: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._written = self._read = 0
        self._wants_room = self._told = False
        self._stop = threading.Event()
        self._ended = [self._start(self._read_all, "read")]
        if write_timeout is not None:
            self._ended.append(self._start(self._write_all, "write"))
        self._watching = [asyncio.wrap_future(ref.future()) for ref in graph.loops]
        for watch in self._watching:
            watch.add_done_callback(self._loop_ended)

    def __repr__(self) -> str:
        return f"<GraphRunner: {self.in_flight} of {self._buffers} in flight, {self._read} done>"

    @property
    def in_flight(self) -> int:
        """Executions whose results have not come out yet."""
        return self._written - self._read

    def culprit(self, error: BaseException) -> tuple[int, BaseException]:
        """Whose part of a broken graph has ended by itself, as far as is known by now, and of what.

        Args:
            error: What the graph broke off with.
        """
        for rank, watch in enumerate(self._watching):
            if watch.done() and not watch.cancelled() and isinstance(watch.exception(), actor_errors()):
                return rank, watch.exception() or error
        return 0, error

    def has_room(self) -> bool:
        """Another execution may be started; if not, ``on_result`` is told, with nothing, once there may."""
        if self.in_flight < self._buffers:
            return True
        self._wants_room = True
        return self.in_flight < self._buffers  # or the thread has read one in between, and has seen no wish

    def execute(self, message: bytes, *, heard: bool = False) -> None:
        """Start an execution; there has to be room.

        Args:
            message: What is written.
            heard: ``on_result`` is told of what comes out next, though that may be nothing.

        Raises:
            Exception: Ray's: the graph is broken.
        """
        self._written += 1
        self._wants_room |= heard
        if self._write_timeout is None:
            self._graph.write(message, _AT_ONCE)
        else:
            self._to_write.put(message)
        self._to_read.put(True)

    def stop(self) -> None:
        """Have the threads end, as soon as they can."""
        self._told = True
        self._stop.set()
        for watch in self._watching:
            watch.remove_done_callback(self._loop_ended)
            watch.add_done_callback(_hear)
        self._to_read.put(False)
        self._to_write.put(None)

    async def end(self) -> bool:
        """Stop the threads; False: one is stuck in a read or a write, until the graph is taken down."""
        self.stop()
        try:
            async with asyncio.timeout(_TO_END):
                for ended in self._ended:
                    await ended.wait()
        except TimeoutError:
            return False
        return True

    # Threads.

    def _start(self, work: Callable[[], None], name: str) -> asyncio.Event:
        ended = asyncio.Event()

        def run() -> None:
            try:
                work()
            except BaseException as error:  # noqa: BLE001 - whatever Ray raises, no more will come
                self._post(self._broke, error)
            self._post(ended.set)

        threading.Thread(target=run, name=f"aexec-graph-{name}", daemon=True).start()
        return ended

    def _read_all(self) -> None:
        while self._to_read.get():
            values = self._read_one()
            if values is None:
                return
            self._read += 1
            if self._wants_room or any(values):
                self._wants_room = False
                self._post(self._on_result, values)
            del values

    def _read_one(self) -> list[Any] | None:
        """What comes out of the next execution, in order of ranks; None: it is to end."""
        values: list[Any] = []
        for channel in self._graph.outputs:
            try:
                values.append(self._patiently(channel))
            except _Ending:
                return None
        return values

    def _patiently(self, channel: Any) -> Any:
        late = ray().exceptions.RayChannelTimeoutError
        began, timeout = time.monotonic(), _SPIN
        while True:
            try:
                return channel.read(timeout)
            except late:
                timeout = 0
            least, most = _PAUSES
            if self._stop.wait(min(max((time.monotonic() - began) * _PAUSE, least), most)):
                raise _Ending

    def _write_all(self) -> None:
        while (message := self._to_write.get()) is not None:
            self._graph.write(message, self._write_timeout or _AT_ONCE)

    def _post(self, function: Callable[..., None], *args: Any) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(function, *args)

    # On the loop.

    def _loop_ended(self, watch: asyncio.Future[Any]) -> None:
        if watch.cancelled():
            return
        self._broke(watch.exception() or RuntimeError("Ray ended the graph's loop in an actor"))

    def _broke(self, error: BaseException) -> None:
        if not self._told:
            self._told = True
            self._on_break(error)


def _hear(watch: asyncio.Future[Any]) -> None:
    """Its error is nobody's any longer."""
    if not watch.cancelled():
        watch.exception()
