from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

HERE = Path(__file__).parent
REJECTS = HERE / "rejects.py"
MARK = re.compile(r"# rejected: (?P<mypy>[\w-]+), (?P<pyright>\w+)$")
# What pyright says besides: of an overloaded call, and of the decorator that it was.
BESIDES = {"reportCallIssue", "reportUntypedFunctionDecorator", "reportUnknownMemberType", "reportUnknownVariableType"}

pytestmark = pytest.mark.timeout(300)


def run(*command: str, cwd: Path) -> str:
    done = subprocess.run([sys.executable, "-m", *command], cwd=cwd, capture_output=True, text=True, check=False)
    assert done.returncode == 1, f"{command[0]} found nothing, or did not run:\n{done.stdout}{done.stderr}"
    return done.stdout


def expected(checker: str) -> dict[int, str]:
    lines = enumerate(REJECTS.read_text(encoding="utf-8").splitlines(), start=1)
    return {number: found[checker] for number, line in lines if (found := MARK.search(line))}


def compare(found: dict[int, set[str]], wanted: dict[int, str], besides: set[str]) -> None:
    assert {number for number in found if number not in wanted} == set(), "lines that should pass"
    assert {number: code for number, code in wanted.items() if code not in found[number]} == {}, "lines that pass"
    assert {number: codes for number, codes in found.items() if codes - besides - {wanted[number]}} == {}


def test_mypy_rejects_each_marked_line_and_no_other(tmp_path):
    """Each mistake of rejects.py is an error of mypy's on its line, with its code."""
    config = tmp_path / "mypy.ini"
    config.write_text("[mypy]\nstrict = True\npython_version = 3.11\n", encoding="utf-8")
    options = ("--config-file", str(config), "--no-error-summary", "--hide-error-context", "--no-pretty")
    output = run("mypy", *options, str(REJECTS), cwd=HERE.parent.parent)
    found: dict[int, set[str]] = defaultdict(set)
    for line in output.splitlines():
        if match := re.match(r".*rejects\.py:(\d+): error: .*\[([\w-]+)\]$", line):
            found[int(match[1])].add(match[2])
    compare(found, expected("mypy"), set())


def test_pyright_rejects_each_marked_line_and_no_other(tmp_path):
    """Each mistake of rejects.py is an error of pyright's on its line, with its rule."""
    shutil.copy(REJECTS, tmp_path)
    settings = {"typeCheckingMode": "strict", "pythonVersion": "3.11"}
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(settings), encoding="utf-8")
    output = json.loads(run("pyright", "--outputjson", "--pythonpath", sys.executable, cwd=tmp_path))
    found: dict[int, set[str]] = defaultdict(set)
    for problem in output["generalDiagnostics"]:
        found[problem["range"]["start"]["line"] + 1].add(problem["rule"])
    compare(found, expected("pyright"), BESIDES)
