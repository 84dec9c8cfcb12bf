"""What must be there before anything is started, and which way hidden states take through the graph.

Facts are collected in one place (:func:`collect`; on the driver, and on each worker) and judged
by pure functions, so that what is missing is an error at the start, with the command that
mends it, and never one of the first request.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from aexec.config import ExecutorConfig
from aexec.errors import ConfigError, MissingExtra
from aexec.executor.ray import api

__all__ = ("OLDEST_RAY", "RayFacts", "Transport", "check_installed", "choose_transport", "collect", "preflight")

OLDEST_RAY = (2, 50)  #: As pyproject.toml has it.

_INSTALL_GRAPH = f"pip install -U 'ray[cgraph]>={OLDEST_RAY[0]}.{OLDEST_RAY[1]}'"
_INSTALL_CUPY = "pip install cupy-cuda12x"
_GRAPH_MODULES = ("ray.dag.compiled_dag_node", "ray.experimental.compiled_dag_ref")
_LIMIT = 60.0  # seconds; the first import of Ray, on a machine that has much else to do
# Looked for one by one: who has it of all that is installed takes a tenth of a second to find out, in each process.
_CUPY = ("cupy-cuda12x", "cupy-cuda13x", "cupy-cuda11x", "cupy-rocm-7-0", "cupy-rocm-6-4", "cupy-rocm-5-0", "cupy")


@dataclass(frozen=True, slots=True, kw_only=True)
class RayFacts:
    """What a process has of what ``ray`` can need.

    Attributes:
        ray: Version of Ray; None: not installed.
        graph: Why its compiled graphs cannot be imported; empty if they can.
        cupy: Version of CuPy; None: not installed.
        devices: CUDA devices of the node, whoever has them.
    """

    ray: str | None
    graph: str = ""
    cupy: str | None = None
    devices: int = 0


@dataclass(frozen=True, slots=True)
class Transport:
    """How hidden states travel in the graph.

    Attributes:
        name: ``nccl`` from device to device, or ``shm`` through host memory.
        reason: Why.
        hint: The command that would allow the faster one; empty: there is none.
    """

    name: Literal["nccl", "shm"]
    reason: str
    hint: str = ""


def collect(proc: Path = Path("/proc")) -> RayFacts:
    """The facts of this process; imports Ray's graphs, so it takes a second and is not for a loop."""
    found = _version("ray")
    gpus = proc / "driver/nvidia/gpus"
    return RayFacts(
        ray=found,
        graph=_why_no_graph() if found else "",
        cupy=_version_of_cupy(),
        devices=len(list(gpus.iterdir())) if gpus.is_dir() else 0,
    )


async def preflight(config: ExecutorConfig) -> RayFacts:
    """Check what this process has, before a cluster is joined.

    Raises:
        ConfigError: Something is missing or too old; has the command that mends it.
    """
    facts = await api.off_loop("preflight", collect, timeout=_LIMIT)
    check_installed(config, facts)
    return facts


def check_installed(config: ExecutorConfig, facts: RayFacts) -> None:
    """Judge the facts of the driver. Pure.

    Raises:
        ConfigError: Something is missing or too old, or settings exclude each other.
    """
    if facts.ray is None:
        raise MissingExtra("backend 'ray'", "ray", "ray")
    if _parsed(facts.ray) < OLDEST_RAY:
        wanted = ".".join(map(str, OLDEST_RAY))
        raise ConfigError(f"Ray is {facts.ray}: backend 'ray' needs {wanted} or later. {_INSTALL_GRAPH}")
    if config.ray_step_plane == "channel":
        return
    if facts.graph:
        raise ConfigError(
            f"Ray {facts.ray} has no compiled graphs ({facts.graph}), and ray_step_plane is 'compiled_graph'. "
            f"{_INSTALL_GRAPH}, or take ray_step_plane='channel', which needs none"
        )
    if config.graph_transport == "nccl":
        _check_nccl(config)
        if facts.cupy is None:
            raise _no_cupy("here")


