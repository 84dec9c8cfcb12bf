"""Sleep, wake-up and new weights, on all ranks alike: what is in memory decides what may run.

The executor keeps one :class:`~aexec.model.residency.Residency` for the group, by what it
has asked for and the ranks have confirmed; so a step on half a model is refused here,
whatever the worker class. Where only some ranks have confirmed, the worst is taken for true.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from typing import Any

import anyio

from aexec.errors import ModelNotReady
from aexec.executor.collective import Call
from aexec.executor.steps import StepLine
from aexec.messages.operations import WEIGHT_METHODS
from aexec.model.residency import TRANSITIONS, Residency, WeightsEvent, WeightsState, sleep_event, wake_tags

__all__ = ("Memory", "Operation")

_STARTS, _FINISHES, _CANCELS = "start_weight_update", "finish_weight_update", "cancel_weight_update"


class Operation:
    """One operation of an actor's task; it may be taken back until it was sent."""

    def __init__(self) -> None:
        self.is_sent = False


class Memory:
    """The memory of one generation.

    Args:
        steps: The steps, which an operation waits for.
        world_size: Ranks.
    """

    def __init__(self, steps: StepLine, world_size: int) -> None:
        self.residency = Residency()
        self.residency.move(WeightsEvent.LOADED)
        self.residency.cache_made()
        self._steps, self._world_size = steps, world_size
        self._turn = anyio.Lock()
        self._going_to_sleep = False
        self._before = WeightsState.READY  # what the weights were before an update
        self._loaded: set[int] = set()  # ranks that have new weights, when others may not

    def __repr__(self) -> str:
        return f"<Memory: {self.state}>"

    @property
    def is_ready(self) -> bool:
        """True when steps may run."""
        return self.residency.weights is WeightsState.READY and not self.residency.cache_sleeps

    @property
    def state(self) -> str:
        """For people: ``ready``, or what is not there."""
        if self._going_to_sleep:
            return "going to sleep"
        if self.is_ready:
            return "ready"
        cache = ["the KV cache is asleep"] if self.residency.cache_sleeps else []
        weights = [] if self.residency.weights is WeightsState.READY else [self.residency.weights.value]
        return ", ".join([*weights, *cache])

    def check(self, what: str) -> None:
        """Refuse what needs a whole model.

        Raises:
            ModelNotReady: It is not whole; says what to do.
        """
        if self._going_to_sleep:
            raise ModelNotReady(what, "the executor is going to sleep", "call wake_up() once it sleeps")
        self.residency.require_ready(what)

    async def sleep(
        self, level: int, ask: Callable[..., Any], timeout: float | None, operation: Operation
    ) -> list[Any]:
        """Let go of memory, once no step is in flight.

        Args:
            level: 1 keeps the weights in host memory, 2 discards them.
            ask: Calls a worker method on all ranks: ``await ask(method, args, timeout)``.
            timeout: Seconds for all of it; None: no limit.
            operation: Told when it can no longer be taken back.

        Raises:
            ModelNotReady: Half updated weights cannot be put away.
            CallTimeout: Steps are in flight still, or the ranks have not answered.
        """
        event, ends = sleep_event(level), _end(timeout)
        async with self._turn:
            self.residency.check(event)
            self._going_to_sleep = True
            try:
                await self._steps.until_idle(f"sleep(level={level})", _left(ends), waiting_too=True)
            finally:
                self._going_to_sleep = False
            operation.is_sent = True
            before = self.residency.weights
            self.residency.weights = WeightsState.DISCARDED  # until all ranks have said otherwise
            self.residency.cache_dropped()
            replies: list[Any] = await ask("sleep", (level,), _left(ends))
            self.residency.weights = before
            self.residency.move(event)
            return replies

    async def wake(
        self, tags: Collection[str] | None, ask: Callable[..., Any], timeout: float | None, operation: Operation
    ) -> list[Any]:
        """Bring back what sleeps; see :meth:`sleep`.

        Args:
            tags: ``weights``, ``kv_cache``; None: both.
            ask: See :meth:`sleep`.
            timeout: See :meth:`sleep`.
            operation: See :meth:`sleep`.
        """
        wanted, ends = wake_tags(tags), _end(timeout)
        async with self._turn:
            operation.is_sent = True
            replies: list[Any] = await ask("wake_up", (None if tags is None else sorted(wanted),), _left(ends))
            if "weights" in wanted:
                self.residency.move(WeightsEvent.WAKE)
            if "kv_cache" in wanted:
                self.residency.cache_made()
            return replies

    def check_method(self, method: object) -> None:
        """Refuse new weights for a model whose weights sleep.

        Raises:
            ModelNotReady: Says what to do first.
        """
        if method in WEIGHT_METHODS:
            self.residency.check(WeightsEvent.LOADED)

    def follows(self, method: object) -> bool:
        """True when what becomes of such a call says something of the weights."""
        return method in WEIGHT_METHODS or method in (_STARTS, _FINISHES, _CANCELS)

    def called(self, method: object, call: Call) -> None:
        """All ranks of a call have answered: see what that means for the weights."""
        if method == _STARTS and call.answers:
            self._begin_update()
        elif method == _CANCELS:
            if not call.errors and all(call.answers.values()) and len(call.answers) == self._world_size:
                self.residency.put_back(self._before)  # each rank has said that it has changed nothing
        elif method == _FINISHES or method in WEIGHT_METHODS:
            self._weights_came(call.answers.values(), call)

    def weights_loaded(self) -> None:
        """All ranks have whole weights, by means that cannot be seen from here.

        Raises:
            ModelNotReady: They sleep.
        """
        self.residency.move(WeightsEvent.LOADED)
        self._loaded.clear()

    def _weights_came(self, replies: Collection[Any], call: Call) -> None:
        if call.errors:
            if call.answers:
                self._begin_update()  # some ranks have them, others not
            return
        if not all(getattr(reply, "is_complete", True) for reply in replies):
            self._begin_update()
            return
        self._loaded.update(call.ranks)
        if len(self._loaded) < self._world_size:
            self._begin_update()  # the other ranks have theirs to come
        elif WeightsEvent.LOADED in TRANSITIONS[self.residency.weights]:
            self.weights_loaded()

    def _begin_update(self) -> None:
        if WeightsEvent.START in TRANSITIONS[self.residency.weights]:
            self._before = self.residency.move(WeightsEvent.START)


def _end(timeout: float | None) -> float | None:
    return None if timeout is None else time.monotonic() + timeout


def _left(ends: float | None) -> float | None:
    return None if ends is None else max(ends - time.monotonic(), 0.0)
