"""The contract under torchrun: two processes make the same calls, each on an executor of its own."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from launched import end_session, torchrun

from aexec.testing.contracts import EXECUTOR_CHECKS, NOT_REPLICATED

PROGRAM = Path(__file__).with_name("replicated_program.py")
HOLD = [check.__name__ for check in EXECUTOR_CHECKS if check.__name__ not in NOT_REPLICATED]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    """What each rank has found: by check, what was wrong."""
    folder = tmp_path_factory.mktemp("results")
    launcher = torchrun(PROGRAM, str(folder), logs=folder)
    try:
        _, errors = launcher.communicate(timeout=110.0)
    except subprocess.TimeoutExpired:
        errors = "it did not come to its end"
    finally:
        end_session(launcher)
    assert launcher.returncode == 0, errors
    return [json.loads((folder / f"{rank}.json").read_text(encoding="utf-8")) for rank in range(2)]


@pytest.mark.timeout(150)
@pytest.mark.parametrize("name", HOLD)
def test_external_launcher_keeps_its_promises(name, results):
    """The checks that all executors pass, on every rank at the same time (G53)."""
    assert [result[name] for result in results] == ["", ""]


def test_only_what_cannot_be_is_left_out():
    """By name, with the reason."""
    names = {check.__name__ for check in EXECUTOR_CHECKS}
    assert NOT_REPLICATED.keys() <= names
    left_out = ["answers_never_reach_another_caller", "a_cancelled_start_leaves_nothing_behind"]
    assert list(NOT_REPLICATED) == left_out
