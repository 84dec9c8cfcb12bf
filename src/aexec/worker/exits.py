"""The ways a worker process ends, other than being told to."""

from __future__ import annotations

import contextlib
import os
import sys
from typing import NoReturn

__all__ = ("ORPHANED", "exit_code", "flush_output", "vanish")

ORPHANED = 70  #: Exit code of a worker whose driver is gone.


def vanish(code: int) -> NoReturn:
    """End the process now, without any clean-up that could wait for something."""
    os._exit(code)


def exit_code(fatal: BaseException) -> int:
    """What the interpreter would make of ``sys.exit`` and its like; what it would print is printed."""
    if not isinstance(fatal, SystemExit):
        sys.excepthook(type(fatal), fatal, fatal.__traceback__)
        return 1
    if fatal.code is None or isinstance(fatal.code, int):
        return fatal.code or 0
    sys.stderr.write(f"{fatal.code}\n")
    return 1


def flush_output() -> None:
    """Before an end that flushes nothing."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):  # closed, or there is none
            stream.flush()
