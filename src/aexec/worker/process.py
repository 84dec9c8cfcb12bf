"""The worker process: from the line that it is given to its exit code.

:func:`serve` is for a process that we have made and that is ours alone, :func:`serve_lines`
for one that somebody else has made, as a Ray actor: its signal handlers, its parent and its
import path are not ours to change, and it may be on another node than the driver.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import pickle
import socket
import sys
import termios
from collections.abc import Callable, Generator
from typing import Any

from aexec.errors import ChannelClosed, ProtocolError
from aexec.messages.process import Launch, PhaseReached
from aexec.transport import BlockingChannel, Kind, Writer
from aexec.transport.meeting import peer_pid
from aexec.worker.bootstrap import become_worker, prepare_process
from aexec.worker.context import Progress, WorkerContext, no_progress
from aexec.worker.control import ControlThread
from aexec.worker.device import DeviceThread, StepRoad
from aexec.worker.exits import ORPHANED, flush_output, vanish
from aexec.worker.rank import RankState

__all__ = ("Complete", "MakeRoad", "serve", "serve_lines")

MakeRoad = Callable[[BlockingChannel, RankState], StepRoad]
"""Makes of the work line what the device thread is to receive from, and to answer on."""

Complete = Callable[[WorkerContext], WorkerContext]
"""Adds to a context what this process alone has."""

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
    with _ends_with_its_driver():
        writer, line = _open(sock)
        launch, control_fd = _receive_launch(line)
        if not become_worker(launch):
            vanish(ORPHANED)
        control = socket.socket(fileno=control_fd)
        return _be_worker(launch, sock, line, control, writer, driver=launch.driver_pid)


def serve_lines(
    work: socket.socket,
    control: socket.socket,
    *,
    make_road: MakeRoad | None = None,
    complete: Complete | None = None,
) -> int:
    """Be one rank until the driver says otherwise; what would be the exit code of a process of ours.

    Call it on the thread that is to use the device. It leaves alone what it does not know to
    be its own: signal handlers, what happens when the parent ends, and the import path, which
    it only adds to. When the driver goes away it does not return: the process ends. The
    driver's end is seen by its pid where that means something here, and by the lines anywhere.

    Args:
        work: The work line, connected; it is owned from here on.
        control: The control line; likewise.
        make_road: Where step messages take another road; None: they come by the work line.
        complete: Adds to the worker's context what only this process has.

    Returns:
        0 when the driver has ended it; else worker code has, as with ``sys.exit``, and the
        process is expected to end now.
    """
    with _ends_with_its_driver():
        writer, line = _open(work)
        launch, _ = _receive_launch(line, fds=0)
        become_worker(launch, is_ours=False)
        driver = peer_pid(work) if work.family == socket.AF_UNIX else 0
        return _be_worker(
            launch, work, line, control, writer, driver=driver, make_road=make_road, complete=complete, is_ours=False
        )


@contextlib.contextmanager
def _ends_with_its_driver() -> Generator[None]:
    try:
        yield
    except ChannelClosed:
        flush_output()
        vanish(ORPHANED)


def _open(sock: socket.socket) -> tuple[Writer, BlockingChannel]:
    writer = Writer()
    line = BlockingChannel(sock, writer, name="driver work")
    line.send(Kind.EVENT, 0, PhaseReached("spawned"))
    return writer, line


def _receive_launch(line: BlockingChannel, fds: int = 1) -> tuple[Launch, int]:
    frame = line.receive()
    if frame is None or not isinstance(frame.value, Launch) or len(frame.fds) != fds:
        raise ProtocolError(f"a worker process was sent {frame!r}: expected a Launch with {fds} descriptors")
    return frame.value, frame.fds[0] if fds else -1


def _be_worker(
    launch: Launch,
    sock: socket.socket,
    line: BlockingChannel,
    control_end: socket.socket,
    writer: Writer,
    *,
    driver: int,
    make_road: MakeRoad | None = None,
    complete: Complete | None = None,
    is_ours: bool = True,
) -> int:
    writer.limit_to(launch.arena_bytes)
    line.spin_for(launch.spin)
    rank = RankState(launch.rank)
    rank.has_queued = lambda: line.has_more or _has_bytes(sock)
    road = make_road(line, rank) if make_road else line
    control = ControlThread(control_end, writer, rank, work=sock, driver=driver, wake=line.wake)
    control.start()
    line.send(Kind.EVENT, 0, PhaseReached("connected"))
    code = DeviceThread(road, rank, control).run(lambda: _context(launch, control, complete))
    if rank.ending:
        control.post(control.lane.main_thread_ended)
        control.lane.answered.wait(_UNTIL_ANSWERED)
    if (
        not control.close() and is_ours
    ):  # a thread of its loop's own works on: it would keep the interpreter from ending
        flush_output()
        vanish(code)
    line.close()
    writer.close()
    return code


def _context(launch: Launch, control: ControlThread, complete: Complete | None) -> WorkerContext:
    """May import anything: the worker class comes along."""
    context: WorkerContext = pickle.loads(launch.context)  # noqa: S301 - from our own driver
    context = dataclasses.replace(context, progress=_Progress(control))
    return complete(context) if complete else context


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
