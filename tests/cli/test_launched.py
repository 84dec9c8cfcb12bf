from __future__ import annotations

import json
import os
import socket
import subprocess
import sys

import pytest
from cyclopts import CycloptsError

from aexec.cli.launched import Place, place_of
from aexec.cli.options import EngineOptions
from aexec.errors import ConfigError, InvalidRequest, RanksDiverged, RequestFailed, WorkerDied

LAUNCHED = {"RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4", "GROUP_RANK": "1"}


def run_ranks(*arguments: str, others: tuple[str, ...] = ()) -> list[subprocess.CompletedProcess[str]]:
    """Run the command on two ranks, as a launcher does; ``others`` are more arguments of rank 1."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    started = []
    for rank in range(2):
        told = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "MASTER_PORT": port}
        environment = {**os.environ, **{name: str(value) for name, value in told.items()}, "MASTER_ADDR": "127.0.0.1"}
        command = [sys.executable, "-m", "aexec", "generate", "--model", "dummy", "--executor", "external_launcher"]
        command += ["-tp", "2", "--max-tokens", "6", *arguments, *(others if rank else ())]
        started.append(
            subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        )
    done = [process.communicate(timeout=50) for process in started]
    return [
        subprocess.CompletedProcess(process.args, process.returncode, *texts)
        for process, texts in zip(started, done, strict=True)
    ]


@pytest.mark.timeout(60)
def test_rank_0_prints_for_all() -> None:
    """Answers, errors of prompts and figures come once; every rank has the exit code (G31)."""
    first, second = run_ranks("--prompt", "one", "--prompt", "", "--json")
    answers = [json.loads(line) for line in first.stdout.splitlines()]
    assert [answer.get("completion_tokens") for answer in answers] == [6, None]
    assert "the prompt is an empty text" in first.stderr
    assert (second.stdout, second.stderr) == ("", "")
    assert (first.returncode, second.returncode) == (2, 2)


@pytest.mark.timeout(60)
def test_a_rank_that_is_asked_otherwise_ends_all_with_a_line_that_names_it() -> None:
    """The line says which rank and which step; each rank fails."""
    first, second = run_ranks("--prompt", "one", others=("--top-k", "3"))
    assert "aexec: rank 1 does not ask for what the others ask for" in first.stderr
    assert "step 1" in first.stderr
    assert first.stdout == second.stdout == ""
    assert (first.returncode, second.returncode) == (1, 1)


def test_the_place_is_what_the_launcher_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replicas are as large as the layout says; without a launcher there is one process."""
    for name, value in {**LAUNCHED, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}.items():
        monkeypatch.setenv(name, value)
    options = EngineOptions(model="dummy", executor="external_launcher", tensor_parallel_size=2)
    assert place_of(options) == Place(5, 1)
    assert place_of(EngineOptions(model="dummy")) == Place(0, 0)
    monkeypatch.delenv("RANK")
    assert place_of(options) == Place(0, 0)


@pytest.mark.parametrize(
    ("place", "error", "is_said"),
    [
        (Place(1, 1), CycloptsError(msg="no such option"), False),
        (Place(1, 1), InvalidRequest("empty"), False),
        (Place(1, 1), RequestFailed("not a number"), False),
        (Place(1, 1), ConfigError("RANK is missing"), True),
        (Place(1, 1), OSError("no such file"), True),
        (Place(1, 1), WorkerDied(2, pid=7, signal=9), False),
        (Place(1, 1), WorkerDied(0, pid=7, signal=9), True),
        (Place(1, 1), RanksDiverged(1, 7), True),
        (Place(2, 0), WorkerDied(1, pid=7, signal=9), True),
    ],
)
def test_another_rank_says_what_rank_0_may_not_know(
    place: Place, error: Exception, is_said: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """What all ranks know is said once; the first rank of each replica speaks for it."""
    place.complain(error)
    said = capsys.readouterr().err
    assert bool(said) == is_said
    assert not said or said.startswith(f"aexec: rank {place.rank}: ")
