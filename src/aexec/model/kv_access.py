"""The KV cache of one rank from outside: what it holds, block by block, as bytes in host memory.

A KV connector moves bytes and knows no tensors. What those bytes mean is fixed by two texts
that every block's key depends on: the layout of the cache, and the weights that computed it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

__all__ = ("KVAccess", "Row")

Row = NDArray[np.uint8]
"""One block in host memory, ``[block_bytes]``, contiguous."""


class KVAccess(Protocol):
    """The blocks of one rank; its methods block and run on the compute thread, between two steps, but for one."""

    @property
    def block_bytes(self) -> int:
        """Bytes of a block on this rank."""
        ...

    @property
    def layout(self) -> str:
        """What the bytes of a block are: dtype, positions, layers and shapes of this rank."""
        ...

    @property
    def weights_version(self) -> int:
        """Changes with every complete set of weights."""
        ...

    @property
    def is_ready(self) -> bool:
        """False: the weights or the KV cache are not there, or not whole."""
        ...

    def weights_digest(self) -> bytes:
        """What computes the KV of this rank: equal digests mean equal weights and equal code.

        Reads all weights, which takes a while: it may run on another thread, beside the steps.

        Raises:
            ModelNotReady: The weights have changed meanwhile.
        """
        ...

    def read(self, block_ids: Sequence[int], rows: Sequence[Row]) -> None:
        """Copy blocks out, each into its row."""
        ...

    def write(self, block_ids: Sequence[int], rows: Sequence[Any]) -> None:
        """Fill blocks, each from its row; requests may come with them as computed from now on."""
        ...

    def spoil(self, block_ids: Sequence[int]) -> None:
        """Blocks that could not be filled: requests come with them all the same, until the scheduler hears of it."""
        ...
