"""Signals stay the program's: what Ray does to them while it connects is undone.

Ray's native part takes SIGTERM, SIGABRT and the signals of crashes for itself, from whatever
thread: on SIGTERM it prints a stack, calls the handler that was there, and *aborts the process
three seconds later*, which is no time for a server that drains its requests. Python cannot see
that (``signal.getsignal`` tells its own table), so the kernel's is kept and put back.

Source: Abseil, ``absl/debugging/failure_signal_handler.cc``: ``kFailureSignalData`` has the signals,
``FailureSignalHandlerOptions::alarm_on_failure_secs`` the three seconds.
"""

from __future__ import annotations

import contextlib
import ctypes
import signal
from collections.abc import Generator

__all__ = ("kept_signals",)

_TAKEN = (
    signal.SIGTERM, signal.SIGABRT, signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGTRAP,
)  # fmt: skip
_ROOM = 512  # bytes; a ``struct sigaction`` has 152 on Linux, and is kept without being looked into


@contextlib.contextmanager
def kept_signals() -> Generator[None]:
    """Put the process's signal actions back as they were before."""
    libc = ctypes.CDLL(None)
    actions = {number: ctypes.create_string_buffer(_ROOM) for number in _TAKEN}
    kept = [number for number, action in actions.items() if libc.sigaction(int(number), None, action) == 0]
    try:
        yield
    finally:
        for number in kept:
            libc.sigaction(int(number), actions[number], None)
