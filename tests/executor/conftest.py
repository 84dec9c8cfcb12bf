"""Several ranks in this process, for tests of what an executor does with more than one."""

from __future__ import annotations

import asyncio
from functools import partial

import pytest

from aexec import ExecutorConfig, ParallelConfig, open_executor
from aexec.executor import WorkerGroup
from aexec.messages.control import Greet, Shutdown
from aexec.worker.context import place_worker
from aexec.worker.worker import WorkerActor


class ThreadGroup(WorkerGroup):
    """A worker actor for each rank, its thread in this process."""

    backend = "threads"

    async def start(self):
        plan, self.refs = self.plan, []
        for rank in range(plan.config.parallel.world_size):
            where = {"local_rank": rank, "node_id": "here", "node_ip": "127.0.0.1"}
            place = place_worker(rank, plan.config, generation=plan.generation, **where)
            self.refs.append(await plan.actor.spawn(WorkerActor, place, partial(plan.sink.phase, rank), plan.sink.died))
        return await asyncio.gather(*(ref.ask(Greet(), timeout=None) for ref in self.refs))

    def send(self, call, message, ranks):
        for rank in ranks:
            self.plan.actor.start_task(self._relay(call, rank, message))

    async def stop(self, grace):
        alive = [ref for ref in self.refs if ref.is_alive]
        await asyncio.gather(*(ref.ask(Shutdown(grace), timeout=None) for ref in alive), return_exceptions=True)
        await asyncio.gather(*(ref.stop() for ref in alive))
        return []

    async def _relay(self, call, rank, message):
        try:
            value = await self.refs[rank].ask(message, timeout=None)
        except Exception as error:
            self.plan.sink.failed(call, rank, error)
        else:
            self.plan.sink.replied(call, rank, value)


@pytest.fixture(scope="session")
def thread_group():
    """A backend with any number of ranks in this process."""
    return ThreadGroup


@pytest.fixture(scope="session")
def opened():
    """Opens an executor of a worker class, on ``uni`` or on so many ranks in this process."""

    def open_one(worker_cls, ranks=1, **settings):
        settings = {"backend": "uni" if ranks == 1 else ThreadGroup} | settings
        layout = ParallelConfig(pipeline_parallel_size=ranks)
        return open_executor(ExecutorConfig(parallel=layout, worker_cls=worker_cls, **settings))

    return open_one
