"""What a piece of code has left behind: actors, tasks, threads, processes, descriptors, shared memory.

::

    async with LeakCheck():
        ...

The ``leak_check`` fixture of the pytest plugin is one around a test.
"""

from __future__ import annotations

import asyncio
import gc
import os
import re
import socket
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, Self

import anyio

from aexec.actor.absent import open_cores

__all__ = ("LeakCheck", "Leaked", "belongings", "tasks")

PAUSE, LONGEST_PAUSE = 0.01, 0.1  # seconds between two looks
# Threads of other people's pools, which live as long as their loop, or as the process.
POOLS = ("AnyIO worker thread", "Trio thread", "asyncio_", "tqdm", "TMonitor")
RUNNER = " TestRunner."  # tasks of anyio's, in which its plugin runs tests and fixtures
TIMER = "aexec timer"  # a deadline of an open system, which is looked at itself

_PROC = Path("/proc/self")
_MEMORY = Path("/dev/shm")  # noqa: S108 - where shared memory is, not a place for files of ours

_RAY_FILES = re.compile(r"/session_[-\d_]+/")

Belongings = Mapping[object, str]


class Leaked(AssertionError):
    """Something was left behind.

    Attributes:
        left: What, in words.
    """

    def __init__(self, left: Collection[str]) -> None:
        super().__init__(tuple(left))
        self.left = tuple(left)

    def __str__(self) -> str:
        return "\n".join(["left behind:", *(f"  {what}" for what in self.left)])


class LeakCheck:
    """Fails unless all that a block has begun has ended with it.

    As an ``async with`` block it looks at the tasks of the loop too, which it cannot see
    from outside of it. Where there is no ``/proc``, it looks at actors, tasks and threads.

    Args:
        patience: Seconds that what was ended may take to be gone.
        ignore: What is left out: pieces of the lines that a failure prints.

    Raises:
        Leaked: Something is left.
    """

    def __init__(self, *, patience: float = 5.0, ignore: Collection[str] = ()) -> None:
        self._patience, self._ignore = patience, tuple(ignore)
        self._before: Belongings = {}

    def __repr__(self) -> str:
        return f"<LeakCheck: {len(self._before)} belongings before>"

    def __enter__(self) -> Self:
        self._before = belongings()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:  # a block that failed has said what is wrong
            for pause in self._looks(belongings):
                threading.Event().wait(pause)

    async def __aenter__(self) -> Self:
        self._before = {**belongings(), **tasks()}
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            for pause in self._looks(lambda: {**belongings(), **tasks()}):
                await anyio.sleep(pause)

    def _looks(self, look: Callable[[], Belongings]) -> Iterator[float]:
        """Look until all is gone; yields how long to wait for the next look."""
        give_up, pause = time.monotonic() + self._patience, PAUSE
        while left := self._left(look()):
            if time.monotonic() > give_up:
                raise Leaked(sorted(left))
            if pause > PAUSE:  # most is gone in a moment, and a collection may take a third of a second
                gc.collect()
            yield pause
            pause = min(2 * pause, LONGEST_PAUSE)

    def _left(self, now: Belongings) -> list[str]:
        lines = [line for key, line in now.items() if key not in self._before]
        return [line for line in lines if not any(piece in line for piece in self._ignore)]


def belongings() -> dict[object, str]:
    """All that this process has that may be left behind, in words, by what tells it from others."""
    return {**_actors(), **_threads(), **_children(), **_descriptors(), **_memory()}


def tasks() -> dict[object, str]:
    """The tasks of the loop that runs here, but for the one that asks: a fixture ends in another than it began in."""
    trio = sys.modules.get("trio")
    if trio is not None and trio.lowlevel.in_trio_task():
        here = trio.lowlevel.current_task()
        found = _trio_tasks(trio.lowlevel.current_root_task())
        return {id(task): f"task {task.name}" for task in found if task is not here and task.name != TIMER}
    others = {task: f"task {task.get_name()}: {task.get_coro()!r}" for task in asyncio.all_tasks()}
    return {
        id(task): line for task, line in others.items() if task is not asyncio.current_task() and RUNNER not in line
    }


def _trio_tasks(root: Any) -> Iterator[Any]:
    for nursery in root.child_nurseries:
        for task in nursery.child_tasks:
            if not task.name.startswith("trio._"):  # its own, as one that serves its threads
                yield task
            yield from _trio_tasks(task)


def _actors() -> dict[object, str]:
    found: dict[object, str] = {}
    for core in open_cores():
        found[core.uid] = f"actor system {core.name}, open on {core.runtime}"
        for cell in list(core.cells.values()):
            found[cell.address] = f"actor {cell.mailbox.describe(cell.state.value)}, in system {core.name}"
    return found


def _threads() -> dict[object, str]:
    return {
        ("thread", thread.ident): f"thread {thread.name}"
        for thread in threading.enumerate()
        if not thread.name.startswith(POOLS) and "TMonitor" not in thread.name
    }


def _children() -> dict[object, str]:
    pids = [pid for task in _PROC.glob("task/*/children") for pid in _read(task).split()]
    return {("process", pid): f"process {pid}: {_command(pid)}" for pid in pids}


def _command(pid: str) -> str:
    text = _read(Path("/proc", pid, "cmdline")).replace("\0", " ")
    return text[:120].strip() or "it has ended, and nobody has waited for it"


def _read(path: Path) -> str:
    """The beginning of a file of the kernel's, which is there at once: a loop may do it."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return ""  # a thread or process that has just ended
    try:
        return os.read(descriptor, 65536).decode(errors="replace")
    finally:
        os.close(descriptor)


def _descriptors() -> dict[object, str]:
    folder, in_ray = _PROC / "fd", _is_in_ray()
    found: dict[object, str] = {}
    for name in os.listdir(folder) if folder.exists() else ():  # noqa: PTH208 - as is written in _read
        try:
            target = str((folder / name).readlink())
        except FileNotFoundError:
            continue  # the descriptor of this very scan
        if not target.startswith("/proc/") and not (in_ray and _is_of_ray(name, target)):
            found["fd", name, target] = f"fd {name} to {target}"
    return found


def _is_in_ray() -> bool:
    """This process has joined a Ray cluster, whose connections come and go with the cluster's processes."""
    ray = sys.modules.get("ray")
    return ray is not None and bool(ray.is_initialized())


def _is_of_ray(descriptor: str, target: str) -> bool:
    """An end of TCP that does not listen, which aexec has none of on one node, or a line to one of Ray's sockets."""
    if not target.startswith("socket:"):
        return _RAY_FILES.search(target) is not None
    try:
        with socket.socket(fileno=os.dup(int(descriptor))) as end:
            if end.family != socket.AF_UNIX:
                return not end.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
            return _RAY_FILES.search(str(end.getpeername())) is not None
    except OSError:
        return False  # it has no other end, or is closed by now


def _memory() -> dict[object, str]:
    ours = ("aexec", f"torch_{os.getpid()}")
    names = os.listdir(_MEMORY) if _MEMORY.exists() else ()  # noqa: PTH208 - nodes of Ray leave thousands there
    return {("memory", name): f"shared memory {name}" for name in names if name.startswith(ours)}