def choose_transport(config: ExecutorConfig, resource: str, workers: Sequence[RayFacts]) -> Transport:
    """Decide how hidden states travel, from what the workers have. Pure.

    Args:
        config: The settings.
        resource: What a worker takes of its bundle, as Ray counts it.
        workers: Facts of each rank.

    Raises:
        ConfigError: What is asked for cannot be had.
    """
    asked = config.graph_transport
    no_device = next((rank for rank, facts in enumerate(workers) if not facts.devices), None)
    no_cupy = next((rank for rank, facts in enumerate(workers) if facts.cupy is None), None)
    if asked == "nccl":
        _check_nccl(config, resource)
        if no_device is not None:
            raise ConfigError(
                f"ExecutorConfig.graph_transport is 'nccl' and the node of rank {no_device} has no CUDA device: take "
                "graph_transport='shm', which needs neither CUDA nor CuPy"
            )
        if no_cupy is not None:
            raise _no_cupy(f"on the node of rank {no_cupy}")
        return Transport("nccl", "asked for")
    chosen = Transport("shm", "asked for") if asked == "shm" else _automatic(config, resource, no_device, no_cupy)
    if config.graph_overlap and chosen.name == "shm":
        mend = f". {chosen.hint}" if chosen.hint else ", or leave graph_overlap out"
        raise ConfigError(
            f"ExecutorConfig.graph_overlap is True and hidden states go through host memory ({chosen.reason}): only "
            f"'nccl' sends while it computes{mend}"
        )
    return chosen


def _automatic(config: ExecutorConfig, resource: str, no_device: int | None, no_cupy: int | None) -> Transport:
    obstacle = _obstacle(config, resource)
    if config.parallel.pipeline_parallel_size == 1:
        return Transport("shm", "one stage: no hidden states travel")
    if obstacle:
        return Transport("shm", obstacle)
    if no_device is not None:
        return Transport("shm", f"the node of rank {no_device} has no CUDA device")
    if no_cupy is not None:
        return Transport("shm", f"CuPy is not installed on the node of rank {no_cupy}", _INSTALL_CUPY)
    return Transport("nccl", "each rank has a CUDA device of its own")


def _check_nccl(config: ExecutorConfig, resource: str | None = None) -> None:
    obstacle = _obstacle(config, resource)
    if obstacle:
        raise ConfigError(
            f"ExecutorConfig.graph_transport is 'nccl' and {obstacle}: NCCL sends from one CUDA device to another; "
            "take graph_transport='shm' (or 'auto'), which needs neither CUDA nor CuPy"
        )


def _obstacle(config: ExecutorConfig, resource: str | None) -> str:
    """What keeps NCCL from being used, whatever is installed; empty: nothing."""
    asked = config.ray_resource if config.ray_resource == "XPU" or resource is None else resource
    if asked not in {None, "GPU"}:
        return f"workers take {asked}, no GPU"
    if config.ray_resource_per_worker < 1:
        return f"workers share a device (ray_resource_per_worker is {config.ray_resource_per_worker:g})"
    return ""


def _no_cupy(where: str) -> ConfigError:
    return ConfigError(
        f"ExecutorConfig.graph_transport is 'nccl', for which Ray needs CuPy, and that is not installed {where}. "
        f"{_INSTALL_CUPY} (aexec's extra 'cuda12' brings it), or take graph_transport='shm'"
    )


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _version_of_cupy() -> str | None:
    """CuPy comes under a name for each CUDA; what counts is that it can be found."""
    if importlib.util.find_spec("cupy") is None:
        return None
    return next((version for name in _CUPY if (version := _version(name))), "unknown")


def _why_no_graph() -> str:
    for name in _GRAPH_MODULES:
        try:
            importlib.import_module(name)
        except ImportError as error:
            return str(error)
    return ""


def _parsed(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:2])
