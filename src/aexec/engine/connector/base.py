"""What the scheduler asks of a KV connector, and what it tells it. Pure: no clock, no await.

While it schedules, the scheduler asks :meth:`KVConnector.match` for blocks beyond those of
the prefix cache, and counts what it finds as computed. With the batch it hands over the
blocks that are given away and those that have to be filled, and :meth:`KVConnector.plan`
makes the message of it that travels with the step; the ranks do as it says before the
forward pass. Their report comes with the step's output: blocks that could not be filled
make the scheduler compute the requests again, and keys that a rank does not hold are not
found again (:meth:`KVConnector.take_report`).

None of this happens but while the ranks are attached (``engine.connector.host``). Whatever
makes the KV in the cache void, or doubtful, detaches them, and they are attached anew.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from aexec.engine.prefix import BlockHash
from aexec.messages.batch import KVConnectorOutput, KVTransfer
from aexec.messages.kv import KVHoldings

__all__ = ("KVConnector", "NamedBlocks")

NamedBlocks = Sequence[tuple[int, BlockHash]]
"""Block ids, and what each of the blocks holds or shall hold."""


class KVConnector(Protocol):
    """The scheduler side of a connector.

    Attributes:
        epoch: Which attachment it is; it increases with each :meth:`detach`.
        afresh: The ranks have to look at their weights again before they are attached.
        on_detached: Called when the ranks have to be attached.
        flush_timeout: Seconds that :meth:`flush` may take at the end; 0: there is nothing to flush.
    """

    epoch: int
    afresh: bool
    on_detached: Callable[[], None]
    flush_timeout: float

    def match(self, hashes: Sequence[BlockHash]) -> int:
        """How many of these blocks, from the first on, can be loaded; asked while a batch is made."""
        ...

    def plan(self, evicted: NamedBlocks, loads: NamedBlocks) -> KVTransfer | None:
        """What the ranks have to move before the forward pass of the batch that is made now.

        Args:
            evicted: Blocks that are given away and hold their content still.
            loads: Blocks to fill: what :meth:`match` promised since the last plan.

        Returns:
            None: nothing.
        """
        ...

    def take_report(self, report: KVConnectorOutput) -> bool:
        """What the ranks say of a plan; ``invalid_block_ids`` are the scheduler's to deal with.

        Returns:
            False: the ranks have other weights than they had, and what is in the cache is void.
        """
        ...

    def request_finished(self, request_id: str) -> None:
        """A request has ended, in whatever way; its blocks may be given away from now on."""
        ...

    def detach(self, *, afresh: bool = False) -> None:
        """What the cache holds is void, or doubtful.

        Args:
            afresh: So may be what is known of the weights.
        """
        ...

    def attached(self, epoch: int, holdings: Sequence[KVHoldings]) -> None:
        """The ranks are attached, unless there was a :meth:`detach` since.

        Args:
            epoch: The attachment that it is.
            holdings: What each rank holds.
        """
        ...

    def flush(self, cached: NamedBlocks) -> list[KVTransfer]:
        """What is to be stored before the workers end, in steps of bounded size.

        Args:
            cached: All that the cache holds.
        """
        ...

    def statistics(self) -> object:
        """The connector in numbers; part of ``EngineStatistics``."""
        ...
