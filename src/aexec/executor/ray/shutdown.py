"""How Ray-placed workers are brought to their end: they are asked, given time, and then killed."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

from aexec.errors import CallTimeout
from aexec.executor.lines.ending import ask_all, how_it_stayed, still_there, wait_for_all
from aexec.executor.ray.api import answer, is_connected, kill, off_loop
from aexec.executor.ray.rank import RayRank

__all__ = ("bring_down", "end_actors")

_KILL_LIMIT = 5.0  # seconds that Ray may take to hear of it


async def bring_down(
    workers: Sequence[RayRank], grace: float, kill_grace: float, ask: Callable[[RayRank], None]
) -> list[str]:
    """End all workers; one that was not told yet to be one is left to :func:`end_actors`.

    Args:
        workers: Those, dead ones among them.
        grace: Seconds for those that can be asked to end.
        kill_grace: Seconds that a killed process may take to be gone.
        ask: Asks one.

    Returns:
        A line on each worker that needed more than being asked.
    """
    left = await ask_all(workers, grace, ask)
    rest = [worker for worker in workers if worker.is_watched and not worker.gone.is_set()]
    if not rest:
        return []
    lines = {worker.rank: _line(worker, grace if worker in left else None) for worker in rest}
    for worker in rest:
        worker.kill()
    await end_actors([worker.actor for worker in rest], kill_grace)
    for worker in await still_there(rest, kill_grace):
        lines[worker.rank] += f"; {kill_grace:g} s after it was killed, it is still there"
    return list(lines.values())


async def end_actors(actors: Sequence[Any], patience: float) -> None:
    """Kill actors, in whatever state they are, and wait until Ray knows them as dead.

    Args:
        actors: Their handles.
        patience: Seconds to wait for that.
    """
    if not actors:
        return
    with contextlib.suppress(CallTimeout):
        await off_loop("kill actors", kill, actors, timeout=_KILL_LIMIT)
    await wait_for_all([_end_of(actor) for actor in actors], patience)


async def _end_of(actor: Any) -> None:
    """Whatever is asked of a dead actor is answered by Ray, with that."""
    with contextlib.suppress(Exception):  # RayActorError
        while is_connected():  # else there is nothing to wait for, and Ray would connect anew to be asked
            await answer(actor.__ray_ready__.remote())


def _line(worker: RayRank, grace: float | None) -> str:
    return f"{how_it_stayed(worker, f'pid {worker.pid} on node {worker.node}', grace)}: it was killed"
