from __future__ import annotations

import sys
import tomllib
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

from aexec.config import ExecutorConfig, ParallelConfig
from aexec.errors import ConfigError, MissingExtra
from aexec.executor.ray.preflight import (
    OLDEST_RAY,
    RayFacts,
    check_installed,
    choose_transport,
    collect,
    preflight,
)

WHOLE = RayFacts(ray="2.60.0", cupy="14.2.0", devices=8)
CPU = RayFacts(ray="2.60.0")


def config(pp: int = 2, **settings: Any) -> ExecutorConfig:
    """Of a pipeline, unless told otherwise."""
    return ExecutorConfig(backend="ray", parallel=ParallelConfig(pipeline_parallel_size=pp), **settings)


def test_ray_itself_missing_names_the_extra() -> None:
    """And the command that installs it."""
    with pytest.raises(MissingExtra, match=r"backend 'ray' needs the extra 'ray'.*pip install 'aexec\[ray\]'"):
        check_installed(config(), RayFacts(ray=None))


@pytest.mark.parametrize("version", ["2.43.0", "2.9.3", "1.13.0"])
def test_ray_too_old_names_both_versions_and_the_command(version: str) -> None:
    """On both planes; 2.9 is older than 2.50."""
    with pytest.raises(ConfigError, match=rf"Ray is {version}: .* 2.50 or later. pip install -U 'ray\[cgraph\]>=2.50'"):
        check_installed(config(ray_step_plane="channel"), RayFacts(ray=version))


def test_the_compiled_graph_missing_names_the_command_and_the_other_plane() -> None:
    """At the start, and not at the first request."""
    facts = RayFacts(ray="2.60.0", graph="No module named 'ray.dag'")
    with pytest.raises(ConfigError, match=r"No module named 'ray.dag'.*pip install -U 'ray\[cgraph\].*channel'"):
        check_installed(config(), facts)
    check_installed(config(ray_step_plane="channel"), facts)


def test_cupy_missing_with_nccl_asked_names_the_command() -> None:
    """Here, and on the node of a rank."""
    with pytest.raises(ConfigError, match=r"CuPy, and that is not installed here. pip install cupy-cuda12x"):
        check_installed(config(graph_transport="nccl"), CPU)
    with pytest.raises(ConfigError, match=r"not installed on the node of rank 1. pip install cupy-cuda12x"):
        choose_transport(config(graph_transport="nccl"), "GPU", [WHOLE, RayFacts(ray="2.60.0", devices=1)])


def test_nccl_asked_without_cuda_is_refused() -> None:
    """A node that Ray says has GPUs may have none."""
    with pytest.raises(ConfigError, match="the node of rank 1 has no CUDA device: take graph_transport='shm'"):
        choose_transport(config(graph_transport="nccl"), "GPU", [WHOLE, RayFacts(ray="2.60.0", cupy="14.2.0")])


@pytest.mark.parametrize("resource", ["CPU", "TPU", "XPU", "pet"])
def test_nccl_asked_for_workers_without_gpus_is_refused_before_anything_starts(resource: str) -> None:
    """TPU and XPU have no NCCL, and what Ray counts as GPU is no CUDA device with XPU."""
    settings = config(graph_transport="nccl", ray_resource=resource)
    with pytest.raises(ConfigError, match=f"'nccl' and workers take {resource}, no GPU"):
        check_installed(settings, WHOLE)
    with pytest.raises(ConfigError, match=f"'nccl' and workers take {resource}, no GPU"):
        choose_transport(settings, "GPU" if resource == "XPU" else resource, [WHOLE, WHOLE])


def test_nccl_asked_for_shared_devices_is_refused() -> None:
    """NCCL wants a device for each rank."""
    with pytest.raises(ConfigError, match=r"workers share a device \(ray_resource_per_worker is 0.5\)"):
        check_installed(config(graph_transport="nccl", ray_resource_per_worker=0.5), WHOLE)


@pytest.mark.parametrize("settings", [{"graph_transport": "shm"}, {"ray_resource": "CPU"}, {}])
def test_shm_and_cpu_need_no_cupy(settings: dict[str, Any]) -> None:
    """Nor CUDA."""
    check_installed(config(**settings), CPU)
    assert choose_transport(config(**settings), "CPU", [CPU, CPU]).name == "shm"


