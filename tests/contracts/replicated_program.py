"""Run by torchrun: each rank runs the contract's checks on an executor of its own, and writes what came of them."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import traceback
from pathlib import Path

from aexec import ExecutorConfig, ParallelConfig, open_executor
from aexec.testing.contracts import EXECUTOR_CHECKS, NOT_REPLICATED
from aexec.testing.workers import ProbeWorker


def make(worker_cls, **settings):
    """An executor of this rank, over all of them."""
    layout = ParallelConfig(tensor_parallel_size=2)
    return open_executor(
        ExecutorConfig(backend="external_launcher", worker_cls=worker_cls, parallel=layout, **settings)
    )


async def main() -> dict[str, str]:
    """What is wrong with each check; empty: nothing."""
    async with make(ProbeWorker) as executor:  # the first use of torch's store opens what it never closes
        assert await executor.collective_rpc("echo", (1,)) == [1, 1]
    found = {}
    for check in EXECUTOR_CHECKS:
        if check.__name__ not in NOT_REPLICATED:
            try:
                await asyncio.wait_for(check(make), 60.0)
            except Exception:
                found[check.__name__] = traceback.format_exc()
            else:
                found[check.__name__] = ""
    return found


if __name__ == "__main__":
    results = asyncio.run(main())
    Path(sys.argv[1], f"{os.environ['RANK']}.json").write_text(json.dumps(results), encoding="utf-8")
