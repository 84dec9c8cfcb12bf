"""What the generations of one executor share: the cluster, and the placement group.

It goes from each generation to the next, and is given back when none follows. Where a node has
gone with its bundles, the placement group is given back before, and another one made.
"""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any

from aexec.config import ExecutorConfig
from aexec.errors import CallTimeout
from aexec.executor.ray.cluster import Cluster, join
from aexec.executor.ray.placement import Placement, acquire
from aexec.observe import get_logger
from aexec.worker.context import Progress

__all__ = ("Estate",)


class Estate:
    """The cluster and the placement group of one executor, as far as it has them.

    Attributes:
        cluster: None: not joined.
        placement: None: not placed.
    """

    def __init__(self) -> None:
        self.cluster: Cluster | None = None
        self.placement: Placement | None = None

    def __repr__(self) -> str:
        return f"<Estate: {self.cluster or 'no cluster'}, {self.placement or 'no placement'}>"

    async def settle(self, config: ExecutorConfig, report: Progress) -> tuple[Cluster, Placement]:
        """Have both, as they are or anew.

        Args:
            config: The settings.
            report: Told how far that has come.

        Raises:
            AexecError: There is no cluster, or no place in it.
        """
        if self.cluster is None:
            report("cluster", 0.0, 1.0)
            self.cluster = await join(config)
        if self.placement is not None and not await self.placement.is_whole():
            get_logger("aexec.executor").warning(
                "the placement group has lost a bundle", placement=repr(self.placement)
            )
            await self._release()
        if self.placement is None:
            self.placement = await acquire(config, self.cluster, report)
        return self.cluster, self.placement

    async def give_back(self) -> None:
        """Let go of both; may be called twice. What Ray does not take back in time is logged."""
        await _in_any_case(self._release())
        cluster, self.cluster = self.cluster, None
        if cluster is not None:
            await _in_any_case(cluster.leave())

    async def _release(self) -> None:
        placement, self.placement = self.placement, None
        if placement is not None:
            await placement.release()


async def _in_any_case(end: Coroutine[Any, Any, None]) -> None:
    try:
        await end
    except CallTimeout as error:
        get_logger("aexec.executor").error("Ray did not take back in time what was its own", why=str(error))
