"""One rank's KV cache under torch as bytes; a ``model.kv_access.KVAccess``.

A block lies in each pool once for every layer and for keys and values; in its row these
pieces follow each other, pool by pool.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from hashlib import blake2b
from typing import Any

import numpy as np
import torch
import transformers as _transformers
from torch import Tensor

from aexec.errors import ProtocolError
from aexec.model.kv_access import Row
from aexec.model.residency import Residency, WeightsState
from aexec.model.transformer.kv_cache import KVCache
from aexec.model.transformer.store import TorchStore

__all__ = ("TorchKVAccess", "digest_of")

_version: str = getattr(_transformers, "__version__", "")
_PIECE_BYTES = 4096  # of weights that one sum is taken over


class TorchKVAccess:
    """The blocks of a torch runner.

    Args:
        store: Holds the weights and the cache.
        residency: What of them is there.
        filled: Told of blocks that hold KV which no request has computed.
    """

    def __init__(self, store: TorchStore, residency: Residency, filled: Callable[[Sequence[int]], None]) -> None:
        self._store, self._residency, self._filled = store, residency, filled

    def __repr__(self) -> str:
        return f"<TorchKVAccess: {self._store!r}>"

    @property
    def block_bytes(self) -> int:
        """Keys and values of all layers of this rank."""
        return sum(pool[:, :, 0].nbytes for pool in self._cache.pools)

    @property
    def layout(self) -> str:
        """Shapes of the pools, but for the number of blocks."""
        cache = self._cache
        pools = ", ".join(str([*pool.shape[:2], *pool.shape[3:]]) for pool in cache.pools)
        return f"torch {cache.dtype} layers {sorted(cache.keys)} pools {pools}"

    @property
    def weights_version(self) -> int:
        """Counts the complete sets of weights."""
        return self._residency.version

    @property
    def is_ready(self) -> bool:
        """False while weights or cache sleep, or the weights are half updated."""
        return self._residency.weights is WeightsState.READY and self._store.cache is not None

    @torch.inference_mode()
    def weights_digest(self) -> bytes:
        """Of all weights of this rank, the model's configuration, and the versions of the libraries that run it.

        Raises:
            ModelNotReady: The weights have changed meanwhile.
        """
        num_changes, model = self._residency.num_changes, self._store.model
        total = blake2b(f"{model.architecture} {model.dtype} {model.device.type}".encode(), digest_size=32)
        total.update(f"torch {torch.__version__} transformers {_version}".encode())
        total.update(repr(sorted(model.module.config.to_dict().items(), key=lambda item: item[0])).encode())
        pieces = self._store.weights.pieces()
        while True:
            with self._residency.still(num_changes):
                if (piece := next(pieces, None)) is None:
                    return total.digest()
                total.update(piece[0].encode())
                total.update(digest_of(piece[1]))

    @torch.inference_mode()
    def read(self, block_ids: Sequence[int], rows: Sequence[Row]) -> None:
        """Copy blocks out."""
        for block_id, row in zip(block_ids, rows, strict=True):
            for pool, piece in self._pieces(row):
                _copy(piece, pool[:, :, block_id])

    @torch.inference_mode()
    def write(self, block_ids: Sequence[int], rows: Sequence[Any]) -> None:
        """Fill blocks."""
        for block_id, row in zip(block_ids, rows, strict=True):
            for pool, piece in self._pieces(row):
                _copy(pool[:, :, block_id], piece)
        self._filled(block_ids)

    @torch.inference_mode()
    def spoil(self, block_ids: Sequence[int]) -> None:
        """Make these as new: what was there is of another request, and might be no numbers."""
        if self._store.cache is not None:
            self._cache.zero(torch.tensor(block_ids, dtype=torch.int64, device=self._cache.pools[0].device))
            self._filled(block_ids)

    @property
    def _cache(self) -> KVCache:
        if self._store.cache is None:
            raise ProtocolError("a KV block was asked for while there is no KV cache")
        return self._store.cache

    def _pieces(self, row: Row) -> list[tuple[Tensor, Tensor]]:
        """The pools as bytes, and the part of a row that is of each: ``[layers, 2, block_size, heads, bytes]``."""
        pieces: list[tuple[Tensor, Tensor]] = []
        start, whole = 0, torch.as_tensor(row)
        for pool in self._cache.pools:
            seen = pool.view(torch.uint8)
            shape = (*seen.shape[:2], *seen.shape[3:])
            end = start + seen[:, :, 0].numel()
            pieces.append((seen, whole[start:end].view(shape)))
            start = end
        return pieces


def _copy(target: Tensor, source: Tensor) -> None:
    """By one thread on a CPU: a block is too little for torch's, which would have to wait for each other."""
    if target.device.type == source.device.type == "cpu":
        np.copyto(target.numpy(), source.numpy())
    else:
        target.copy_(source)


def digest_of(tensor: Tensor) -> bytes:
    """Of shape, dtype and content: exact sums over pieces of some kilobytes, and a hash over those.

    A sum is about as quick as memory is, on any device; a changed element changes the sum of its piece.
    """
    total = blake2b(f"{list(tensor.shape)} {tensor.dtype}".encode(), digest_size=32)
    flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
    whole = flat.numel() // _PIECE_BYTES * _PIECE_BYTES
    sums = flat[:whole].view(torch.int64).view(-1, _PIECE_BYTES // 8).sum(1)
    total.update(sums.cpu().numpy().tobytes())
    total.update(flat[whole:].cpu().numpy().tobytes())
    return total.digest()
