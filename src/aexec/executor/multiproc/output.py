"""What worker processes print: passed on line by line, with the rank in front, the last lines kept."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections import deque
from collections.abc import Callable
from typing import Literal

from aexec.observe import get_logger

__all__ = ("TAIL", "WorkerOutput", "forwarder", "prefixed")

TAIL = 50  # lines that are kept for errors: the stacks that the interpreter prints on a crash take 40
_LONGEST = 1 << 16  # bytes of a line; a longer one is passed on in pieces
_AT_ONCE = 16  # reads before other work of the loop gets its turn
_AT_THE_END = 64  # reads, in case somebody goes on writing

Forward = Callable[[str, str], None]  # forward(label, line)


def prefixed(label: str, line: str) -> str:
    """The line with its origin in front; a JSON object stays one, for whatever reads it."""
    return line if line.startswith("{") and line.endswith("}") else f"({label}) {line}"


def forwarder(where: Literal["stderr", "log", "none"]) -> Forward:
    """Where lines go: this process's standard error, its log, or nowhere (errors still quote the last)."""
    if where == "none":
        return lambda label, line: None  # noqa: ARG005
    if where == "log":
        log = get_logger("aexec.worker")
        return lambda label, line: log.info(line, worker=label)
    return _to_stderr


def _to_stderr(label: str, line: str) -> None:
    with contextlib.suppress(OSError, ValueError, AttributeError):  # none, closed, or nobody reads it
        sys.stderr.write(prefixed(label, line) + "\n")
        sys.stderr.flush()


class WorkerOutput:
    """Reads the output pipe of one process on the loop.

    Args:
        label: Whose, as in ``rank 2 pid 123``; may be set later.
        forward: Where the lines go.
    """

    def __init__(self, label: str, forward: Forward) -> None:
        self.label = label
        self._forward = forward
        self._tail: deque[str] = deque(maxlen=TAIL)
        self._rest = b""
        self._loop = asyncio.get_running_loop()
        self._read_end, self.write_end = os.pipe()
        os.set_blocking(self._read_end, False)
        self._loop.add_reader(self._read_end, self._read)

    def __repr__(self) -> str:
        return f"<WorkerOutput of {self.label}: {len(self._tail)} lines kept>"

    @property
    def tail(self) -> str:
        """The last lines."""
        return "\n".join(self._tail)

    def close_write_end(self) -> None:
        """Once the process has it, or will not get it."""
        if self.write_end >= 0:
            os.close(self.write_end)
            self.write_end = -1

    def drain(self) -> None:
        """Read all that is there now; a grandchild may hold the pipe open, so its end is not waited for."""
        for _ in range(_AT_THE_END):
            if not self._read_some():
                return

    def close(self) -> None:
        """Pass on what is left, and end."""
        self.close_write_end()
        if self._read_end >= 0:
            self.drain()
        if self._rest:
            self._line(self._rest)
            self._rest = b""
        self._close_read_end()

    def _close_read_end(self) -> None:
        if self._read_end >= 0:
            self._loop.remove_reader(self._read_end)
            os.close(self._read_end)
            self._read_end = -1

    def _read(self) -> None:
        for _ in range(_AT_ONCE):
            if not self._read_some():
                return

    def _read_some(self) -> bool:
        """True if there may be more."""
        if self._read_end < 0:
            return False
        try:
            data = os.read(self._read_end, _LONGEST)
        except BlockingIOError:
            return False
        if not data:
            self._close_read_end()
            return False
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) >= _LONGEST:
            lines, self._rest = [*lines, self._rest], b""
        for line in lines:
            self._line(line)
        return True

    def _line(self, line: bytes) -> None:
        text = line.decode(errors="replace").rstrip("\r")
        self._tail.append(text)
        self._forward(self.label, text)
