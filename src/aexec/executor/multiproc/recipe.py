"""From the executor's settings to how its worker processes are made. Pure but for what the node has."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from aexec import environ
from aexec.config import ExecutorConfig, ModelConfig
from aexec.executor.lines.environment import group_environment
from aexec.executor.multiproc.spawn import Recipe
from aexec.model.dummy.settings import is_dummy

__all__ = ("installed_devices", "recipe_of")

ENTRY = "aexec.worker.process:serve"
_OURS = "aexec.worker.model_worker:ModelWorker"
_LIGHT = ("aexec.worker.process",)
_HEAVY = ("torch", "aexec.model.transformer.runner")


def recipe_of(config: ExecutorConfig, ranks: int) -> Recipe:
    """How the workers of ``config`` are made, ``ranks`` of them on this node."""
    cpus = len(os.sched_getaffinity(0))
    env = group_environment(environ.inherited(), config, ranks=ranks, cpus=cpus, never=environ.excluded())
    fresh = config.start_method == "spawn"
    command = (sys.executable, "-m", "aexec.worker") if fresh else ()
    if fresh:
        env["PYTHONPATH"] = os.pathsep.join(_import_path(env))
    return Recipe(entry=ENTRY, command=command, preload=() if fresh else _preload(config), env=env)


def installed_devices(proc: Path = Path("/proc")) -> tuple[str, ...]:
    """The NVIDIA devices of this node by number, as its driver lists them; no CUDA library is loaded."""
    folder = proc / "driver/nvidia/gpus"
    return tuple(str(number) for number in range(len(list(folder.iterdir())))) if folder.is_dir() else ()


def _import_path(env: dict[str, str]) -> list[str]:
    """Where a fresh interpreter finds aexec itself: the rest of ``sys.path`` follows with the launch."""
    home = str(Path(__file__).parents[3])
    given = [path for path in env.get("PYTHONPATH", "").split(os.pathsep) if path]
    return given if home in given else [*given, home]


def _preload(config: ExecutorConfig) -> tuple[str, ...]:
    if config.preload is not None:
        return (*_LIGHT, *config.preload)
    model = config.worker_kwargs.get("model_config")
    loads = config.worker_cls == _OURS and isinstance(model, ModelConfig) and not is_dummy(model.model)
    return (*_LIGHT, *_HEAVY) if loads else _LIGHT
