"""What a KV connector does on each rank, whatever kind it is; ``ModelWorker`` calls it.

The scheduler side first asks all ranks who they are, and attaches each of them with all
answers: what they have made together is of use to the same ranks only. From then on transfers of that epoch are carried out,
until something happens that makes the rank's KV another one, or doubtful: other weights, a
forward pass that failed, a block that could not be loaded. Then the rank refuses transfers
until it is attached anew: what it does not store it says, and what it does not load the
scheduler has computed again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from aexec.messages.batch import KVConnectorOutput, KVTransfer
from aexec.messages.kv import KVHoldings
from aexec.messages.step import StepId

__all__ = ("RankConnector",)


class RankConnector(Protocol):
    """The worker side of a connector; its methods block, and run on the compute thread but for :meth:`identity`."""

    def identity(self, *, afresh: bool = False) -> bytes:
        """What this rank's KV depends on: weights, layout, code; runs on a thread of its own, beside the steps.

        Args:
            afresh: Look at the weights again, even if nobody said that they have changed.

        Raises:
            ModelNotReady: The weights or the cache are not there, or have changed meanwhile.
        """
        ...

    def attach(self, epoch: int, identities: Sequence[bytes]) -> KVHoldings:
        """Carry out transfers of this epoch from now on.

        Args:
            epoch: It increases.
            identities: Of all ranks; what was stored by others is never found.

        Returns:
            What this rank holds.

        Raises:
            ModelNotReady: This rank is not what it said that it is: it has other weights by now.
        """
        ...

    def move(self, step: StepId, transfer: KVTransfer) -> None:
        """Store, then load; called before the step's forward pass. It does not raise."""
        ...

    def doubt(self) -> None:
        """A forward pass has failed: nobody knows what is in the cache."""
        ...

    def take_report(self, step: StepId) -> KVConnectorOutput | None:
        """What became of the transfers up to this step that was not told yet; None: there is nothing to tell."""
        ...

    def close(self) -> None:
        """The worker ends."""
        ...
