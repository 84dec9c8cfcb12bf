from __future__ import annotations

import io
from types import SimpleNamespace
from typing import Any

import pytest
from rich.progress import Progress

from aexec.cli.answers import Answer
from aexec.cli.show import InOrder, Loading, busy, loading, places, summary, table
from aexec.messages.process import PHASES
from aexec.observe import RequestFinished
from aexec.worker.host import HOOKS


def finished(prompt: str, tokens: int, seconds: float) -> Answer:
    """Return a answer of ``tokens`` tokens in ``seconds``."""
    record = RequestFinished(
        request_id=prompt,
        num_prompt_tokens=5,
        num_completion_tokens=tokens,
        finish_reason="length",
        first_token_seconds=seconds / 10,
        seconds=seconds,
    )
    return Answer(prompt, record=record)


def test_one_prompt_is_written_as_it_comes() -> None:
    """Nothing but its text, and a line's end at the end."""
    out = io.StringIO()
    show = InOrder(["x"], out)
    show(0, "The ", False)
    assert out.getvalue() == "The "
    show(0, "sea", False)
    show(0, "", True)
    assert out.getvalue() == "The sea\n"


def test_several_prompts_are_written_one_after_the_other() -> None:
    """The first that has not ended streams; what others wrote meanwhile follows in their turn."""
    out = io.StringIO()
    show = InOrder(["x", "y", "z"], out)
    show(1, "second", False)
    show(2, "third", True)
    show(0, "first", False)
    assert out.getvalue() == "[1/3] x\nfirst"
    assert repr(show) == "<InOrder: prompt 1 of 3>"
    show(0, "", True)
    assert out.getvalue() == "[1/3] x\nfirst\n\n[2/3] y\nsecond"
    show(1, "!", True)
    assert out.getvalue().endswith("second!\n\n[3/3] z\nthird\n")


def test_what_failed_before_it_began_has_no_heading() -> None:
    """Its error says which it was; an answer without text that ends well has one."""
    out = io.StringIO()
    show = InOrder(["x", "y", "z"], out)
    show(0, "", True)
    show(1, "", True)
    assert out.getvalue() == ""
    show(2, "", False)
    show(2, "", True)
    assert out.getvalue() == "[3/3] z\n"


def test_the_summary_counts_all_prompts_over_the_wall_clock() -> None:
    """Sixteen tokens of two prompts in two seconds are eight a second."""
    assert summary([finished("a", 6, 1.0), finished("b", 10, 2.0)], 2.0) == (
        "16 tokens in 2.00 s, 8.0 tokens/s, first token after 100 ms"
    )


def test_the_table_has_a_row_for_each_prompt(capsys: pytest.CaptureFixture[str]) -> None:
    """Tokens, tokens per second and the time to the first token, and all of them together."""
    table([finished("alpha", 6, 1.0), finished("beta", 10, 2.0)], 2.0)
    shown = capsys.readouterr().out
    assert all(word in shown for word in ("1/2", "2/2", "6.0", "5.0", "100 ms", "200 ms", "16 tokens in 2.00 s"))


def test_a_pipe_sees_no_progress_bar(capsys: pytest.CaptureFixture[str]) -> None:
    """Loading is shown on a terminal only."""
    with loading("smollm2") as progress:
        progress("weights", 1, 2)
        progress("weights", 2, 2)
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("is_terminal", [True, False])
def test_what_is_being_done_is_said_on_a_terminal_only(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, is_terminal: bool
) -> None:
    """On standard error, for a report goes to standard output."""
    monkeypatch.setenv("TTY_COMPATIBLE", str(int(is_terminal)))
    with busy() as tell:
        tell("looking at devices")
    out, err = capsys.readouterr()
    assert (out, "looking at devices" in err) == ("", is_terminal)


OF_RAY = ("cluster", "placement", "actors", "environment", "connect", "step plane")


@pytest.mark.parametrize("phase", [*PHASES, *HOOKS, *OF_RAY])
def test_every_phase_of_a_start_has_a_title_in_words(phase: str) -> None:
    """Whatever a person may have to wait for is said, and no name of the code's is shown."""
    progress = Progress(disable=True)
    Loading(progress, "dummy")(phase, 1, 2)
    (task,) = progress.tasks
    assert task.description.removeprefix("opening dummy: ") not in {phase, phase.replace("_", " ")}


def executor_on(*nodes: str) -> Any:
    """An executor as far as the line on Ray looks at it."""
    settings = {"ray_address": SimpleNamespace(value="192.0.2.10:6379")}
    ranks = [SimpleNamespace(node=node) for node in nodes]
    return SimpleNamespace(describe=lambda: settings, ranks=ranks)


def test_where_ray_has_put_the_ranks_is_one_line() -> None:
    """The cluster, and how many ranks each node has."""
    one = executor_on("head (192.0.2.10)")
    assert places(one, is_started=True) == "ray: started a cluster on this machine; 1 rank on head (192.0.2.10)"
    three = executor_on("head (192.0.2.10)", "head (192.0.2.10)", "other (192.0.2.11)")
    assert places(three, is_started=False) == (
        "ray: joined 192.0.2.10:6379; 2 ranks on head (192.0.2.10), 1 rank on other (192.0.2.11)"
    )
