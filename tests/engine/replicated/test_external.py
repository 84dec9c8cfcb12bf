"""The same over processes that a launcher might have started."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from aexec import LLM, SamplingParams

PROGRAM = Path(__file__).with_name("rank_program.py")


def run_ranks() -> list[list[object]]:
    """What each of two ranks prints."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    started = []
    for rank in range(2):
        told = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "MASTER_PORT": port}
        environment = {**os.environ, **{name: str(value) for name, value in told.items()}, "MASTER_ADDR": "127.0.0.1"}
        started.append(subprocess.Popen([sys.executable, str(PROGRAM)], env=environment, stdout=subprocess.PIPE))
    said = [process.communicate(timeout=50)[0] for process in started]
    assert [process.returncode for process in started] == [0, 0]
    return [json.loads(text) for text in said]


@pytest.mark.timeout(60)
def test_processes_of_random_timing_say_the_same() -> None:
    """Requests that come at other times on each rank, streams left, a pause, a drawn seed (G53, EXT-02)."""
    first, second = run_ranks()
    assert first == second
    with LLM("dummy") as alone:
        greedy = SamplingParams(max_tokens=40, temperature=0.0)
        prompts = [[60 + (number * 5 + place) % 9 for place in range(1 + 3 * number)] for number in (0, 2, 4)]
        expected = [list(answer.token_ids) for answer in alone.generate(prompts, greedy)]
    assert [first[number] for number in (0, 2, 4)] == expected
