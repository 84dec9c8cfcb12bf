from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from aexec.cli.app import run

pytestmark = pytest.mark.usefixtures("logging_as_it_was")

GENERATE = ["generate", "--model", "dummy", "--max-tokens", "8"]
ENDLESS = [sys.executable, "-m", "aexec", *GENERATE[:-1], "1000000", "--prompt", "x"]


def lines_of_json(text: str) -> list[dict[str, object]]:
    """Parse one JSON object a line."""
    return [json.loads(line) for line in text.splitlines()]


def test_one_prompt_prints_one_json_object_and_nothing_else(capsys: pytest.CaptureFixture[str]) -> None:
    """Standard output can be piped into a JSON parser, standard error is empty."""
    assert run([*GENERATE, "--prompt", "The capital of France is", "--temperature", "0", "--json"]) == 0
    shown = capsys.readouterr()
    facts = json.loads(shown.out)
    assert {"text", "token_ids", "finish_reason", "prompt_tokens", "completion_tokens"} <= set(facts)
    assert facts["completion_tokens"] == len(facts["token_ids"]) == 8
    assert facts["finish_reason"] == "length"
    assert shown.err == ""


def test_json_survives_a_terminal_without_unicode() -> None:
    """What the terminal cannot show is escaped, so that no letter is lost."""
    command = [sys.executable, "-m", "aexec", *GENERATE, "--prompt", "é", "--json"]
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(command, capture_output=True, env=environment, timeout=50, check=True)
    assert json.loads(done.stdout.decode("ascii"))["prompt"] == "é"


def test_several_prompts_print_a_line_each_in_their_order(capsys: pytest.CaptureFixture[str]) -> None:
    """The line of a prompt that is refused has its error, and the others are untouched by it."""
    assert run([*GENERATE, "--prompt", "one", "--prompt", "", "--prompt", "three", "--json"]) == 2
    first, refused, third = lines_of_json(capsys.readouterr().out)
    assert (first["prompt"], third["prompt"]) == ("one", "three")
    assert refused["error"] == "InvalidRequest"
    assert first["completion_tokens"] == third["completion_tokens"] == 8


def test_the_same_command_prints_the_same_text(capsys: pytest.CaptureFixture[str]) -> None:
    """Greedy by default, and seeded where tokens are drawn."""
    drawn = [*GENERATE, "--prompt", "one", "--temperature", "1", "--seed", "7", "--json"]
    assert [run(drawn), run(drawn)] == [0, 0]
    first, second = lines_of_json(capsys.readouterr().out)
    assert first["token_ids"] == second["token_ids"]


