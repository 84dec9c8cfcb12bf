"""How workers are asked to end, waited for, and told about: what comes before any force."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from aexec.executor.lines.rank import RankLines

__all__ = ("ask_all", "how_it_stayed", "still_there", "wait_for_all")

RankT = TypeVar("RankT", bound=RankLines)


async def ask_all(workers: Sequence[RankT], grace: float, ask: Callable[[RankT], None]) -> list[RankT]:
    """Ask those that can be asked, and give them and those that are ending anyway their time.

    Args:
        workers: All of them, dead ones too.
        grace: Seconds.
        ask: Asks one.

    Returns:
        Those whose time was not enough.
    """
    asked = [worker for worker in workers if worker.can_be_told and not worker.is_halted]
    for worker in asked:
        ask(worker)
    return await still_there([*asked, *(one for one in workers if one.is_ending and one not in asked)], grace)


async def still_there(workers: Sequence[RankT], seconds: float) -> list[RankT]:
    """Those that have not ended when the time is up."""
    await wait_for_all([worker.gone.wait() for worker in workers], seconds)
    return [worker for worker in workers if not worker.gone.is_set()]


async def wait_for_all(awaitables: Sequence[Awaitable[object]], seconds: float) -> None:
    """Until all are done or the time is up; what is not done then is cancelled."""
    if not awaitables:
        return
    waiting = [asyncio.ensure_future(one) for one in awaitables]
    try:
        await asyncio.wait(waiting, timeout=seconds)
    finally:
        for one in waiting:
            one.cancel()


def how_it_stayed(worker: RankLines, where: str, grace: float | None) -> str:
    """The beginning of a line on a worker that has to be made to end.

    Args:
        worker: Which.
        where: Its process, for people.
        grace: Seconds that it was given; None: it could not be asked.
    """
    who = f"rank {worker.rank} ({where}), {worker.doing},"
    if worker.is_halted:
        return f"{who} was stopped by a signal and could not be asked to end"
    if grace is None:
        return f"{who} could not be asked to end"
    return f"{who} did not end within {grace:g} s of being asked"
