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
from aexec.parallel.rendezvous import network_environment
from aexec.worker.placement import installed_devices

__all__ = ("installed_devices", "recipe_of")

ENTRY = "aexec.worker.process:serve"
_OURS = "aexec.worker.model_worker:ModelWorker"
_LIGHT = ("aexec.worker.process",)
# The last is what every class of models imports, half a thousand modules: by the fork server once, not by each rank.
_HEAVY = ("torch", "aexec.model.transformer.runner", "transformers.modeling_utils")


def recipe_of(config: ExecutorConfig, ranks: int, host: str = "") -> Recipe:
    """How the workers of ``config`` are made.

    Args:
        config: The executor's settings.
        ranks: Workers of this node.
        host: This node's address for other nodes, about which the kernel is asked; empty: there are none.
    """
    cpus, here = len(os.sched_getaffinity(0)), environ.inherited()
    network = network_environment(host, here) if host else None
    env = group_environment(here, config, ranks=ranks, cpus=cpus, never=environ.excluded(), network=network)
    fresh = config.start_method == "spawn"
    command = (sys.executable, "-m", "aexec.worker") if fresh else ()
    if fresh:
        env["PYTHONPATH"] = os.pathsep.join(_import_path(env))
    return Recipe(entry=ENTRY, command=command, preload=() if fresh else _preload(config), env=env)


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
