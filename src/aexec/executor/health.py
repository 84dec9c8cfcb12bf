"""From the pulses of the ranks, or their silence, to a health report. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from aexec.messages.control import Pong
from aexec.messages.lifecycle import HealthReport, RankHealth

__all__ = ("judge", "report")


def judge(rank: int, pong: Pong | None, *, dead: bool, waited: float, stuck_after: float | None) -> RankHealth:
    """The health of one rank.

    Args:
        rank: Which.
        pong: Its answer, None if it gave none.
        dead: It is known to have ended.
        waited: Seconds that it was given to answer.
        stuck_after: Seconds after which a running call counts as stuck; None: never.
    """
    if dead:
        return RankHealth(rank=rank, state="dead", phase="ended", step=None, age=0.0)
    if pong is None:
        return RankHealth(rank=rank, state="stuck", phase="gives no answer", step=None, age=waited)
    hangs = stuck_after is not None and pong.phase != "idle" and pong.age > stuck_after
    return RankHealth(rank=rank, state="stuck" if hangs else "alive", phase=pong.phase, step=pong.step, age=pong.age)


def report(
    generation: int,
    world_size: int,
    pongs: Mapping[int, Pong],
    dead: frozenset[int],
    *,
    waited: float,
    stuck_after: float | None,
) -> HealthReport:
    """The health of all ranks."""
    ranks = [
        judge(rank, pongs.get(rank), dead=rank in dead, waited=waited, stuck_after=stuck_after)
        for rank in range(world_size)
    ]
    return HealthReport(generation=generation, ranks=ranks)
