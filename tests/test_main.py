from __future__ import annotations

import subprocess
import sys

import pytest

import aexec
import aexec.__main__

WITHOUT = """
import sys
sys.modules[{module!r}] = None
from aexec.__main__ import run
sys.exit(run({arguments!r}))
"""


def without(module: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command line as if ``module`` were not installed."""
    command = [sys.executable, "-c", WITHOUT.format(module=module, arguments=arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=50, check=False)


def test_without_the_extra_a_command_says_what_to_install() -> None:
    """The message is the pip command, and it is a usage error."""
    done = without("cyclopts", "generate", "--model", "dummy")
    assert done.returncode == 2
    assert done.stderr.strip() == (
        "aexec: the command line needs the extra 'cli' (cyclopts is not installed): pip install 'aexec[cli]'"
    )


def test_without_the_extra_there_is_still_a_doctor() -> None:
    """Who has only the core can ask what is missing."""
    done = without("cyclopts", "doctor")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("aexec ")


def test_another_missing_module_is_not_taken_for_the_extra() -> None:
    """A broken installation shows its own error."""
    done = without("aexec.cli.show", "doctor")
    assert "ModuleNotFoundError" in done.stderr
    assert "aexec.cli.show" in done.stderr.splitlines()[-1]


@pytest.mark.parametrize("command", [["aexec"], [sys.executable, "-m", "aexec"]])
def test_the_script_and_the_module_are_the_same(command: list[str]) -> None:
    """`aexec` and `python -m aexec` both print the version."""
    done = subprocess.run([*command, "--version"], capture_output=True, text=True, timeout=50, check=True)
    assert done.stdout.strip() == aexec.__version__


def test_ctrl_c_while_the_command_line_is_imported_ends_it_in_a_line(monkeypatch, capsys) -> None:
    """As it does later: with 130, and without a traceback of imports."""

    def interrupted(arguments: list[str]) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(aexec.__main__, "run", interrupted)
    with pytest.raises(SystemExit) as caught:
        aexec.__main__.main()
    assert caught.value.code == 130
    assert capsys.readouterr().err == "aexec: stopped\n"
