from __future__ import annotations

import pytest
from cyclopts import App, UnknownOptionError

from aexec.cli.failures import exit_code, explain, worst
from aexec.errors import (
    ConfigError,
    InvalidRequest,
    LeaderLost,
    LeaderNotFound,
    LinkRefused,
    MissingExtra,
    ModelLoadError,
    ModelNotFound,
    NodeRefused,
    WorkerDied,
)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigError("a"), 2),
        (ModelNotFound("a"), 2),
        (MissingExtra("a", "models"), 2),
        (InvalidRequest("a"), 2),
        (NodeRefused(1, "10.0.0.5:29501", "there is a node 1 already"), 2),
        (LinkRefused("10.0.0.5:29501", "it has another key"), 2),
        (LeaderNotFound("10.0.0.5:29501", 60.0, "nobody listens there"), 1),
        (LeaderLost("10.0.0.5:29501", "its connection was closed"), 1),
        (ModelLoadError("a"), 1),
        (WorkerDied(0, 4121, signal="SIGKILL"), 1),
        (OSError("disk"), 1),
        (ExceptionGroup("several", [ExceptionGroup("inner", [InvalidRequest("a")])]), 2),
    ],
)
def test_the_code_says_who_mends_it(error: Exception, code: int) -> None:
    """2 is for the command or the request, 1 for what failed while it ran."""
    assert exit_code(error) == code


def test_an_option_that_there_is_not_is_usage() -> None:
    """The parser's own errors are the user's to mend."""
    with pytest.raises(UnknownOptionError, match="--nope") as caught:
        App(default_command=print, exit_on_error=False, print_error=False)(["--nope"])
    assert exit_code(caught.value) == 2


def test_several_prompts_end_with_the_worst_code() -> None:
    """A failure outweighs a wrong request, and that outweighs success."""
    assert worst([None, None]) == 0
    assert worst([None, InvalidRequest("a")]) == 2
    assert worst([None, InvalidRequest("a"), ModelLoadError("b")]) == 1


def test_our_errors_are_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    """What aexec raises on purpose reads by itself, and has no traceback."""
    explain(ExceptionGroup("several", [ConfigError("dtype is 'int3': expected float32")]))
    assert capsys.readouterr().err == "aexec: dtype is 'int3': expected float32\n"


def test_a_foreign_error_says_how_to_see_more(capsys: pytest.CaptureFixture[str]) -> None:
    """An error that nobody foresaw names its class and the way to its traceback."""
    explain(OSError("disk full"))
    assert capsys.readouterr().err == (
        "aexec: OSError: disk full (a fault of aexec or of its surroundings: --debug shows where)\n"
    )


def test_debug_shows_the_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    """With --debug the traceback comes before the line."""
    try:
        raise ConfigError("wrong")
    except ConfigError as error:
        explain(error, debug=True)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "Traceback (most recent call last):"
    assert lines[-1] == "aexec: wrong"
