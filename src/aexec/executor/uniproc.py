"""Backend ``uni``: the worker lives in this process, on a thread of its own.

Nothing is serialised. A buffer that its owner may use again is copied where it crosses,
so that each side goes on with its own.
"""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import msgspec
import numpy as np

from aexec.actor import Ref
from aexec.config import ExecutorConfig
from aexec.errors import ActorDied, ConfigError
from aexec.executor.group import GroupPlan, WorkerGroup
from aexec.messages.base import Message
from aexec.messages.control import Greet, Hello, Shutdown
from aexec.messages.step import SampleTokens, StepResult
from aexec.worker.context import WorkerContext, place_worker
from aexec.worker.worker import WorkerActor

__all__ = ("UniprocGroup",)


class UniprocGroup(WorkerGroup):
    """One worker actor beside the executor's."""

    backend: ClassVar[str] = "uni"

    def __init__(self, plan: GroupPlan) -> None:
        super().__init__(plan)
        self._worker: WorkerActor | None = None
        self._ref: Ref[WorkerActor] | None = None

    def __repr__(self) -> str:
        return f"<UniprocGroup: {self._worker!r}>"

    @classmethod
    def check(cls, config: ExecutorConfig) -> None:
        """One rank, and no environment of its own.

        Raises:
            ConfigError: More was asked for.
        """
        parallel = config.parallel
        if parallel.world_size > 1:
            raise ConfigError(
                f"backend 'uni' holds one worker, and tensor_parallel_size={parallel.tensor_parallel_size} x "
                f"pipeline_parallel_size={parallel.pipeline_parallel_size} asks for {parallel.world_size}: "
                "leave both at 1, or take a backend with a process for each rank"
            )
        if config.env:
            raise ConfigError(
                f"ExecutorConfig.env sets {', '.join(sorted(config.env))}, and backend 'uni' shares this process: set "
                "it in os.environ before anything reads it, or take a backend with processes of its own"
            )

    async def start(self) -> Sequence[Hello]:
        """Spawn the worker actor, and let it construct the worker."""
        plan = self.plan
        place = place_worker(
            0,
            plan.config,
            generation=plan.generation,
            local_rank=0,
            node_id=platform.node(),
            node_ip="127.0.0.1",
            progress=plan.progress_of(0),
        )
        spawner = plan.actor.using(name=f"worker-0.{plan.generation}")
        self._ref = await spawner.spawn(self._make, place)
        return [await self._ref.ask(Greet(), timeout=None)]

    def send(self, call: int, message: Message[Any], ranks: Sequence[int]) -> None:  # noqa: ARG002 - there is one
        """Ask the worker actor, in a task that waits for its answer."""
        self.plan.actor.start_task(self._relay(call, _owned(message)))

    async def stop(self, grace: float) -> Sequence[str]:
        """Shut the worker down; a thread that hangs is left behind, and ends when its work does."""
        ref = self._ref
        if ref is None or not ref.is_alive:
            return []
        try:
            ended = await ref.ask(Shutdown(grace), timeout=None)
            await ref.stop()
        except ActorDied:
            return []
        return [] if ended else [f"rank 0 still worked after {grace:g} s: its thread ends when its work does"]

    def phases(self) -> Mapping[int, str]:
        """The compute thread's."""
        return {0: self._worker.thread.pulse.phase} if self._worker and self._worker.thread.is_alive else {}

    def stacks(self) -> Mapping[int, str]:
        """The compute thread's, and those of running ``async def`` methods."""
        return {0: self._worker.stack()} if self._worker else {}

    def _make(self, place: WorkerContext) -> WorkerActor:
        sink = self.plan.sink
        self._worker = WorkerActor(place, lambda phase: sink.phase(0, phase), sink.died)
        return self._worker

    async def _relay(self, call: int, message: Message[Any]) -> None:
        assert self._ref is not None
        try:
            value = await self._ref.ask(message, timeout=None)
        except Exception as error:  # noqa: BLE001 - it belongs to whoever asked
            self.plan.sink.failed(call, 0, error)
        else:
            self.plan.sink.replied(call, 0, _owned(value))


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
