"""One worker process as the driver sees it: its lines, its output, its life and its death."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from functools import partial

from aexec.errors import ChannelClosed, WorkerDied
from aexec.executor.multiproc.liveness import Signs, patience
from aexec.executor.multiproc.output import WorkerOutput
from aexec.executor.multiproc.spawn import Exit, Started
from aexec.executor.multiproc.work import RankWork
from aexec.executor.proc import process_state
from aexec.messages.process import Ended, Launch
from aexec.transport import Frame, HotWindow, Kind, LoopChannel, Writer, seqpacket_pair

__all__ = ("WorkerProcess",)


class WorkerProcess:
    """One rank.

    Args:
        rank: Its rank.
        writer: The group's; both lines send through it.
        output: Reads what it prints.
        on_frame: Told of each frame, with the rank.
        on_death: Told once that it has ended, whoever wanted it.
        hot: The group's; polls for answers that are about to come.

    Attributes:
        work: What it was told to do.
        work_line: Ordered: steps and plain methods.
        control_line: Answered at any time.
        phase: What it has come to while it starts; empty once it is ready.
        gone: Set when its process has ended.
    """

    def __init__(
        self,
        rank: int,
        writer: Writer,
        output: WorkerOutput,
        on_frame: Callable[[int, Frame], None],
        on_death: Callable[[WorkerDied], None],
        hot: HotWindow | None = None,
    ) -> None:
        self.rank, self.output = rank, output
        self.pid = 0
        self.phase = "spawn"
        self.work = RankWork()
        self.gone = asyncio.Event()
        self._on_death = on_death
        self._loop = asyncio.get_running_loop()
        hear = partial(on_frame, rank)
        ours, self.work_end = seqpacket_pair()
        self.work_line = LoopChannel(ours, writer, hear, self._line_broke, name=f"rank {rank} work", hot=hot)
        ours, self.control_end = seqpacket_pair()
        self.control_line = LoopChannel(ours, writer, hear, self._line_broke, name=f"rank {rank} control", hot=hot)
        self._pidfd = -1
        self._broken = 0
        self._signs = Signs()
        self._exit: Exit | None = None
        self._last_words: Ended | None = None
        self._verdict: asyncio.TimerHandle | None = None
        self._told = self._closed = False

    def __repr__(self) -> str:
        state = "gone" if self.gone.is_set() else "ending" if self.is_ending else "alive"
        return f"<WorkerProcess rank {self.rank} pid {self.pid}: {state}, {self.phase or self.work.phase}>"

    @property
    def can_be_told(self) -> bool:
        """True while there is a process, and its lines hold."""
        return self._pidfd >= 0 and not self._closed and not self.is_ending

    @property
    def is_halted(self) -> bool:
        """True for a process that ``SIGSTOP`` or a debugger holds: it does nothing it is asked for."""
        return process_state(self.pid) == "stopped"

    @property
    def is_ending(self) -> bool:
        """True once there was a sign of its end."""
        return patience(self._signs) is not None

    def launch(self, launch: Launch) -> None:
        """Begin to listen, and tell the worker who it is: it may read that once it has come to life."""
        self.work_line.open()
        self.control_line.open()
        self.work_line.send(Kind.LAUNCH, 0, launch, (self.control_end.fileno(),))
        self.control_end.close()

    def started(self, started: Started) -> None:
        """It has a process."""
        if self._closed:
            os.close(started.pidfd)  # the fork server ends, and takes it along
            return
        self.pid, self._pidfd = started
        self.output.label = f"rank {self.rank} pid {self.pid}"
        self.work_end.close()
        self.output.close_write_end()
        self._loop.add_reader(self._pidfd, self._process_ended)

    def exited(self, how: Exit) -> None:
        """Its exit status is known."""
        self._exit = how
        self._sign(self._signs._replace(status=True))

    def ending(self, words: Ended) -> None:
        """It says that its code ends it."""
        self._last_words = words
        self.exited(Exit(words.exit_code, None))

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
        self._closed = True
        if self._verdict is not None:
            self._verdict.cancel()
        for line in (self.work_line, self.control_line):
            line.close()
        for end in (self.work_end, self.control_end):
            end.close()
        self.output.close()
        if self._pidfd >= 0:
            self._loop.remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = -1

    def _line_broke(self, _: ChannelClosed) -> None:
        self._broken += 1
        if not self._closed:
            self._sign(self._signs._replace(lines=True))

    def _process_ended(self) -> None:
        self._loop.remove_reader(self._pidfd)
        self.gone.set()
        self._sign(self._signs._replace(process=True))

    def _sign(self, signs: Signs) -> None:
        """One more sign of its end."""
        self._signs = signs
        wait = patience(signs)
        if self._told or wait is None:
            return
        if self._verdict is not None:
            self._verdict.cancel()
        self._verdict = self._loop.call_later(wait, self._pronounce)

    def _pronounce(self) -> None:
        """It is dead, as far as anybody can use it; if its process lives on, it is made to end."""
        self._told = True
        self.kill(signal.SIGKILL)
        self.output.drain()
        self._on_death(self._obituary())

    def _obituary(self) -> WorkerDied:
        code, by = self._exit or Exit(None, None)
        words, tail = self._last_words, self.output.tail
        if words is not None:
            return WorkerDied(self.rank, self.pid, words.exit_code, None, words.phase, words.step, tail)
        return WorkerDied(self.rank, self.pid, code, by, self.phase or self.work.phase, self.work.step, tail)
