"""Fills the bitmask of a step on threads, within a limit, so that one slow grammar holds up the rest only so long."""

from __future__ import annotations

import asyncio
import threading
import time
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


class _Worker:
    """A thread at a sheet: at which row, and since when."""

    __slots__ = ("began", "is_late", "row")

    def __init__(self) -> None:
        self.row: int | None = None
        self.began = 0.0
        self.is_late = False


class _Sheet:
    """One bitmask while threads write it, each taking the next row."""

    def __init__(self, wanted: Sequence[Wanted], num_words: int) -> None:
        self.bitmask: Bitmask = np.zeros((len(wanted), num_words), dtype=np.int32)
        self.todo = deque(enumerate(wanted))
        self.failed: dict[int, GrammarError] = {}
        self._lock = threading.Lock()  # held for moments, by the loop too

    def work(self, worker: _Worker) -> None:
        """Fill row after row, until none is left or the last one took too long; for a thread."""
        while (taken := self._take(worker)) is not None:
            row, (grammar, token_ids) = taken
            try:
                grammar.fill(token_ids, self.bitmask[row])
            except GrammarError as error:
                self.failed[row] = error
            except BaseException as error:  # noqa: BLE001 - a panic of the library is one too
                self.failed[row] = GrammarError(f"its library failed: {error}")

    def _take(self, worker: _Worker) -> tuple[int, Wanted] | None:
        with self._lock:
            if worker.is_late or not self.todo:
                worker.row = None
                return None
            row, wanted = self.todo.popleft()
            worker.row, worker.began = row, time.monotonic()
        return row, wanted

    def leave(self, worker: _Worker, timeout: float) -> int | None:
        """The row that has kept a worker for too long, who takes no other; None: there is none."""
        with self._lock:
            if worker.row is None or time.monotonic() < worker.began + timeout:
                return None
            worker.is_late = True
            return worker.row

    def give_up(self) -> list[int]:
        """Nobody takes a row from now on; returns those that are left."""
        with self._lock:
            rows = [row for row, _ in self.todo]
            self.todo.clear()
        return rows


_Jobs = dict["asyncio.Future[None]", _Worker]


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
        sheet, failed, jobs = _Sheet(wanted, self._num_words), dict[int, GrammarError](), _Jobs()
        while self._begin(sheet, jobs):
            began = min((worker.began for worker in jobs.values() if worker.row is not None), default=None)
            seconds = self._timeout if began is None else max(began + self._timeout - time.monotonic(), 0.0)
            done, waiting = await asyncio.wait(jobs, timeout=seconds)
            for job in done:
                del jobs[job]
            late = self._leave_late(sheet, jobs)
            failed |= {row: GrammarError(f"one mask of it took more than {self._timeout:g} s") for row in late}
            if waiting and not late and self._is_stuck(jobs):
                break
        for row in sheet.give_up():
            failed[row] = GrammarError(f"no thread is free for its mask, as those of {self.num_late} others hang")
        for job in jobs:  # they stand in line for a thread
            job.cancel()
        failed = {**sheet.failed, **failed}
        bitmask = sheet.bitmask if not failed else sheet.bitmask.copy()  # late threads write on in theirs
        bitmask[list(failed)] = -1
        return Filled(bitmask, failed)

    def _begin(self, sheet: _Sheet, jobs: _Jobs) -> bool:
        """See to it that enough threads are at work; False: there are none, and will be none."""
        num_wanted = min(self._max_threads, -(-len(sheet.todo) // _ROWS_PER_THREAD), _MOST_THREADS - len(self._late))
        for _ in range(num_wanted - len(jobs)):
            worker = _Worker()
            job = to_thread.run_sync(sheet.work, worker, abandon_on_cancel=True, limiter=self._threads)
            jobs[asyncio.ensure_future(job)] = worker
        return bool(jobs)

    def _leave_late(self, sheet: _Sheet, jobs: _Jobs) -> list[int]:
        """Leave threads behind that have been at one row for too long; returns these rows."""
        rows: list[int] = []
        for job, worker in list(jobs.items()):
            row = sheet.leave(worker, self._timeout)
            if row is not None:
                rows.append(row)
                del jobs[job]
                self._late.add(job)
                job.add_done_callback(self._late.discard)
        return rows

    def _is_stuck(self, jobs: _Jobs) -> bool:
        """All wait for threads, and there are none."""
        is_busy = any(worker.row is not None for worker in jobs.values())
        return not is_busy and self._threads.statistics().tasks_waiting > 0
