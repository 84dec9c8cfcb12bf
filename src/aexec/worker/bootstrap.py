"""What a worker process does to itself before it does anything else."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import importlib
import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path

from aexec import environ
from aexec.messages.process import Launch
from aexec.observe import bind_rank, configure_logging
from aexec.worker.placement import num_threads

__all__ = ("become_worker", "environment", "prepare_process", "title")

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_TITLE = 15  # characters that the kernel keeps


def prepare_process() -> None:
    """Before the driver has said anything: end with the parent, leave Ctrl-C to the driver, show native crashes.

    The process is ours alone, so its signal handlers are too.
    """
    _end_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with contextlib.suppress(ValueError, OSError):  # standard error is no file
        faulthandler.enable()


def become_worker(launch: Launch, *, is_ours: bool = True) -> bool:
    """Take on name, environment, processors and logging; False: the parent is gone already.

    Args:
        launch: Who it is.
        is_ours: The process was made by us, on the driver's node: its import path is the driver's.
            Else it has one that fits its place, and the driver's comes behind it.
    """
    if is_ours and launch.parent_pid and os.getppid() != launch.parent_pid:
        return False
    _set_title(title(launch.rank))
    environ.change(environment(environ.inherited(), launch, len(os.sched_getaffinity(0))))
    if launch.cpus:
        os.sched_setaffinity(0, launch.cpus)
    if launch.sys_path:
        sys.path[:] = launch.sys_path if is_ours else dict.fromkeys((*sys.path, *launch.sys_path))
        importlib.invalidate_caches()
    bind_rank(launch.rank)
    if launch.log_level:
        configure_logging(launch.log_level, launch.log_format or "json")
    return True


def environment(here: Mapping[str, str], launch: Launch, cpus: int) -> dict[str, str | None]:
    """What changes in the environment: None removes a variable.

    The number of threads is a default: whoever has set it keeps it.
    """
    changes = dict(launch.env)
    if "OMP_NUM_THREADS" not in here and "OMP_NUM_THREADS" not in changes:
        changes["OMP_NUM_THREADS"] = str(num_threads(len(launch.cpus) or cpus, launch.local_world_size))
    return changes


def title(rank: int) -> str:
    """Name of the process in ``ps`` and ``top``: ``aexec:worker 2``."""
    name = f"aexec:worker {rank}"
    return name if len(name) <= _TITLE else f"aexec:{rank}"[:_TITLE]


def _end_with_parent() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def _set_title(name: str) -> None:
    with contextlib.suppress(OSError):
        Path("/proc/self/comm").write_text(name, encoding="ascii")
