"""The worker that the executor's bench calls; workers import it from here."""

from __future__ import annotations

import os
import socket
import sys
import time
from typing import Any

import numpy as np

from aexec import ExecuteModel, StepId, WorkerContext
from aexec.messages import GrammarOutput

__all__ = ("Subject",)


class Subject:
    """Does nothing, or moves bytes."""

    def __init__(self, context: WorkerContext) -> None:
        self.rank = context.rank

    def rank_of(self) -> int:
        """A small answer to a small call."""
        return self.rank

    def take(self, data: np.ndarray[Any, Any]) -> int:
        """Read the first and the last byte."""
        return int(data[0]) + int(data[-1])

    def echo(self, data: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Send it back."""
        return data

    def make(self, size: int) -> np.ndarray[Any, Any]:
        """Send ``size`` bytes."""
        return np.ones(size, dtype=np.uint8)

    def execute_model(self, step: ExecuteModel) -> None:
        """The forward pass of nothing."""

    def sample_tokens(self, step: StepId, grammar: GrammarOutput | None) -> list[int]:  # noqa: ARG002
        """A token."""
        return [step]

    def cpu(self) -> float:
        """Seconds of CPU that this process has used."""
        return time.process_time()

    def pid(self) -> int:
        """Whom to measure, or to kill."""
        return os.getpid()


def _echo_frames(fd: int) -> None:
    """What no executor can beat: a process that sends each frame straight back."""
    with socket.socket(fileno=fd) as line:
        while frame := line.recv(1 << 16):
            line.send(frame)


if __name__ == "__main__":
    _echo_frames(int(sys.argv[1]))
