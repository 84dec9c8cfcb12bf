"""Ctrl-C and SIGTERM for a command that has something to end in order: once for that, twice for now."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable
from types import TracebackType
from typing import Self, TypeVar

__all__ = ("Interrupts",)

T = TypeVar("T")

_NUMBERS = (signal.SIGINT, signal.SIGTERM)


class Interrupts:
    """Listens for both on the running loop, within a ``with`` block.

    Attributes:
        number: Which came; None: neither.
    """

    def __init__(self) -> None:
        self.number: signal.Signals | None = None
        self._loop = asyncio.get_running_loop()
        self._asked = asyncio.Event()

    def __repr__(self) -> str:
        return f"<Interrupts: {self.number.name if self.number else 'none'}>"

    def __enter__(self) -> Self:
        for number in _NUMBERS:
            self._loop.add_signal_handler(number, self._hear, number)
        return self

    def __exit__(self, kind: type[BaseException] | None, _: BaseException | None, at: TracebackType | None) -> None:
        for number in _NUMBERS:
            self._loop.remove_signal_handler(number)

    @property
    def exit_code(self) -> int:
        """As shells count."""
        return 128 + (self.number or 0)

    @property
    def name(self) -> str:
        """What came, for people."""
        return "Ctrl-C" if self.number is signal.SIGINT else "SIGTERM"

    async def unless(self, work: Awaitable[T]) -> T | None:
        """Wait for ``work``; None if a signal came first, and then it is cancelled, and has ended."""
        task = asyncio.ensure_future(work)
        asked = asyncio.ensure_future(self._asked.wait())
        try:
            await asyncio.wait((task, asked), return_when=asyncio.FIRST_COMPLETED)
        finally:
            asked.cancel()
            if not task.done():
                task.cancel()
                await asyncio.wait((task,))
        return None if task.cancelled() else task.result()

    def _hear(self, number: signal.Signals) -> None:
        if self.number is not None:  # now: what this process has started goes with it
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        self.number = number
        self._asked.set()
