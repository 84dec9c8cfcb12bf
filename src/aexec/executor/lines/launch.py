"""What a worker process is told first: all of it but what only whoever made the process knows."""

from __future__ import annotations

import os
import sys
from typing import Any

from aexec import environ
from aexec.config import ExecutorConfig
from aexec.errors import ConfigError
from aexec.messages.process import Launch
from aexec.observe import log_format
from aexec.transport import affordable_spin
from aexec.transport.pickling import pickled
from aexec.worker.context import WorkerContext

__all__ = ("import_path", "launch_of", "portable", "spin_of")

_SPIN = 200e-6  # seconds; less than what a round trip takes to a process that sleeps is never begun


def launch_of(
    place: WorkerContext,
    *,
    local_world_size: int,
    spin: float,
    driver_pid: int | None = None,
    parent_pid: int = 0,
    cpus: tuple[int, ...] = (),
    env: dict[str, str | None] | None = None,
) -> Launch:
    """What the worker of a place is told.

    Args:
        place: The rank's.
        local_world_size: Workers of the group on its node.
        spin: Seconds that it polls its work line before it sleeps.
        driver_pid: Whose end is the worker's; None: this process. 0: nobody's that it can
            see, as on another node.
        parent_pid: See :class:`Launch`, as for the rest.
        cpus: Processors to run on.
        env: Variables to set or to remove.

    Raises:
        ConfigError: The place cannot travel.
    """
    return Launch(
        rank=place.rank,
        local_world_size=local_world_size,
        driver_pid=os.getpid() if driver_pid is None else driver_pid,
        parent_pid=parent_pid,
        context=portable(place),
        sys_path=tuple(import_path()),
        env=env or {},
        cpus=cpus,
        log_level=environ.LOG_LEVEL.read(),
        log_format=log_format(sys.stderr),
        spin=spin,
        arena_bytes=int(place.config.arena_bytes),
    )


def spin_of(config: ExecutorConfig) -> float:
    """Seconds that ranks and driver poll for what is about to come."""
    return affordable_spin(_SPIN) if config.spin is None else config.spin


def portable(place: WorkerContext | ExecutorConfig) -> bytes:
    """A place, or the settings, by cloudpickle.

    Raises:
        ConfigError: Something that the user gave cannot travel.
    """
    try:
        return pickled(place)
    except Exception as error:
        raise ConfigError(
            f"worker_cls, worker_kwargs or worker_init cannot travel to a process of their own: {error}. "
            "Give names ('package.module:Class') and plain values, or make such objects in the worker"
        ) from error


def import_path() -> list[str]:
    """``sys.path``, as far as Python looks at it: objects of other kinds mean nothing there, and cannot travel."""
    entries: list[Any] = sys.path
    return [entry for entry in entries if isinstance(entry, str)]
