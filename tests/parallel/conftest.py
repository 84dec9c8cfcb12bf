"""Ranks as processes that have torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAMS = Path(__file__).with_name("rank_programs.py")


@pytest.fixture(scope="session")
def rank_process():
    """A process that forks ranks."""
    command = [sys.executable, str(PROGRAMS)]
    environment = {**os.environ, "RES_OPTIONS": "timeout:1 attempts:1"}  # torch asks for the name of each peer
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        yield process
        process.stdin.close()
        assert process.wait(10) == 0


@pytest.fixture
def run_ranks(rank_process):
    """Run a function of ``rank_programs`` on all ranks of a layout; what each of them returned, by rank."""

    def run(program, *, tensor=1, pipeline=1, data=1, at=""):
        rank_process.stdin.write(f"{program} {tensor} {pipeline} {data} {at}\n")
        rank_process.stdin.flush()
        answer = json.loads(rank_process.stdout.readline())
        assert isinstance(answer, list), answer
        return answer

    return run
