"""What became of the transfers of a step on one rank. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from aexec.messages.batch import KVConnectorOutput, KVTransfer
from aexec.messages.step import StepId

__all__ = ("MoveReport", "merged")


@dataclass(slots=True)
class MoveReport:
    """Of one step.

    Attributes:
        invalid: Blocks that hold something else than they should.
        dropped: Keys that this rank does not hold.
        figures: See ``engine.connector.offload.OffloadStatistics``; those of all ranks are added up.
    """

    invalid: set[int] = field(default_factory=set[int])
    dropped: set[bytes] = field(default_factory=set[bytes])
    figures: dict[str, float] = field(default_factory=dict[str, float])

    def refuse(self, transfer: KVTransfer) -> None:
        """Nothing of it is done."""
        self.invalid.update(transfer.load_block_ids)
        self.dropped.update(transfer.store_keys)
        self.count(failed_loads=len(transfer.load_keys), failed_stores=len(transfer.store_keys), refusals=1)

    def count(self, **figures: float) -> None:
        """Add to figures."""
        for name, value in figures.items():
            if value:
                self.figures[name] = self.figures.get(name, 0.0) + value


def merged(reports: Mapping[StepId, MoveReport], step: StepId) -> KVConnectorOutput | None:
    """One report of several steps, to be told with ``step``; None: there is nothing to tell.

    Those before it have failed or were given up: what they could not load is of no interest any longer.
    """
    total = MoveReport()
    for each, report in reports.items():
        total.invalid |= report.invalid if each == step else set()
        total.dropped |= report.dropped
        total.count(**report.figures)
    if not (total.invalid or total.dropped or total.figures):
        return None
    return KVConnectorOutput(
        invalid_block_ids=frozenset(total.invalid), dropped=frozenset(total.dropped), stats=total.figures
    )
