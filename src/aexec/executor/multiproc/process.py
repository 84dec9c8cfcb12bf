"""One worker process as the driver sees it: its output, its life and its death."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable

from aexec.errors import WorkerDied
from aexec.executor.lines.rank import RankLines
from aexec.executor.multiproc.output import WorkerOutput
from aexec.executor.multiproc.spawn import Exit, Started
from aexec.executor.proc import process_state
from aexec.messages.process import Ended

__all__ = ("WorkerProcess",)


class WorkerProcess(RankLines):
    """One rank, a child of the fork server.

    Args:
        rank: Its rank.
        output: Reads what it prints.
        on_death: Told once that it has ended, whoever wanted it.

    Attributes:
        work_end: Its end of the work line, until it has come to life; it is closed with this.
    """

    def __init__(self, rank: int, output: WorkerOutput, on_death: Callable[[WorkerDied], None]) -> None:
        super().__init__(rank, on_death)
        self.output = output
        self.work_end: socket.socket | None = None
        self._pidfd = -1
        self._exit: Exit | None = None

    @property
    def can_be_told(self) -> bool:
        """True while there is a process, and its lines hold."""
        return self._pidfd >= 0 and super().can_be_told

    @property
    def is_halted(self) -> bool:
        """True for a process that ``SIGSTOP`` or a debugger holds: it does nothing it is asked for."""
        return process_state(self.pid) == "stopped"

    def started(self, started: Started) -> None:
        """It has a process."""
        if self._closed:
            os.close(started.pidfd)  # the fork server ends, and takes it along
            return
        self.pid, self._pidfd = started
        self.output.label = f"rank {self.rank} pid {self.pid}"
        self._close_ends()
        self._loop.add_reader(self._pidfd, self._process_ended)

    def exited(self, how: Exit) -> None:
        """Its exit status is known."""
        self._exit = how
        self._sign(self._signs._replace(status=True))

    def ending(self, words: Ended) -> None:
        """It says that its code ends it."""
        self._exit = Exit(words.exit_code, None)
        super().ending(words)

    def kill(self, *numbers: signal.Signals) -> bool:
        """Send it signals; False if it has ended."""
        if self._pidfd < 0:
            return False
        try:
            for number in numbers:
                signal.pidfd_send_signal(self._pidfd, number)
        except ProcessLookupError:
            return False
        return True

    def close(self) -> None:
        """Let go of everything; a process that is still there loses its lines."""
        super().close()
        self._close_ends()
        self.output.close()
        if self._pidfd >= 0:
            self._loop.remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = -1

    def _close_ends(self) -> None:
        if self.work_end is not None:
            self.work_end.close()
        self.output.close_write_end()

    def _process_ended(self) -> None:
        self._loop.remove_reader(self._pidfd)
        self.gone.set()
        self._sign(self._signs._replace(process=True))

    def _make_end(self) -> None:
        self.kill(signal.SIGKILL)
        self.output.drain()

    def _obituary(self) -> WorkerDied:
        code, by = self._exit or Exit(None, None)
        words, tail = self._last_words, self.output.tail
        if words is not None:
            return WorkerDied(self.rank, self.pid, words.exit_code, None, words.phase, words.step, tail)
        return WorkerDied(self.rank, self.pid, code, by, self.doing, self.work.step, tail)
