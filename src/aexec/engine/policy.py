"""Who goes first, who gives way, and how much fits into one step.

First come, first served: requests are admitted in order of arrival and never overtake;
when blocks run out, the latest to arrive gives its own back. So the requests that run,
followed by those that wait, are always in order of arrival.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

from aexec.engine.request import Request
from aexec.errors import QueueFull

__all__ = ("FcfsQueue", "StepPlan", "decodes_first", "latest")


class FcfsQueue:
    """Requests that wait, in order of arrival, at most ``limit`` of them.

    Preempted requests come back to the front, and over the limit if need be: they were
    admitted once.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._requests: OrderedDict[str, Request] = OrderedDict()

    def push(self, request: Request) -> None:
        """Queue a new request.

        Raises:
            QueueFull: As many wait as may wait.
        """
        if len(self._requests) >= self.limit:
            raise QueueFull(request.request_id, self.limit)
        self._requests[request.request_id] = request

    def push_front(self, request: Request) -> None:
        """Queue a preempted request before all that wait."""
        self._requests[request.request_id] = request
        self._requests.move_to_end(request.request_id, last=False)

    def head(self) -> Request | None:
        """The request that is admitted next."""
        return next(iter(self._requests.values()), None)

    def remove(self, request: Request) -> None:
        """Take a request out, wherever it stands."""
        del self._requests[request.request_id]

    def __iter__(self) -> Iterator[Request]:
        """In order of arrival."""
        return iter(self._requests.values())

    def __len__(self) -> int:
        """How many wait."""
        return len(self._requests)

    def __repr__(self) -> str:
        """As in ``<FcfsQueue: 3/4096 waiting>``."""
        return f"<FcfsQueue: {len(self._requests)}/{self.limit} waiting>"


class StepPlan:
    """What the next step runs, while it is being decided.

    Attributes:
        budget: Tokens that still fit.
        num_scheduled_tokens: Tokens to run, by request id, in batch order.
        new_block_ids: Blocks that the step adds, by request id.
        preempted: Some request had to give way.
    """

    __slots__ = ("budget", "new_block_ids", "num_scheduled_tokens", "preempted")

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.num_scheduled_tokens: dict[str, int] = {}
        self.new_block_ids: dict[str, list[int]] = {}
        self.preempted = False

    def add(self, request: Request, num_tokens: int, block_ids: list[int]) -> None:
        """Run ``num_tokens`` of ``request``."""
        self.num_scheduled_tokens[request.request_id] = num_tokens
        self.new_block_ids[request.request_id] = block_ids
        self.budget -= num_tokens

    def drop(self, request: Request) -> None:
        """Do without ``request``, which gave its blocks back."""
        self.budget += self.num_scheduled_tokens.pop(request.request_id, 0)
        self.new_block_ids.pop(request.request_id, None)
        self.preempted = True


def decodes_first(running: dict[str, Request]) -> list[Request]:
    """Running requests in batch order: decodes, then prefills, each in order of arrival."""
    return sorted(running.values(), key=_is_prefill)


def latest(running: dict[str, Request]) -> Request:
    """The running request that gives way."""
    return next(reversed(running.values()))


def _is_prefill(request: Request) -> bool:
    return len(request.token_ids) - request.num_computed_tokens > 1
