"""The programs that the manual shows, by the way in which they are run."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
PROGRAM = re.compile(
    r"^```python\n(?P<program>.*?)^```\n(?:\s*```text\n(?P<output>.*?)^```\n)?", re.MULTILINE | re.DOTALL
)
FOUND = [
    (match["program"], match["output"], f"{page.relative_to(ROOT)}-{index}")
    for page in PAGES
    for index, match in enumerate(PROGRAM.finditer(page.read_text(encoding="utf-8")))
]
SLOW_CALLBACK = re.compile(r"^Executing <.*> took \d+\.\d+ seconds\n", re.MULTILINE)
WORDS = {"ray": 'backend="ray"', "torchrun": '"external_launcher"', "nodes": "nnodes=2"}


def found(kind: str) -> list[Any]:
    """Programs that are run in a way of their own; ``""``: all others."""
    return [
        pytest.param(program, output, id=name)
        for program, output, name in FOUND
        if next((each for each, word in WORDS.items() if word in program), "") == kind
    ]


def run(*arguments: str, env: Mapping[str, str] | None = None) -> str:
    """Run Python with ``arguments`` and return its standard output; its standard error has to stay empty.

    Asyncio's debug mode writes there of each callback that takes 0.1 s. A machine that stands still
    for a moment makes it say so of any: of three runs one has to be free of it.
    """
    command = [sys.executable, "-X", "dev", "-W", "error", *arguments]
    for _ in range(3):
        done = subprocess.run(command, capture_output=True, text=True, timeout=50, check=False, cwd=ROOT, env=env)
        if done.returncode or not done.stderr or SLOW_CALLBACK.sub("", done.stderr):
            break
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout
