"""How workers are brought to their end: they are asked, given time, and then made to."""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence

from aexec.config import ExecutorConfig
from aexec.executor.lines.ending import ask_all, how_it_stayed, still_there
from aexec.executor.multiproc.process import WorkerProcess

__all__ = ("bring_down",)


async def bring_down(
    workers: Sequence[WorkerProcess], config: ExecutorConfig, grace: float, ask: Callable[[WorkerProcess], None]
) -> list[str]:
    """End all workers.

    Args:
        workers: Those that have a process, dead ones among them.
        config: ``term_grace`` and ``kill_grace``.
        grace: Seconds for those that can be asked to end.
        ask: Asks one.

    Returns:
        A line on each worker that needed more than being asked.
    """
    left = await ask_all(workers, grace, ask)
    rest = [worker for worker in workers if not worker.gone.is_set()]
    if not rest:
        return []
    lines = {
        worker.rank: how_it_stayed(worker, f"pid {worker.pid}", grace if worker in left else None) for worker in rest
    }
    for worker in rest:
        worker.kill(signal.SIGTERM, signal.SIGCONT)  # a stopped process takes the one after the other
    for worker in await still_there(rest, config.term_grace):
        lines[worker.rank] += f", nor within {config.term_grace:g} s of SIGTERM: it was killed"
        worker.kill(signal.SIGKILL)
    for worker in await still_there(rest, config.kill_grace):
        lines[worker.rank] += f"; {config.kill_grace:g} s later it is still there: the kernel holds it"
    return list(lines.values())
