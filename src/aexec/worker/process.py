"""The worker process: from the descriptor it inherits to its exit code."""

from __future__ import annotations

import dataclasses
import fcntl
import pickle
import socket
import sys
import termios
from collections.abc import Callable
from typing import Any

from aexec.errors import ChannelClosed, ProtocolError
from aexec.messages.process import Launch, PhaseReached
from aexec.transport import BlockingChannel, Kind, Writer
from aexec.worker.bootstrap import become_worker, prepare_process
from aexec.worker.context import Progress, WorkerContext, no_progress
from aexec.worker.control import ControlThread
from aexec.worker.device import DeviceThread
from aexec.worker.exits import ORPHANED, flush_output, vanish
from aexec.worker.rank import RankState

__all__ = ("serve",)

_UNTIL_ANSWERED = 5.0  # seconds that the main thread, which is through, waits for the control thread


def serve(fd: int) -> int:
    """Be one rank until the driver says otherwise; the exit code of the process.

    Call it on the main thread of a process of its own, with nothing else going on. When the
    driver goes away it does not return: the process ends.

    Args:
        fd: The work line, a connected socket; it is owned from here on.
    """
    prepare_process()
    sock = socket.socket(fileno=fd)
    sock.set_inheritable(False)
    writer = Writer()
    line = BlockingChannel(sock, writer, name="driver work")
    try:
        line.send(Kind.EVENT, 0, PhaseReached("spawned"))
        launch, control_fd = _receive_launch(line)
        if not become_worker(launch):
            vanish(ORPHANED)
        line.spin_for(launch.spin)
        rank = RankState(launch.rank)
        rank.has_queued = lambda: _has_bytes(sock)
        control = ControlThread(
            socket.socket(fileno=control_fd), writer, rank, work=sock, driver=launch.driver_pid, wake=line.wake
        )
        return _be_worker(launch, line, writer, rank, control)
    except ChannelClosed:
        flush_output()
        vanish(ORPHANED)


def _receive_launch(line: BlockingChannel) -> tuple[Launch, int]:
    frame = line.receive()
    if frame is None or not isinstance(frame.value, Launch) or len(frame.fds) != 1:
        raise ProtocolError(f"a worker process was sent {frame!r}: expected a Launch with one descriptor")
    return frame.value, frame.fds[0]


def _be_worker(launch: Launch, line: BlockingChannel, writer: Writer, rank: RankState, control: ControlThread) -> int:
    control.start()
    line.send(Kind.EVENT, 0, PhaseReached("connected"))
    code = DeviceThread(line, rank, control).run(lambda: _context(launch, control))
    if rank.ending:
        control.post(control.lane.main_thread_ended)
        control.lane.answered.wait(_UNTIL_ANSWERED)
    if not control.close():  # a thread of its loop's own works on: it would keep the interpreter from ending
        flush_output()
        vanish(code)
    line.close()
    writer.close()
    return code


def _context(launch: Launch, control: ControlThread) -> WorkerContext:
    """May import anything: the worker class comes along."""
    context: WorkerContext = pickle.loads(launch.context)  # noqa: S301 - from our own driver
    return dataclasses.replace(context, progress=_Progress(control))


class _Progress:
    """Reports to the driver; of a context that travels it stays behind."""

    def __init__(self, control: ControlThread) -> None:
        self._control = control

    def __call__(self, phase: str, done: float, total: float) -> None:
        self._control.progress(phase, done, total)

    def __reduce__(self) -> tuple[Callable[[], Progress], tuple[()]]:
        return _nobody, ()


def _nobody() -> Progress:
    return no_progress


def _has_bytes(sock: socket.socket) -> bool:
    try:
        waiting: Any = fcntl.ioctl(sock, termios.FIONREAD, bytes(4))
    except (OSError, ValueError):  # it was closed
        return False
    return int.from_bytes(waiting, sys.byteorder) > 0
