"""Fills the bitmask of a step on threads, within a limit, so that one slow grammar holds up the rest only so long."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from anyio import CapacityLimiter, to_thread

from aexec.engine.grammar.base import Bitmask, GrammarError
from aexec.engine.grammar.following import RequestGrammar

__all__ = ("Filled", "Filler", "Wanted")

_ROWS_PER_THREAD = 16
_MOST_THREADS = 64  # late ones among them


class Wanted(NamedTuple):
    """A row that is wanted.

    Attributes:
        grammar: Whose.
        token_ids: The output so far; the row says what may follow.
    """

    grammar: RequestGrammar
    token_ids: Sequence[int]


class Filled(NamedTuple):
    """A bitmask, and the rows that it could not have.

    Attributes:
        bitmask: int32 ``[num_rows, num_words]``; a row that failed allows everything.
        failed: By row: why.
    """

    bitmask: Bitmask
    failed: dict[int, GrammarError]


class _Sheet:
    """One bitmask while threads write it, each taking the next row."""

    def __init__(self, wanted: Sequence[Wanted], num_words: int) -> None:
        self.bitmask: Bitmask = np.zeros((len(wanted), num_words), dtype=np.int32)
        self.todo = deque(enumerate(wanted))
        self.busy: set[int] = set()
        self.failed: dict[int, GrammarError] = {}

    def work(self) -> None:
        while self.todo:
            try:
                row, (grammar, token_ids) = self.todo.popleft()
            except IndexError:  # another thread took the last one
                return
            self.busy.add(row)
            try:
                grammar.fill(token_ids, self.bitmask[row])
            except GrammarError as error:
                self.failed[row] = error
            except BaseException as error:  # noqa: BLE001 - a panic of the library is one too
                self.failed[row] = GrammarError(f"its library failed: {error}")
            self.busy.discard(row)


class Filler:
    """Fills bitmasks.

    Args:
        num_words: Words of a row.
        timeout: Seconds that one row may hold up the others.
        max_threads: Threads that share the rows of a step.
    """

    def __init__(self, num_words: int, timeout: float, max_threads: int) -> None:
        self._num_words, self._timeout, self._max_threads = num_words, timeout, max_threads
        self._threads = CapacityLimiter(_MOST_THREADS)  # a program that is short of threads has these all the same
        self._late: set[asyncio.Future[None]] = set()

    def __repr__(self) -> str:
        """As in ``<Filler: 0 late>``."""
        return f"<Filler: {len(self._late)} late>"

    @property
    def num_late(self) -> int:
        """Threads that work on rows nobody waits for any longer."""
        return len(self._late)

    async def fill(self, wanted: Sequence[Wanted]) -> Filled:
        """A new bitmask with a row for each grammar."""
        sheet, failed = _Sheet(wanted, self._num_words), dict[int, GrammarError]()
        while sheet.todo:
            late = await self._round(sheet)
            if late:
                for row in list(sheet.busy):
                    failed.setdefault(row, GrammarError(f"one mask of it took more than {self._timeout:g} s"))
        failed = {**sheet.failed, **failed}
        bitmask = sheet.bitmask if not failed else sheet.bitmask.copy()  # late threads write on in theirs
        bitmask[list(failed)] = -1
        return Filled(bitmask, failed)

    async def _round(self, sheet: _Sheet) -> bool:
        """Work on the sheet; True: a row has taken too long."""
        threads = min(self._max_threads, -(-len(sheet.todo) // _ROWS_PER_THREAD))
        jobs = {
            asyncio.ensure_future(to_thread.run_sync(sheet.work, abandon_on_cancel=True, limiter=self._threads))
            for _ in range(threads)
        }
        _, late = await asyncio.wait(jobs, timeout=self._timeout)
        for job in late:
            self._late.add(job)
            job.add_done_callback(self._late.discard)
        return bool(late)
