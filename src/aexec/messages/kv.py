"""What the two sides of a KV connector tell each other outside of steps."""

from __future__ import annotations

import msgspec

__all__ = ("KVHoldings",)


class KVHoldings(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank holds when it is attached.

    Attributes:
        keys: Of its blocks, least recently used first.
        capacity: Blocks that it can hold; it lets the least recently used ones go first.
    """

    keys: list[bytes]
    capacity: int
