"""The files around the code agree with one another."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

import aexec

ROOT = Path(__file__).parents[1]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PROJECT = PYPROJECT["project"]
EXTRAS = PROJECT["optional-dependencies"]
PINS = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line)


def test_the_version_is_the_same_everywhere() -> None:
    """pyproject.toml and the package agree, and the changelog speaks of what is to come."""
    assert PROJECT["version"] == aexec.__version__
    assert "## [Unreleased]" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def test_all_is_every_extra_that_installs_anywhere() -> None:
    """`all` leaves out what needs a certain device, and repeats no version."""
    (everything,) = (Requirement(text) for text in EXTRAS["all"])
    assert everything.name == "aexec"
    assert everything.extras == set(EXTRAS) - {"all", "cuda12"}


@pytest.mark.parametrize(
    "text",
    [
        *PROJECT["dependencies"],
        *(text for name in ("cli", "cuda12", "models", "multinode", "ray", "uvloop") for text in EXTRAS[name]),
    ],
)
def test_what_ci_installs_is_pinned_within_what_the_project_allows(text: str) -> None:
    """Each dependency of the tests has a pin in constraints.txt, and the pin satisfies pyproject.toml."""
    requirement = Requirement(text)
    pins = {re.sub(r"[-_.]+", "-", name).lower(): version for name, version in PINS.items()}
    assert Version(pins[requirement.name.lower()]) in requirement.specifier


def test_torch_is_pinned_to_the_build_that_is_small() -> None:
    """Another pin would pull gigabytes."""
    assert PINS["torch"] == "2.13.0"


def test_the_licence_is_whole_and_the_package_is_typed() -> None:
    """Apache-2.0 with its appendix, and a marker for type checkers."""
    licence = (ROOT / "LICENSE").read_text(encoding="utf-8")
    assert "Version 2.0, January 2004" in licence
    assert "APPENDIX: How to apply the Apache License" in licence
    assert (Path(aexec.__file__).parent / "py.typed").exists()


def test_ci_runs_the_test_command_of_the_readme() -> None:
    """What a reader is told to run is what CI runs."""
    command = "python3 -m nox -s tests"
    assert command in (ROOT / "README.md").read_text(encoding="utf-8")
    assert command in (ROOT / ".ci" / "run").read_text(encoding="utf-8")


def test_every_session_is_described() -> None:
    """CONTRIBUTING.md has a line for each nox session, and no line for another."""
    sessions = re.findall(
        r"^@nox\.session.*\ndef (\w+)", (ROOT / "noxfile.py").read_text(encoding="utf-8"), re.MULTILINE
    )
    described = re.findall(r"^\| `nox -s (\w+)", (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(described) == sorted(sessions)
    assert sessions.index("tests") == max(index for index, name in enumerate(sessions) if name != "bench")


def test_links_between_pages_lead_somewhere() -> None:
    """Every relative link of the README, CONTRIBUTING and the manual names a file that exists."""
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]
    broken = [
        f"{page.name}: {target}"
        for page in pages
        if "_generated" not in page.parts
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8"))
        if not (page.parent / target).exists()
    ]
    assert broken == []
