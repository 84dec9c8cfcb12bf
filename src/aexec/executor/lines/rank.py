"""One worker as its lines show it: what it was told, what it says of itself, and when it counts as dead."""

from __future__ import annotations

import abc
import asyncio
import socket
from collections.abc import Callable

from aexec.errors import ChannelClosed, WorkerDied
from aexec.executor.lines.liveness import Signs, patience
from aexec.executor.lines.work import RankWork
from aexec.messages.process import Ended
from aexec.transport import Frame, HotWindow, LoopChannel, Writer

__all__ = ("RankLines",)


class RankLines(abc.ABC):
    """One rank. A backend says what else it sees of its end, and how it makes it end.

    Args:
        rank: Its rank.
        on_death: Told once, on the loop, that it has ended, whoever wanted it.

    Attributes:
        pid: Of its process, on its node; 0: not known yet.
        phase: What it has come to while it starts; empty once it is ready.
        work: What it was told to do.
        work_line: Ordered: steps and plain methods. It is there once :meth:`connect` was called.
        control_line: Answered at any time; likewise.
        gone: To be set when its process has ended.
    """

    work_line: LoopChannel
    control_line: LoopChannel

    def __init__(self, rank: int, on_death: Callable[[WorkerDied], None]) -> None:
        self.rank, self.pid, self.phase = rank, 0, "spawn"
        self.work = RankWork()
        self.gone = asyncio.Event()
        self._on_death = on_death
        self._loop = asyncio.get_running_loop()
        self._signs = Signs()
        self._last_words: Ended | None = None
        self._verdict: asyncio.TimerHandle | None = None
        self._told = self._closed = self._connected = False

    def __repr__(self) -> str:
        state = "gone" if self.gone.is_set() else "ending" if self.is_ending else "alive"
        return f"<{type(self).__name__} rank {self.rank} pid {self.pid}: {state}, {self.doing}>"

    @property
    def doing(self) -> str:
        """What it has come to while it starts; then the oldest that it was told and has not ended."""
        return self.phase or self.work.phase

    @property
    def can_be_told(self) -> bool:
        """True while it has lines, and they hold."""
        return self._connected and not self._closed and not self.is_ending

    @property
    @abc.abstractmethod
    def is_halted(self) -> bool:
        """True for a process that ``SIGSTOP`` or a debugger holds, where that can be seen: it does nothing it is told."""

    @property
    def is_ending(self) -> bool:
        """True once there was a sign of its end."""
        return patience(self._signs) is not None

    def connect(
        self,
        work: socket.socket,
        control: socket.socket,
        writer: Writer,
        on_frame: Callable[[Frame], None],
        hot: HotWindow | None = None,
    ) -> None:
        """It has its lines; from now on it is heard.

        Args:
            work: This process's end of the work line; owned from here on.
            control: That of the control line; likewise.
            writer: The group's.
            on_frame: Told of each frame.
            hot: The group's; polls for answers that are about to come.
        """
        name = f"rank {self.rank}"
        self.work_line = LoopChannel(work, writer, on_frame, self._line_broke, name=f"{name} work", hot=hot)
        self.control_line = LoopChannel(control, writer, on_frame, self._line_broke, name=f"{name} control", hot=hot)
        self._connected = True
        self.work_line.open()
        self.control_line.open()

    def ending(self, words: Ended) -> None:
        """It says that its code ends it."""
        self._last_words = words
        self._sign(self._signs._replace(status=True))

    def close(self) -> None:
        """Let go of everything; a process that is still there loses its lines. Twice is once."""
        self._closed = True
        if self._verdict is not None:
            self._verdict.cancel()
        if self._connected:
            self.work_line.close()
            self.control_line.close()

    @abc.abstractmethod
    def _make_end(self) -> None:
        """It counts as dead; if its process lives on, it is made to end. Never blocks."""

    @abc.abstractmethod
    def _obituary(self) -> WorkerDied:
        """How it ended, as far as anybody knows now; its :attr:`_last_words` say more than the system does."""

    def _line_broke(self, _: ChannelClosed) -> None:
        if not self._closed:
            self._sign(self._signs._replace(lines=True))

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
        """It is dead, as far as anybody can use it."""
        self._told = True
        self._make_end()
        self._on_death(self._obituary())