def test_text_goes_to_standard_output_and_figures_to_standard_error(capsys: pytest.CaptureFixture[str]) -> None:
    """What a pipe gets is the text alone."""
    assert run([*GENERATE, "--prompt", "one", "--json"]) == 0
    text = json.loads(capsys.readouterr().out)["text"]
    assert run([*GENERATE, "--prompt", "one"]) == 0
    shown = capsys.readouterr()
    assert shown.out == f"{text}\n"
    assert shown.err.startswith("\n8 tokens in ")


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["generate", "--model", "dummy"], 2, "--prompt"),
        (["generate", "--model", "dummy", "--prompt", "x", "--nope"], 2, "--nope"),
        (["generates"], 2, "generate"),
        ([*GENERATE, "--prompt", ""], 2, "the prompt is an empty text"),
        ([*GENERATE[:-1], "0", "--prompt", "x"], 2, "max_tokens is 0: expected an integer of at least 1"),
        ([*GENERATE, "--prompt", "x", "--temperature", "nan"], 2, "temperature is nan"),
        ([*GENERATE, "--prompt", "x", "--executor", "warp"], 2, "'warp'"),
        ([*GENERATE, "--prompt", "x", "-tp", "0"], 2, "tensor_parallel_size is 0"),
        ([*GENERATE, "--prompt", "x", "--executor", "uni", "-tp", "2"], 2, "asks for 2"),
        (["generate", "--model", "no/such/model", "--prompt", "x"], 2, "no/such/model"),
        (["generate", "--prompt", "x"], 2, "a model is missing: give it as in --model smollm2"),
        (["generate", "--model", "dummy", "hello"], 2, "a prompt is missing: give it as in --prompt 'Hello'"),
        (
            [*GENERATE, "--prompt", "x", "and", "more"],
            2,
            "'and more' belongs to no option: a prompt is given by --prompt",
        ),
        (["doctor", "please"], 2, "'please' belongs to no option\n"),
        ([*GENERATE, "--prompt", "x", "--executor", "mp", "--ray-address", "auto"], 2, "a setting of backend='ray'"),
        ([*GENERATE, "--prompt", "x", "--executor", "ray", "--nnodes", "2"], 2, "a setting of backend='mp'"),
        ([*GENERATE, "--prompt", "x", "--nnodes", "2", "-tp", "3"], 2, "3 ranks do not divide among 2 nodes"),
        ([*GENERATE, "--prompt", "x", "--ray-step-plane", "channel", "--graph-transport", "nccl"], 2, "has no graph"),
        ([*GENERATE, "--prompt", "x", "--async-scheduling", "--executor", "mp", "-pp", "2"], 2, "cannot be"),
    ],
)
def test_what_the_user_can_mend_is_one_line_and_code_2(
    arguments: list[str], code: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The line names the value; there is no traceback, and nothing on standard output."""
    assert run(arguments) == code
    shown = capsys.readouterr()
    assert shown.out == ""
    assert said in shown.err
    assert shown.err.startswith("aexec: ")
    assert shown.err.count("\n") == 1


def test_debug_shows_the_traceback_and_every_record(capsys: pytest.CaptureFixture[str]) -> None:
    """--debug is for whoever looks into it."""
    assert run(["generate", "--model", "no/such/model", "--prompt", "x", "--debug"]) == 2
    assert "Traceback (most recent call last):" in capsys.readouterr().err
    assert logging.getLogger("aexec").level == logging.DEBUG


def test_a_level_that_there_is_not_is_usage(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wrong environment variable is told like a wrong option."""
    monkeypatch.setenv("AEXEC_LOG_LEVEL", "loud")
    assert run(["doctor"]) == 2
    assert capsys.readouterr().err.startswith("aexec: AEXEC_LOG_LEVEL is 'loud'")


def test_demo_prints_answers_and_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    """The demo runs with any model, and shows tokens, tokens per second and the time to the first token."""
    assert run(["demo", "--model", "dummy", "--max-tokens", "4"]) == 0
    shown = capsys.readouterr().out
    assert "[1/3] What is the capital of France?" in shown
    assert all(title in shown for title in ("tokens/s", "time to first token", "12 tokens in "))


def test_ctrl_c_ends_cleanly_with_130(tmp_path: Path) -> None:
    """A stream that is interrupted ends without a traceback, and the shell learns why."""
    errors = tmp_path / "stderr"
    with errors.open("wb") as stderr, subprocess.Popen(ENDLESS, stdout=subprocess.PIPE, stderr=stderr) as process:
        assert process.stdout is not None
        assert process.stdout.read(64)  # it is in the midst of its text
        process.send_signal(signal.SIGINT)
        process.stdout.read()
        assert process.wait(timeout=30) == 130
    assert errors.read_text().split("\n")[-2:] == ["aexec: stopped", ""]
    assert "Traceback" not in errors.read_text()


def test_a_reader_that_goes_away_ends_the_command_quietly(tmp_path: Path) -> None:
    """As with `aexec generate ... | head -c 1`."""
    errors = tmp_path / "stderr"
    with errors.open("wb") as stderr, subprocess.Popen(ENDLESS, stdout=subprocess.PIPE, stderr=stderr) as process:
        assert process.stdout is not None
        assert process.stdout.read(1)
        process.stdout.close()
        assert process.wait(timeout=30) == 1
    assert errors.read_text() == ""


def test_several_answers_to_a_prompt_are_told_apart(capsys: pytest.CaptureFixture[str]) -> None:
    """With ``--n`` each answer has its line, and the first is the one that there is without."""
    drawn = [*GENERATE, "--prompt", "one", "--prompt", "two", "--temperature", "1", "--seed", "7", "--json"]
    assert run([*drawn, "--n", "3"]) == 0
    answers = lines_of_json(capsys.readouterr().out)
    assert [(answer["prompt"], answer["sample"]) for answer in answers] == [
        (prompt, sample) for prompt in ("one", "two") for sample in range(3)
    ]
    assert len({tuple(answer["token_ids"]) for answer in answers}) == 6  # type: ignore[arg-type]
    assert run(drawn) == 0
    single = lines_of_json(capsys.readouterr().out)
    assert [answer["token_ids"] for answer in single] == [answers[0]["token_ids"], answers[3]["token_ids"]]
    assert "sample" not in single[0]


def test_a_prompt_that_fails_is_reported_once_for_all_its_answers(capsys: pytest.CaptureFixture[str]) -> None:
    """However many were asked for; the number is the prompt's."""
    drawn = [*GENERATE, "--temperature", "1", "--n", "3", "--prompt", "one", "--prompt", ""]
    assert run(drawn) == 2
    lines = capsys.readouterr().err.splitlines()
    assert [line for line in lines if line.startswith("aexec: ")] == [
        "aexec: prompt 2 of 2: the prompt is an empty text: expected at least one character"
    ]


def test_several_answers_are_printed_one_after_the_other(capsys: pytest.CaptureFixture[str]) -> None:
    """Each under its number."""
    assert run([*GENERATE, "--prompt", "one", "--temperature", "1", "-n", "2", "--no-prefix-caching"]) == 0
    out = capsys.readouterr().out
    assert "[1/2] one" in out
    assert "[2/2] one" in out


@pytest.mark.parametrize(
    ("options", "code", "words"),
    [
        (["--n", "2"], 2, "n is 2 and temperature is 0"),
        (["--timeout", "-1"], 2, "timeout is -1.0: expected a positive number of seconds"),
        (["--timeout", "0.001"], 1, "took longer than its timeout of 0.001 s"),
        (["--priority", "3", "--cache-salt", "x", "--on-overflow", "keep_last"], 0, ""),
    ],
)
def test_options_of_a_request_reach_it(
    capsys: pytest.CaptureFixture[str], options: list[str], code: int, words: str
) -> None:
    """What cannot be meant, or takes too long, is said in a line."""
    command = ["generate", "--model", "dummy:forward_seconds=0.05", "--max-tokens", "2", "--prompt", "one"]
    assert run([*command, *options]) == code
    assert words in capsys.readouterr().err
