"""Backend ``uni``: one worker, which lives in this process."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from aexec.config import ExecutorConfig
from aexec.errors import ConfigError
from aexec.executor.group import GroupPlan, WorkerGroup
from aexec.executor.local import LocalWorker
from aexec.messages.base import Message
from aexec.messages.control import Hello
from aexec.worker.context import place_worker

__all__ = ("UniprocGroup",)


class UniprocGroup(WorkerGroup):
    """One worker actor beside the executor's."""

    backend: ClassVar[str] = "uni"

    def __init__(self, plan: GroupPlan) -> None:
        super().__init__(plan)
        self._worker = LocalWorker(0, plan.actor, plan.sink)

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
        return [await self._worker.start(place)]

    def send(self, call: int, message: Message[Any], ranks: Sequence[int]) -> None:  # noqa: ARG002 - there is one
        """Ask the worker actor, in a task that waits for its answer."""
        self._worker.send(call, message)

    async def stop(self, grace: float) -> Sequence[str]:
        """Shut the worker down; a thread that hangs in C is left behind, and ends when it comes back."""
        return await self._worker.stop(grace)

    def phases(self) -> Mapping[int, str]:
        """The compute thread's."""
        return {0: self._worker.phase} if self._worker.phase else {}

    def stacks(self) -> Mapping[int, str]:
        """The compute thread's, and those of running ``async def`` methods."""
        return {0: self._worker.stack} if self._worker.stack else {}
