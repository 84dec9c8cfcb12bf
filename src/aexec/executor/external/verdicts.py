"""What is said of ranks that are gone, through, or too late. Pure."""

from __future__ import annotations

from aexec.errors import RanksDiverged, WorkerDied
from aexec.messages.peers import Departed, Lost

__all__ = ("as_rank", "reads_nothing", "seen_from", "too_far_behind", "why_through", "without")


def as_rank(error: WorkerDied, rank: int, cause: str) -> WorkerDied:
    """``error``, with its rank counted otherwise."""
    return WorkerDied(
        rank,
        error.pid,
        error.exit_code,
        error.signal,
        error.phase,
        error.step,
        error.stderr_tail,
        error.node,
        cause,
    )


def seen_from(replica: int, lost: Lost, replica_size: int) -> tuple[WorkerDied, bool]:
    """How a rank of ``replica`` words the death of another: its rank within the replica if it is of that, which is True."""
    other, rank = divmod(lost.rank, replica_size)
    cause = lost.error.cause
    if other == replica:
        return as_rank(lost.error, rank, cause), True
    where = f"it is rank {rank} of replica {other}, not of {replica}"
    return as_rank(lost.error, lost.rank, f"{where}; {cause}" if cause else where), False


def why_through(departed: Departed) -> str:
    """Why it makes no more calls."""
    return departed.why or "it has closed its executor"


def without(departed: Departed, seq: int, rank: int, text: str) -> RanksDiverged:
    """A rank is through, and ``rank`` asked for something with call ``seq``."""
    asked = {
        departed.rank: f"is through after call {departed.last} ({why_through(departed)})",
        rank: f"asked for {text}",
    }
    return RanksDiverged(departed.rank, seq, None, asked, "is through")


def too_far_behind(rank: int, made: int, other: int, seq: int) -> RanksDiverged:
    """``rank`` has made so many calls, and ``other`` has answered call ``seq``."""
    asked = {rank: f"was last at call {made}", other: f"has answered call {seq}"}
    return RanksDiverged(rank, made + 1, None, asked, f"is {seq - made} calls behind")


def reads_nothing(rank: int, seq: int, queued: int) -> RanksDiverged:
    """So many frames wait for ``rank``, which reads none."""
    asked = {rank: f"has not read {queued} frames that were sent to it"}
    return RanksDiverged(rank, seq, None, asked, "takes no part any more")
