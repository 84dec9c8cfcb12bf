"""Work that several wait for: begun once for a key, and ended with the last who waits for it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Hashable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

__all__ = ("SharedWork",)

_K = TypeVar("_K", bound=Hashable)
_T = TypeVar("_T")


@dataclass(slots=True, eq=False)
class _Job(Generic[_T]):
    task: asyncio.Task[_T]
    num_waiting: int = 0


class SharedWork(Generic[_K, _T]):
    """What is under way, by key; on one loop.

    Args:
        begin: Does the work for a key; it is cancelled once nobody waits for it.
        take: Told what came of it, if it was no error.
    """

    def __init__(self, begin: Callable[[_K], Coroutine[Any, Any, _T]], take: Callable[[_K, _T], object]) -> None:
        self._begin, self._take = begin, take
        self._jobs: dict[_K, _Job[_T]] = {}
        self._ending: set[asyncio.Task[_T]] = set()  # cancelled, and not at their end yet

    def __repr__(self) -> str:
        """As in ``<SharedWork: 3 under way for 4, 1 is given up>``."""
        num_waiting = sum(job.num_waiting for job in self._jobs.values())
        return f"<SharedWork: {len(self._jobs)} under way for {num_waiting}, {len(self._ending)} given up>"

    def __len__(self) -> int:
        """How much is under way that somebody waits for."""
        return len(self._jobs)

    def __contains__(self, key: _K) -> bool:
        """Somebody waits for the same."""
        return key in self._jobs

    async def get(self, key: _K) -> _T:
        """Wait for what comes of a key's work, which is begun unless it is under way."""
        job = self._jobs.get(key)
        if job is None:
            job = self._jobs[key] = _Job(asyncio.ensure_future(self._begin(key)))
            job.task.add_done_callback(lambda task: self._ended(key, task))
        job.num_waiting += 1
        try:
            return await asyncio.shield(job.task)  # it is others' too
        finally:
            job.num_waiting -= 1
            if not job.num_waiting and not job.task.done():
                self._give_up(key, job.task)

    async def aclose(self) -> None:
        """Give up all of it, and wait for its end."""
        for key, job in list(self._jobs.items()):
            self._give_up(key, job.task)
        await asyncio.gather(*self._ending, return_exceptions=True)

    def _give_up(self, key: _K, task: asyncio.Task[_T]) -> None:
        if task not in self._ending:
            del self._jobs[key]  # who asks from now on begins anew
            self._ending.add(task)
            task.cancel()

    def _ended(self, key: _K, task: asyncio.Task[_T]) -> None:
        if task in self._ending:
            self._ending.discard(task)
        else:
            del self._jobs[key]
        if not task.cancelled() and task.exception() is None:
            self._take(key, task.result())
