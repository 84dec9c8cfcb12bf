"""The dummy's simulated KV cache as bytes; a ``model.kv_access.KVAccess``."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aexec.errors import ProtocolError
from aexec.model.dummy.store import DummyStore
from aexec.model.kv_access import Row
from aexec.model.residency import Residency, WeightsState

__all__ = ("DummyKVAccess",)


class DummyKVAccess:
    """The blocks of a dummy runner.

    Args:
        store: Holds the ledger, which simulates the cache.
        residency: What of the model is there.
        block_size: Positions of a block.
    """

    def __init__(self, store: DummyStore, residency: Residency, block_size: int) -> None:
        self._store, self._residency = store, residency
        self.block_bytes = block_size * np.dtype(np.uint64).itemsize
        self.layout = f"dummy uint64 [{block_size}]"

    def __repr__(self) -> str:
        return f"<DummyKVAccess: {self.layout}, {self._store!r}>"

    @property
    def weights_version(self) -> int:
        """Counts the seeds that it was given."""
        return self._residency.version

    @property
    def is_ready(self) -> bool:
        """False while it sleeps, or is half updated."""
        return self._residency.weights is WeightsState.READY and self._store.ledger is not None

    def weights_digest(self) -> bytes:
        """Of its settings, the seed among them."""
        return blake2b(str(self._store.distribution.settings).encode(), digest_size=32).digest()

    def read(self, block_ids: Sequence[int], rows: Sequence[Row]) -> None:
        """Copy blocks out."""
        for block_id, row in zip(block_ids, rows, strict=True):
            row.view(np.uint64)[:] = self._block(block_id)

    def write(self, block_ids: Sequence[int], rows: Sequence[Any]) -> None:
        """Fill blocks; the ledger finds out if they hold something else than they should."""
        for block_id, row in zip(block_ids, rows, strict=True):
            self._block(block_id)[:] = np.frombuffer(row, dtype=np.uint64)

    def spoil(self, block_ids: Sequence[int]) -> None:
        """These could not be filled; what is computed on top of them is nonsense."""
        if self._store.ledger is not None:
            self._store.ledger.spoil(block_ids)

    def _block(self, block_id: int) -> NDArray[np.uint64]:
        if self._store.ledger is None:
            raise ProtocolError("a KV block was asked for while there is no KV cache")
        return self._store.ledger.block(block_id)
