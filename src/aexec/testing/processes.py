"""What a test has to know of other processes: who descends from whom, who has ended, what one costs.

Linux only: it reads ``/proc`` and waits on pidfds, so it sees a process end whoever its
parent is, and never mistakes a new process for an old one of the same number.
"""

from __future__ import annotations

import os
import select
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Self

__all__ = ("ProcessWatch", "cpu_seconds", "descendants", "state_of")

_PROC = Path("/proc")
_TICKS = os.sysconf("SC_CLK_TCK")


class ProcessWatch:
    """Holds on to processes, to see them end.

    Args:
        pids: Which; those that have ended already are left out.
    """

    def __init__(self, pids: Iterable[int]) -> None:
        self._descriptors: dict[int, int] = {}  # descriptor to pid
        for pid in dict.fromkeys(pids):
            try:
                self._descriptors[os.pidfd_open(pid)] = pid
            except ProcessLookupError:
                continue

    def __repr__(self) -> str:
        return f"<ProcessWatch: {self.alive()} alive of {len(self._descriptors)}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def alive(self, timeout: float = 0.0) -> list[int]:
        """Wait until all have ended, or for so many seconds; the pids of those that have not."""
        give_up = time.monotonic() + timeout
        poll = select.poll()
        for descriptor in self._descriptors:
            poll.register(descriptor, select.POLLIN)
        left = dict(self._descriptors)
        while left:
            remaining = max(give_up - time.monotonic(), 0.0)
            ended = poll.poll(remaining * 1000)
            for descriptor, _ in ended:
                poll.unregister(descriptor)
                del left[descriptor]
            if not ended and not remaining:
                break
        return sorted(left.values())

    def close(self) -> None:
        """Let go of them."""
        for descriptor in self._descriptors:
            os.close(descriptor)
        self._descriptors.clear()


def descendants(pid: int | None = None) -> list[int]:
    """Children, their children and so on, of a process or of this one; those that have ended are left out."""
    found: list[int] = []
    waiting = [os.getpid() if pid is None else pid]
    while waiting:
        children = [child for child in _children(waiting.pop()) if not _is_zombie(child)]
        found += children
        waiting += children
    return found


def cpu_seconds(pid: int) -> float:
    """Processor time that a process has used so far, all of its threads, user and system."""
    fields = _stat(pid)
    return (int(fields[11]) + int(fields[12])) / _TICKS


def state_of(pid: int) -> str:
    """The state of a process by its letter: R runs, S sleeps, T is stopped, Z has ended; see proc(5)."""
    return _stat(pid)[0]


def _children(pid: int) -> list[int]:
    return [int(child) for task in _PROC.glob(f"{pid}/task/*/children") for child in _read(task).split()]


def _is_zombie(pid: int) -> bool:
    return state_of(pid) == "Z"


def _stat(pid: int) -> list[str]:
    """The fields after the name, the state first; see proc(5)."""
    return _read(_PROC / str(pid) / "stat").rpartition(")")[2].split() or ["Z", *("0" * 15)]


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return ""  # it has ended
