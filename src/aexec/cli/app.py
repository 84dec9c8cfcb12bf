"""The commands, and the one place where errors become exit codes.

Exit codes: 0; 1 for a failure; 2 for a wrong command, setting or request; 130 after Ctrl-C.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Sequence

from cyclopts import App

import aexec
from aexec.cli import failures, generation
from aexec.cli.doctor import report
from aexec.cli.options import EngineOptions, Flag, SamplingOptions, Texts
from aexec.cli.show import busy
from aexec.cli.worker import WorkerOptions
from aexec.cli.worker import run as run_worker
from aexec.observe import configure_logging

__all__ = ("app", "run")

app = App(
    name="aexec",
    help="Run a model that is spread over processes and machines.",
    version=aexec.__version__,
    result_action="return_value",
    exit_on_error=False,
    print_error=False,
    suppress_keyboard_interrupt=False,
)


@app.command
def generate(
    *,
    prompt: Texts,
    engine: EngineOptions,
    sampling: SamplingOptions = SamplingOptions(),  # noqa: B008 - frozen
    chat: Flag = False,
    json: Flag = False,
    debug: Flag = False,
) -> int:
    """Continue one or more prompts, all at once, and print the text as it comes.

    Args:
        prompt: A text to continue; may be given several times.
        engine: Which model, and how it runs.
        sampling: How tokens are chosen.
        chat: Take each prompt as a user's message and apply the model's chat template.
        json: Print one JSON object for each prompt, a line each, and nothing else.
        debug: Log everything to standard error, and show tracebacks.
    """
    _ = debug  # read before the command line is parsed; see `run`
    return asyncio.run(generation.generate(engine, sampling, prompt, chat=chat, as_json=json))


@app.command
def demo(*, model: str = "smollm2", max_tokens: int = 40, debug: Flag = False) -> int:
    """Let a model answer three questions at once, and show how fast it was.

    Args:
        model: Which model; SmolLM2-135M-Instruct by default.
        max_tokens: New tokens of each answer at most.
        debug: Log everything to standard error, and show tracebacks.
    """
    _ = debug
    return asyncio.run(generation.demonstrate(EngineOptions(model=model), max_tokens))


@app.command
def worker(*, node: WorkerOptions = WorkerOptions(), debug: Flag = False) -> int:  # noqa: B008 - frozen
    """Give this machine's ranks to an executor that is opened on another one, until that is closed.

    The program on node 0 opens it with ``ExecutorConfig(backend="mp", nnodes=2, master_addr=...)``. Exit codes: 0 when
    the executor was closed, 1 when node 0 was lost, 2 when it does not let this node take part, 130 after Ctrl-C.

    Args:
        node: Which node this is, and where the leader is.
        debug: Log everything to standard error, and show tracebacks.
    """
    _ = debug
    return run_worker(node)


@app.command
def doctor() -> int:
    """Say what this machine can run, which extras are there, and how to get what is missing."""
    with busy() as told:
        text = report(told)
    print(text)
    return 0


def run(arguments: Sequence[str]) -> int:
    """Run one command and return its exit code."""
    debug = "--debug" in arguments
    if (reconfigure := getattr(sys.stdout, "reconfigure", None)) is not None:
        reconfigure(errors="replace")  # a model may write what a terminal cannot show
    try:
        configure_logging("debug" if debug else None)
        code = app(arguments)
        sys.stdout.flush()
    except KeyboardInterrupt:
        print("\naexec: stopped", file=sys.stderr)
        return failures.INTERRUPTED
    except Exception as error:  # noqa: BLE001 - the border to the user: an exit code and a line
        if isinstance(failures.root_of(error), BrokenPipeError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # it is flushed once more at the end
            return failures.FAILURE
        failures.explain(error, debug=debug)
        return failures.exit_code(error)
    return code if isinstance(code, int) else 0
