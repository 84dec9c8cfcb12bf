"""Who goes first, who gives way, and how much fits into one step.

The more important first, and among equals first come, first served: requests are admitted in
this order and none overtakes a ready one; when blocks run out, the least important to run, and
of those the latest to arrive, gives its own back.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterator
from operator import attrgetter

from aexec.engine.request import Request, RequestStatus
from aexec.errors import QueueFull

__all__ = ("StepPlan", "WaitingQueue", "admit", "decodes_first", "least")

_rank = attrgetter("rank")


class WaitingQueue:
    """Requests that wait, the more important first, at most ``limit`` of them.

    Those that are not ready stand aside and hold up nobody. Preempted requests come back to
    their place, and over the limit if need be: they were admitted once.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._ready: list[Request] = []  # by rank
        self._aside: dict[str, Request] = {}

    def check_room(self, request: Request, num_requests: int = 1) -> None:
        """See whether so many new requests may wait.

        Raises:
            QueueFull: They may not.
        """
        if len(self) + num_requests > self.limit:
            raise QueueFull(request.request_id, self.limit, num_samples=num_requests)

    def push(self, request: Request) -> None:
        """Queue a request at its place, or aside."""
        if request.is_ready:
            bisect.insort_right(self._ready, request, key=_rank)
        else:
            self._aside[request.request_id] = request

    def settle(self, request: Request) -> None:
        """Take a request that stands aside to its place, if it is ready now."""
        if request.is_ready and self._aside.pop(request.request_id, None) is not None:
            self.push(request)

    def head(self, request_id: str | None = None, *, has_begun: bool = False) -> Request | None:
        """The request that is admitted next: of all, this one, or of those that ran before; None: none is ready."""
        if request_id is not None:
            return next((request for request in self._ready if request.request_id == request_id), None)
        if has_begun:
            return next((request for request in self._ready if request.status is RequestStatus.PREEMPTED), None)
        return self._ready[0] if self._ready else None

    def remove(self, request: Request) -> None:
        """Take a request out, wherever it stands."""
        if self._aside.pop(request.request_id, None) is None:
            del self._ready[self._ready.index(request, bisect.bisect_left(self._ready, request.rank, key=_rank))]

    @property
    def num_ready(self) -> int:
        """How many wait for nothing but their turn."""
        return len(self._ready)

    def __iter__(self) -> Iterator[Request]:
        """By rank, then those that are not ready."""
        return itertools.chain(self._ready, self._aside.values())

    def __len__(self) -> int:
        """How many wait."""
        return len(self._ready) + len(self._aside)

    def __repr__(self) -> str:
        """As in ``<WaitingQueue: 3/4096 waiting, 1 of them not ready>``."""
        aside = f", {len(self._aside)} of them not ready" if self._aside else ""
        return f"<WaitingQueue: {len(self)}/{self.limit} waiting{aside}>"


class StepPlan:
    """What the next step runs, while it is being decided.

    Attributes:
        budget: Tokens that still fit.
        room: Requests that still fit.
        num_scheduled_tokens: Tokens to run, by request id, in batch order.
        new_block_ids: Blocks that the step adds, by request id; of most requests it adds none.
        preempted: Some request had to give way.
    """

    __slots__ = ("budget", "new_block_ids", "num_scheduled_tokens", "preempted", "room")

    def __init__(self, budget: int, max_num_requests: int | None = None) -> None:
        self.budget = budget
        self.room = budget if max_num_requests is None else max_num_requests  # each request runs a token at least
        self.num_scheduled_tokens: dict[str, int] = {}
        self.new_block_ids: dict[str, list[int]] = {}
        self.preempted = False

    def add(self, request: Request, num_tokens: int) -> None:
        """Run ``num_tokens`` of ``request``."""
        self.num_scheduled_tokens[request.request_id] = num_tokens
        self.budget -= num_tokens
        self.room -= 1

    def drop(self, request: Request) -> None:
        """Do without ``request``, which gave its blocks back."""
        num_tokens = self.num_scheduled_tokens.pop(request.request_id, 0)
        self.budget += num_tokens
        self.room += num_tokens > 0
        self.new_block_ids.pop(request.request_id, None)
        self.preempted = True


def decodes_first(running: dict[str, Request]) -> list[Request]:
    """Running requests in batch order: decodes, then prefills, each by rank."""
    decodes: list[Request] = []
    prefills: list[Request] = []
    for request in running.values():
        is_prefill = len(request.token_ids) - request.num_computed_tokens > 1
        (prefills if is_prefill else decodes).append(request)
    return decodes + prefills


def admit(running: dict[str, Request], request: Request) -> None:
    """Put a request among those that run, which stay in order of rank."""
    last = next(reversed(running.values()), None)
    running[request.request_id] = request
    if last is not None and last.rank > request.rank:
        in_order = sorted(running.items(), key=lambda item: item[1].rank)
        running.clear()
        running.update(in_order)


def least(running: dict[str, Request]) -> Request:
    """The running request that gives way."""
    return next(reversed(running.values()))
