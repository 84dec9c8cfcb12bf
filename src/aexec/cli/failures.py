"""What a command says when it does not succeed: one readable line and an exit code."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterable
from typing import cast

from cyclopts import CycloptsError, MissingArgumentError, UnusedCliTokensError

from aexec.errors import AexecError, ConfigError, InvalidRequest, LinkRefused

__all__ = ("FAILURE", "INTERRUPTED", "USAGE", "exit_code", "explain", "root_of", "worst")

FAILURE = 1
USAGE = 2
INTERRUPTED = 130  # 128 + SIGINT, as shells count
_MISSING = {
    "--prompt": "a prompt is missing: give it as in --prompt 'Hello'; it is no positional argument",
    "--model": "a model is missing: give it as in --model smollm2, or --model dummy, which needs no torch",
}
_USAGE_ERRORS = (CycloptsError, ConfigError, InvalidRequest, LinkRefused)


def exit_code(error: BaseException) -> int:
    """Return 2 for what the user mends in the command, 1 for what failed."""
    return USAGE if isinstance(root_of(error), _USAGE_ERRORS) else FAILURE


def worst(errors: Iterable[BaseException | None]) -> int:
    """Return the exit code of several requests: 0, or 1 if anything failed, or 2 if all are usage."""
    codes = {exit_code(error) for error in errors if error is not None}
    return min(codes, default=0)


def root_of(error: BaseException) -> BaseException:
    """Return the first error of a group, and any other error as it is."""
    while isinstance(error, BaseExceptionGroup):
        error = cast("BaseExceptionGroup[BaseException]", error).exceptions[0]
    return error


def _said(error: AexecError | CycloptsError) -> str:
    """The error's text; where the parser only names what it does not understand, also what was meant, most likely."""
    if isinstance(error, UnusedCliTokensError):
        words = " ".join(error.unused_tokens or ())
        said = f"{words!r} belongs to no option"
        if "generate" not in (error.command_chain or ()):
            return said
        return f"{said}: a prompt is given by --prompt, in quotes if it has several words"
    if isinstance(error, MissingArgumentError) and error.argument is not None:
        return _MISSING.get(error.argument.name, str(error))
    return str(error)


def explain(error: BaseException, about: str = "", *, debug: bool = False) -> None:
    """Print ``error`` as a line to standard error; with ``debug``, its traceback first.

    Args:
        error: What happened.
        about: What it happened to, as in ``prompt 2 of 3: ``.
        debug: Print the traceback too.
    """
    if debug:
        traceback.print_exception(error)
    error = root_of(error)
    if isinstance(error, AexecError | CycloptsError):
        print(f"aexec: {about}{_said(error)}", file=sys.stderr)
        return
    hint = "" if debug else " (a fault of aexec or of its surroundings: --debug shows where)"
    print(f"aexec: {about}{type(error).__name__}: {error}{hint}", file=sys.stderr)
