from __future__ import annotations

import pytest

from aexec.worker.exits import exit_code


@pytest.mark.parametrize(
    ("fatal", "code", "printed"),
    [
        (SystemExit(), 0, ""),
        (SystemExit(7), 7, ""),
        (SystemExit("no device"), 1, "no device\n"),
        (KeyboardInterrupt(), 1, "KeyboardInterrupt\n"),
    ],
)
def test_the_exit_code_is_the_interpreters(fatal, code, printed, capsys):
    """And what it would print is printed."""
    assert exit_code(fatal) == code
    assert capsys.readouterr().err == printed
