"""What a channel says of itself."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ("ChannelStatistics",)


class ChannelStatistics(NamedTuple):
    """One end's figures.

    Attributes:
        sent: Frames, those about memory included.
        received: The same.
        queued: Frames that wait for the peer to read.
        leases: Messages that were received and are still in use here.
        leased_bytes: Bytes of the peer's memory that they hold.
    """

    sent: int
    received: int
    queued: int
    leases: int
    leased_bytes: int
