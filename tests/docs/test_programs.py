"""Every program that the manual and the examples show runs as it stands.

The core is enough for all but those with structured output and those with Ray, which need these
extras. Ray's join the cluster of the session, instead of starting one each; those of several nodes and of
a launcher are in test_launched.py.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from manual import ROOT, found, run

EXAMPLES = {
    "ask_all.py": "rose: 2 + 1 + 0 = 3\n",
    "own_worker.py": "[21.5]\n[0]\nhealthy: True\n",
    "supervised_crash.py": (
        "left, generation 1: 2 done\nright, generation 1: 3 done\n"
        "left, generation 2: 5 done\nright, generation 2: 0 done\n"
    ),
    "structured_output.py": (
        "{'name': 'str', 'age': 'int', 'married': 'bool'}\n" * 2 + "a colour: True\nfree text: 20 tokens\n"
    ),
    "unnoticed_crash.py": (
        "down: rank 1 ended by SIGKILL\nup again: generation 2\nthe same text in all streams: True\n"
    ),
    "ping_pong.py": "ping hits it, 0 before\npong hits it, 1 before\nping hits it, 2 before\npong hits it, 3 before\n4 hits\n",
}


@pytest.mark.parametrize(("program", "output"), found(""))
def test_a_program_of_the_manual_runs(program: str, output: str | None, tmp_path: Path) -> None:
    """It ends without a word on standard error, and prints what the page says; smollm2 is played by dummy.

    What holds tests is run by pytest, and all of them pass.
    """
    if "def test_" in program:
        (tmp_path / "test_page.py").write_text(program, encoding="utf-8")
        printed = run("-m", "pytest", "-q", "--rootdir", str(tmp_path), "-p", "no:asyncio", str(tmp_path))
        assert re.search(r"^\d+ passed in", printed, re.MULTILINE), printed
        return
    printed = run("-c", program.replace('"smollm2"', '"dummy"'))
    if output is not None:
        assert printed == output


@pytest.mark.ray
@pytest.mark.parametrize(("program", "output"), found("ray"))
def test_a_program_with_ray_runs(
    program: str, output: str | None, ray_cluster: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the others do; where the page starts a cluster, or joins one, it is the session's."""
    monkeypatch.setenv("RAY_ADDRESS", ray_cluster.address)
    assert run("-c", program) == output


@pytest.mark.parametrize("name", sorted(EXAMPLES))
def test_an_example_prints_what_it_should(name: str) -> None:
    """Examples of actors, of executors and of the engine are deterministic to the letter."""
    assert run(f"examples/{name}") == EXAMPLES[name]


def test_offline_generate_completes_each_prompt() -> None:
    """The engine's example prints a line for each prompt."""
    lines = run("examples/offline_generate.py").splitlines()
    assert [line.partition("|")[0] for line in lines] == ["The capital of France is", "Two and two are", "The sea is"]
    assert all(line.partition("|")[2] for line in lines)


def test_every_example_is_tested_and_short() -> None:
    """No example is left out of the tests, or longer than sixty lines."""
    examples = {path.name: path for path in (ROOT / "examples").glob("*.py")}
    elsewhere = {"ray_serve.py", "ppo_loop.py", "torchrun_offline.py"}  # the latter two need torch
    assert set(examples) == {*EXAMPLES, "offline_generate.py", *elsewhere}
    assert [name for name, path in examples.items() if len(path.read_text().splitlines()) > 60] == []
