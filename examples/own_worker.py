"""An executor without an engine: your own worker class, called by method name.

Run it: ``python examples/own_worker.py``
"""

from __future__ import annotations

import asyncio

from aexec import ExecutorConfig, WorkerContext, open_executor


class Thermometer:
    """A worker class is plain: its methods run on the worker's compute thread."""

    def __init__(self, context: WorkerContext, *, start: float) -> None:
        self.rank = context.rank
        self.celsius = start

    def warm(self, by: float) -> float:
        self.celsius += by
        return self.celsius


def rank_of(worker: Thermometer) -> int:
    return worker.rank


async def main() -> None:
    config = ExecutorConfig(backend="uni", worker_cls=Thermometer, worker_kwargs={"start": 20.0})
    async with open_executor(config) as executor:
        print(await executor.collective_rpc("warm", args=(1.5,), timeout=5.0))
        print(await executor.collective_rpc(rank_of))
        report = await executor.check_health()
        print("healthy:", report.healthy)


asyncio.run(main())