@pytest.mark.parametrize(
    ("settings", "resource", "workers", "name", "reason"),
    [
        ({}, "GPU", [WHOLE, WHOLE], "nccl", "each rank has a CUDA device of its own"),
        ({"graph_transport": "nccl"}, "GPU", [WHOLE, WHOLE], "nccl", "asked for"),
        ({"graph_transport": "shm"}, "GPU", [WHOLE, WHOLE], "shm", "asked for"),
        ({"pp": 1}, "GPU", [WHOLE, WHOLE], "shm", "one stage: no hidden states travel"),
        ({}, "CPU", [WHOLE, WHOLE], "shm", "workers take CPU, no GPU"),
        ({"ray_resource": "TPU"}, "TPU", [WHOLE, WHOLE], "shm", "workers take TPU, no GPU"),
        ({"ray_resource": "XPU"}, "GPU", [WHOLE, WHOLE], "shm", "workers take XPU, no GPU"),
        ({"ray_resource_per_worker": 0.25}, "GPU", [WHOLE, WHOLE], "shm", "workers share a device"),
        ({}, "GPU", [WHOLE, CPU], "shm", "the node of rank 1 has no CUDA device"),
        ({}, "GPU", [RayFacts(ray="2.60.0", devices=1)] * 2, "shm", "CuPy is not installed on the node of rank 0"),
    ],
)
def test_auto_takes_nccl_where_it_can_and_says_why_not(
    settings: dict[str, Any], resource: str, workers: list[RayFacts], name: str, reason: str
) -> None:
    """Nothing that is missing makes ``auto`` fail."""
    chosen = choose_transport(config(**settings), resource, workers)
    assert chosen.name == name
    assert chosen.reason.startswith(reason)


def test_auto_names_the_command_that_would_allow_nccl() -> None:
    """Devices without CuPy are a hint, and no error."""
    assert choose_transport(config(), "GPU", [RayFacts(ray="2.60.0", devices=1)] * 2).hint == "pip install cupy-cuda12x"


def test_overlap_through_host_memory_is_refused_with_the_reason() -> None:
    """It is asked for, and would not happen."""
    with pytest.raises(ConfigError, match=r"through host memory \(workers take CPU, no GPU\).*leave graph_overlap out"):
        choose_transport(config(graph_overlap=True), "CPU", [CPU, CPU])
    bare = RayFacts(ray="2.60.0", devices=1)
    with pytest.raises(ConfigError, match=r"while it computes. pip install cupy-cuda12x"):
        choose_transport(config(graph_overlap=True), "GPU", [bare, bare])
    assert choose_transport(config(graph_overlap=True), "GPU", [WHOLE, WHOLE]).name == "nccl"


def test_the_oldest_ray_is_the_one_that_the_package_asks_for() -> None:
    """One number, in two places."""
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    (wanted,) = project["optional-dependencies"]["ray"]
    specifier = Requirement(wanted).specifier
    assert specifier.contains(".".join(map(str, OLDEST_RAY)))
    assert not specifier.contains(f"{OLDEST_RAY[0]}.{OLDEST_RAY[1] - 1}")


@pytest.mark.anyio
async def test_what_is_installed_here_is_found() -> None:
    """The real Ray, with its compiled graphs."""
    facts = await preflight(config())
    assert facts.ray is not None
    assert facts.graph == ""


@pytest.fixture
def ray_is_imported() -> None:
    """All of it: what is imported for the first time beside a patch would be half of it for all tests that follow."""
    for name in ("ray", "ray.dag", "ray.experimental.compiled_dag_ref"):
        import_module(name)


@pytest.mark.usefixtures("ray_is_imported")
def test_a_graph_that_cannot_be_imported_is_a_fact(monkeypatch: pytest.MonkeyPatch) -> None:
    """None in ``sys.modules`` is how Python is told that a module is not there."""
    monkeypatch.setitem(sys.modules, "ray.experimental.compiled_dag_ref", None)
    facts = collect()
    assert "ray.experimental.compiled_dag_ref" in facts.graph
    with pytest.raises(ConfigError, match="has no compiled graphs"):
        check_installed(config(), facts)


@pytest.mark.usefixtures("ray_is_imported")
def test_cupy_that_cannot_be_found_is_a_fact(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever else of it is installed."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert collect().cupy is None


def test_devices_are_counted_without_loading_cuda(tmp_path: Path) -> None:
    """As the NVIDIA driver lists them."""
    (tmp_path / "driver/nvidia/gpus/0000:01:00.0").mkdir(parents=True)
    assert collect(tmp_path).devices == 1
