"""How workers are brought to their end: they are asked, given time, and then made to."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Sequence

from aexec.config import ExecutorConfig
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
    asked = [worker for worker in workers if worker.can_be_told and not worker.is_halted]
    for worker in asked:
        ask(worker)
    left = await _wait([*asked, *(worker for worker in workers if worker.is_ending)], grace)
    rest = [worker for worker in workers if not worker.gone.is_set()]
    if not rest:
        return []
    lines = {worker.rank: _line(worker, grace if worker in left else None) for worker in rest}
    for worker in rest:
        worker.kill(signal.SIGTERM, signal.SIGCONT)  # a stopped process takes the one after the other
    for worker in await _wait(rest, config.term_grace):
        lines[worker.rank] += f", nor within {config.term_grace:g} s of SIGTERM: it was killed"
        worker.kill(signal.SIGKILL)
    for worker in await _wait(rest, config.kill_grace):
        lines[worker.rank] += f"; {config.kill_grace:g} s later it is still there: the kernel holds it"
    return list(lines.values())


async def _wait(workers: Sequence[WorkerProcess], seconds: float) -> list[WorkerProcess]:
    """Those that are still there when the time is up."""
    if workers:
        waiting = [asyncio.ensure_future(worker.gone.wait()) for worker in workers]
        try:
            await asyncio.wait(waiting, timeout=seconds)
        finally:
            for one in waiting:
                one.cancel()
    return [worker for worker in workers if not worker.gone.is_set()]


def _line(worker: WorkerProcess, grace: float | None) -> str:
    who = f"rank {worker.rank} (pid {worker.pid}), {worker.doing},"
    if worker.is_halted:
        return f"{who} was stopped by a signal and could not be asked to end"
    if grace is None:
        return f"{who} could not be asked to end"
    return f"{who} did not end within {grace:g} s of being asked"
