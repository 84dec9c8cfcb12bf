"""How far all ranks have come, added up for the one callable that wants to know."""

from __future__ import annotations

from aexec.observe import get_logger
from aexec.worker.context import Progress

__all__ = ("StartProgress",)


class StartProgress:
    """Adds up what the ranks report.

    Args:
        callback: Told ``(phase, done, total)`` over all ranks, on the loop; what it
            raises is logged, and it is not called again.
        world_size: Number of ranks.
    """

    def __init__(self, callback: Progress | None, world_size: int) -> None:
        self._callback = callback
        self._world_size = world_size
        self._reports: dict[str, dict[int, tuple[float, float]]] = {}

    def phase(self, phase: str, ranks_done: int) -> None:
        """``ranks_done`` ranks are through ``phase``."""
        self._tell(phase, ranks_done, self._world_size)

    def report(self, rank: int, phase: str, done: float, total: float) -> bool:
        """One rank has come so far within ``phase``; False if it had come as far before."""
        ranks = self._reports.setdefault(phase, {})
        further = done > ranks.get(rank, (-1.0, total))[0]
        ranks[rank] = (done, total)
        # Ranks that have not spoken yet have as much to do as the others: a bar does not start over for each.
        whole = sum(total for _, total in ranks.values()) * self._world_size / len(ranks)
        self._tell(phase, sum(done for done, _ in ranks.values()), whole)
        return further

    def _tell(self, phase: str, done: float, total: float) -> None:
        if self._callback is None:
            return
        try:
            self._callback(phase, done, total)
        except Exception:  # noqa: BLE001 - a progress bar cannot spoil a start
            self._callback = None
            get_logger("aexec.executor").exception("progress callback failed", phase=phase)
