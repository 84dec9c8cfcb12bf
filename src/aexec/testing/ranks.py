"""Many ranks in one process: a backend for tests of what ranks say to each other.

Each rank is a worker actor with a compute thread of its own. They share this process, so
it suits worker classes that keep nothing in globals: the dummy model with any layout, and
nothing that lives on ``torch.distributed``.
"""

from __future__ import annotations

import asyncio
import os
import platform
from collections.abc import Sequence
from functools import partial
from typing import Any, ClassVar

from aexec.actor import Ref
from aexec.executor.group import GroupPlan, WorkerGroup
from aexec.messages.base import Message
from aexec.messages.control import Greet, Hello, Shutdown
from aexec.worker.context import WorkerContext, place_worker
from aexec.worker.worker import WorkerActor

__all__ = ("ThreadGroup",)


class ThreadGroup(WorkerGroup):
    """Ranks as threads of this process (Linux)."""

    backend: ClassVar[str] = "threads"

    def __init__(self, plan: GroupPlan) -> None:
        super().__init__(plan)
        self._refs: list[Ref[WorkerActor]] = []
        self._meeting = os.memfd_create("aexec-rendezvous")

    def __repr__(self) -> str:
        return f"<ThreadGroup: {len(self._refs)} ranks>"

    async def start(self) -> Sequence[Hello]:
        """Spawn the worker actors, and let them construct their workers."""
        plan = self.plan
        for rank in range(plan.config.parallel.world_size):
            phase = partial(plan.sink.phase, rank)
            self._refs.append(await plan.actor.spawn(WorkerActor, self._place(rank), phase, plan.sink.died))
        return await asyncio.gather(*(ref.ask(Greet(), timeout=None) for ref in self._refs))

    def send(self, call: int, message: Message[Any], ranks: Sequence[int]) -> None:
        """Ask each worker actor, in a task that waits for its answer."""
        for rank in ranks:
            self.plan.actor.start_task(self._relay(call, rank, message))

    async def stop(self, grace: float) -> Sequence[str]:
        """Shut the workers down."""
        alive = [ref for ref in self._refs if ref.is_alive]
        await asyncio.gather(*(ref.ask(Shutdown(grace), timeout=None) for ref in alive))
        await asyncio.gather(*(ref.stop() for ref in alive))
        self._close_meeting()
        return []

    def _place(self, rank: int) -> WorkerContext:
        return place_worker(
            rank,
            self.plan.config,
            generation=self.plan.generation,
            local_rank=rank,
            node_id=platform.node(),
            node_ip="127.0.0.1",
            distributed_init_method=f"file:///proc/{os.getpid()}/fd/{self._meeting}",
            progress=self.plan.progress_of(rank),
        )

    def _close_meeting(self) -> None:
        if self._meeting >= 0:
            os.close(self._meeting)
            self._meeting = -1

    async def _relay(self, call: int, rank: int, message: Message[Any]) -> None:
        try:
            value = await self._refs[rank].ask(message, timeout=None)
        except Exception as error:  # noqa: BLE001 - it belongs to whoever asked
            self.plan.sink.failed(call, rank, error)
        else:
            self.plan.sink.replied(call, rank, value)
