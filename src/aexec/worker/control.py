"""The second thread of a worker process: an event loop that answers whatever the main thread does.

It serves the control line: greetings, the liveness lane, ``async def`` methods, the order to
end. And it is what ends the process at once when the driver is gone, even while the main
thread is in native code; it needs the interpreter's lock for that, as any thread, and for code
that does not let go of it there is the kernel (``PR_SET_PDEATHSIG``).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import socket
import threading
import traceback
from collections.abc import Callable, Generator
from typing import Any

from aexec.errors import ChannelClosed, ChannelFull, ProtocolError
from aexec.messages.process import ProgressMade
from aexec.observe import bind_rank
from aexec.transport import Frame, Kind, LoopChannel, Writer
from aexec.worker.exits import ORPHANED, vanish
from aexec.worker.lane import ControlLane
from aexec.worker.rank import RankState

__all__ = ("ControlThread",)

_QUEUE = 8192  # frames that may wait for the driver: more than it has open calls
_TO_START = 10.0  # seconds for the loop to come up
_TO_END = 1.0


class ControlThread:
    """Runs the loop, and is the way onto it from other threads.

    Args:
        sock: The control line.
        writer: This process's.
        rank: What both threads know.
        work: The work line: its end is the end, whatever the main thread is doing.
        driver: The driver's pid; 0: it means nothing here, and the lines' end has to do.
        wake: Wakes the main thread up if it waits for the work line.
    """

    def __init__(
        self,
        sock: socket.socket,
        writer: Writer,
        rank: RankState,
        *,
        work: socket.socket,
        driver: int,
        wake: Callable[[], None],
    ) -> None:
        self._rank, self._work, self._driver = rank, work, driver
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._up = threading.Event()
        self._lock = threading.Lock()
        self._progress: dict[str, ProgressMade] = {}
        self._thread = threading.Thread(target=self._run, name=f"aexec-control-{rank.rank}", daemon=True)
        line = LoopChannel(sock, writer, self._receive, self._gone, name="driver control", queue=_QUEUE)
        self.lane = ControlLane(line, rank, wake)
        self._line = line

    def __repr__(self) -> str:
        return f"<ControlThread of {self._rank!r}: {self.lane!r}>"

    def start(self) -> None:
        """Begin to answer.

        Raises:
            ProtocolError: The loop did not come up.
        """
        self._thread.start()
        if not self._up.wait(_TO_START):
            raise ProtocolError(f"the control thread of {self._rank!r} did not come up in {_TO_START:g} s")

    def post(self, function: Callable[..., object], *args: Any) -> None:
        """Call it on the loop; from any thread."""
        with contextlib.suppress(RuntimeError):  # the loop has ended: so does the process
            self._loop.call_soon_threadsafe(function, *args)

    def progress(self, phase: str, done: float, total: float) -> None:
        """Report how far a phase has come; from any thread. If it comes too fast, the latest counts."""
        with self._lock:
            idle = not self._progress
            self._progress[phase] = ProgressMade(phase, done, total)
        if idle:
            self.post(self._report)

    def close(self) -> bool:
        """End the loop, once all answers are with the kernel; False: something holds it up."""
        self.post(self._stop.set)
        self._thread.join(_TO_END)
        return not self._thread.is_alive()

    def _run(self) -> None:
        bind_rank(self._rank.rank)
        try:
            with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
                runner.run(self._serve())
        except BaseException:  # noqa: BLE001 - without this thread nobody could reach the process
            traceback.print_exc()
            vanish(1)

    async def _serve(self) -> None:
        with _hang_up_of(self._work) as hang_up, _end_of(self._driver) as end:
            signs = [sign for sign in (hang_up, end) if sign >= 0]
            for sign in signs:
                self._loop.add_reader(sign, self._gone)
            self._line.open()
            self._up.set()
            try:
                await self._stop.wait()
                with contextlib.suppress(TimeoutError, ChannelClosed):
                    await self._line.flushed(_TO_END)
            finally:
                for sign in signs:
                    self._loop.remove_reader(sign)
                self.lane.close()
                self._line.close()

    def _receive(self, frame: Frame) -> None:
        self.lane.receive(frame)

    def _gone(self, _: object = None) -> None:
        """The driver is, or it has hung up."""
        if not self.lane.is_over:
            vanish(ORPHANED)
        self._stop.set()

    def _report(self) -> None:
        with self._lock:
            latest, self._progress = self._progress, {}
        for event in latest.values():
            with contextlib.suppress(ChannelFull):
                self._line.send(Kind.EVENT, 0, event)


@contextlib.contextmanager
def _hang_up_of(sock: socket.socket) -> Generator[int]:
    """A descriptor that becomes readable when the peer hangs up, and not when something comes."""
    with select.epoll() as epoll:
        epoll.register(sock, select.EPOLLRDHUP)
        yield epoll.fileno()


@contextlib.contextmanager
def _end_of(pid: int) -> Generator[int]:
    """A descriptor that becomes readable when a process ends; this one goes with it if it has ended already.

    -1 for no process.
    """
    if not pid:
        yield -1
        return
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        vanish(ORPHANED)
    try:
        yield pidfd
    finally:
        os.close(pidfd)
