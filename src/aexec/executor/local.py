"""A worker in this process, on a thread of its own: what backends share whose process is a rank itself.

Nothing is serialised. A buffer that its owner may use again is copied where it crosses,
so that each side goes on with its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from aexec.actor import Context, Ref
from aexec.errors import ActorDied
from aexec.executor.group import GroupSink
from aexec.messages.base import Message
from aexec.messages.control import Greet, Hello, Shutdown
from aexec.messages.step import SampleTokens, StepResult
from aexec.worker.context import WorkerContext
from aexec.worker.worker import WorkerActor

__all__ = ("LocalWorker",)


class LocalWorker:
    """One worker actor beside the executor's.

    Args:
        rank: Its rank.
        actor: The executor's context.
        sink: Told of its phases, of its end, and of its answers.
    """

    def __init__(self, rank: int, actor: Context, sink: GroupSink) -> None:
        self.rank = rank
        self._actor, self._sink = actor, sink
        self._worker: WorkerActor | None = None
        self._ref: Ref[WorkerActor] | None = None

    def __repr__(self) -> str:
        return f"<LocalWorker {self.rank}: {self._worker!r}>"

    async def start(self, place: WorkerContext) -> Hello:
        """Spawn the worker actor, and let it construct the worker.

        Raises:
            AexecError: What the worker's code raised.
        """
        spawner = self._actor.using(name=f"worker-{self.rank}.{place.generation}")
        self._ref = await spawner.spawn(self._make, place)
        return await self._ref.ask(Greet(), timeout=None)

    def send(self, call: int, message: Message[Any]) -> None:
        """Ask the worker actor, in a task that waits for its answer; the sink is told of it."""
        self._actor.start_task(self._relay(call, _owned(message)))

    async def ask(self, message: Message[Any]) -> Any:
        """Ask the worker actor; raises what it answers with."""
        assert self._ref is not None, "the worker was not started"
        return _owned(await self._ref.ask(message, timeout=None))

    async def stop(self, grace: float) -> Sequence[str]:
        """Shut the worker down; a thread that hangs in C is left behind, and ends when it comes back."""
        ref = self._ref
        if ref is None or not ref.is_alive:
            return []
        try:
            ended = await ref.ask(Shutdown(grace), timeout=None)
            await ref.stop()
        except ActorDied:
            return []
        late = f"rank {self.rank} still worked after {grace:g} s: its thread ends at its next line of Python"
        return [] if ended else [late]

    @property
    def is_working(self) -> bool:
        """True while its compute thread is in a job, and so cannot end."""
        return self._worker is not None and self._worker.thread.is_alive and self._worker.thread.pulse.phase != "idle"

    @property
    def phase(self) -> str:
        """The compute thread's; empty while there is none."""
        return self._worker.thread.pulse.phase if self._worker and self._worker.thread.is_alive else ""

    @property
    def stack(self) -> str:
        """The compute thread's, and those of running ``async def`` methods; empty while there is none."""
        return self._worker.stack() if self._worker else ""

    def _make(self, place: WorkerContext) -> WorkerActor:
        sink, rank = self._sink, self.rank
        self._worker = WorkerActor(place, lambda phase: sink.phase(rank, phase), sink.died)
        return self._worker

    async def _relay(self, call: int, message: Message[Any]) -> None:
        assert self._ref is not None
        try:
            value = await self._ref.ask(message, timeout=None)
        except Exception as error:  # noqa: BLE001 - it belongs to whoever asked
            self._sink.failed(call, self.rank, error)
        else:
            self._sink.replied(call, self.rank, _owned(value))


def _owned(value: Any) -> Any:
    """``value`` as its receiver may keep it: bitmasks and arrays are buffers that their owners use again."""
    if isinstance(value, SampleTokens) and value.grammar is not None:
        grammar = msgspec.structs.replace(value.grammar, bitmask=_copied(value.grammar.bitmask))
        return msgspec.structs.replace(value, grammar=grammar)
    if isinstance(value, StepResult):
        return msgspec.structs.replace(value, output=_copied(value.output))
    return _copied(value)


def _copied(value: Any) -> Any:
    return value.copy() if _is_array(value) else value


def _is_array(value: object) -> bool:
    return isinstance(value, np.ndarray)
