"""What a person sees: a progress bar while loading, text as it comes, and a table."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from aexec.cli.answers import Answer
from aexec.executor.base import Executor

__all__ = ("InOrder", "Loading", "busy", "loading", "places", "summary", "table")

_PHASES = {
    "cluster": "joining the Ray cluster",
    "placement": "waiting for room in the Ray cluster",
    "actors": "starting the workers",
    "environment": "starting the workers",
    "connect": "starting the workers",
    "step plane": "compiling the graph",
    "spawn": "starting the workers",
    "spawned": "starting the workers",
    "connected": "starting the workers",
    "import": "importing the worker class",
    "worker_init": "running worker_init",
    "__init__": "constructing the workers",
    "constructed": "constructing the workers",
    "init_device": "preparing the device",
    "load_model": "loading",
    "convert": "converting it, once",
    "weights": "reading weights",
    "pack": "packing weights",
    "determine_available_memory": "measuring the memory",
    "initialize_cache": "making room for the KV cache",
    "compile_or_warm_up": "warming up",
}


class Loading:
    """One bar that says which phase an engine's opening is in, and how far that is."""

    def __init__(self, progress: Progress, model: str) -> None:
        self._progress, self._title = progress, f"opening {model}"
        self._task = progress.add_task(self._title, total=None)

    def __call__(self, phase: str, done: float, total: float) -> None:
        """Show that ``done`` of ``total`` units of ``phase`` are through."""
        title = f"{self._title}: {_PHASES.get(phase, phase.replace('_', ' '))}"
        almost = 0.99 * done  # a bar that is full would stand still until the next phase
        self._progress.update(self._task, description=title, completed=almost, total=total)


@contextmanager
def loading(model: str, *, quiet: bool = False) -> Generator[Loading]:
    """Show on standard error how far ``model`` is, while the block runs; a pipe sees nothing of it, nor does ``quiet``."""
    console = Console(stderr=True)
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=quiet or not console.is_terminal) as progress:
        yield Loading(progress, model)


@contextmanager
def busy() -> Generator[Callable[[str], None]]:
    """Show on standard error what is being done, as it is told, while the block runs; a pipe sees nothing of it."""
    console = Console(stderr=True)
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=None)

        def tell(what: str) -> None:
            progress.update(task, description=what, refresh=True)

        yield tell


class InOrder:
    """Streams several texts one after the other, though they come all at once.

    The first prompt that has not ended is written as its text comes; the text of later
    ones is held until their turn. One that fails before it says anything has no heading.
    """

    def __init__(self, prompts: Sequence[str], out: TextIO) -> None:
        self._prompts, self._out = prompts, out
        self._held = ["" for _ in prompts]
        self._began = [False for _ in prompts]
        self._ended = [False for _ in prompts]
        self._turn = 0
        self._has_text = self._has_heading = False  # the prompt whose turn it is
        self._gap = ""

    def __repr__(self) -> str:
        """Return how far it is."""
        return f"<InOrder: prompt {self._turn + 1} of {len(self._prompts)}>"

    def __call__(self, index: int, text: str, ended: bool) -> None:  # noqa: FBT001 - a callback's third fact
        """Take new text of prompt ``index``."""
        self._held[index] += text
        self._began[index] = self._began[index] or bool(text) or not ended
        self._ended[index] = ended
        while self._turn < len(self._prompts):
            if self._began[self._turn]:
                self._write()
            if not self._ended[self._turn]:
                break
            self._next()
        self._out.flush()

    def _write(self) -> None:
        held, self._held[self._turn] = self._held[self._turn], ""
        if len(self._prompts) > 1 and not self._has_heading:
            self._out.write(f"{self._gap}[{self._turn + 1}/{len(self._prompts)}] {self._prompts[self._turn]}\n")
        self._has_heading, self._gap = True, "\n"
        self._has_text = self._has_text or bool(held)
        self._out.write(held)

    def _next(self) -> None:
        self._out.write("\n" if self._has_text else "")
        self._turn, self._has_text, self._has_heading = self._turn + 1, False, False


def summary(answers: Sequence[Answer], seconds: float) -> str:
    """Return one line: how many tokens, how fast, how soon."""
    records = [answer.record for answer in answers if answer.record is not None]
    tokens = sum(record.num_completion_tokens for record in records)
    first = min((record.first_token_seconds for record in records), default=0.0)
    return (
        f"{tokens} tokens in {seconds:.2f} s, {tokens / seconds:.1f} tokens/s, first token after {first * 1e3:.0f} ms"
    )


def places(executor: Executor, *, is_started: bool) -> str:
    """Return one line: the Ray cluster, and how many ranks are on which of its nodes."""
    address = executor.describe()["ray_address"].value
    cluster = "started a cluster on this machine" if is_started else f"joined {address}"
    nodes = Counter(rank.node for rank in executor.ranks)
    ranks = ", ".join(f"{count} rank{'s' * (count > 1)} on {node}" for node, count in nodes.items())
    return f"ray: {cluster}; {ranks}"


def table(answers: Sequence[Answer], seconds: float) -> None:
    """Print the figures of each answer, and of all together, to standard output."""
    shown = Table("prompt")
    for title in ("tokens", "tokens/s", "time to first token", "ended by"):
        shown.add_column(title, justify="right")
    for number, answer in enumerate(answers, 1):
        if (record := answer.record) is not None:
            shown.add_row(
                f"{number}/{len(answers)}",
                str(record.num_completion_tokens),
                f"{record.tokens_per_second:.1f}",
                f"{record.first_token_seconds * 1e3:.0f} ms",
                record.finish_reason,
            )
    Console(file=sys.stdout).print(shown)
    print(f"all together: {summary(answers, seconds)}")
