"""The paged KV cache of one rank: how many blocks it gets, and the memory they are.

Block 0 is the null block: it pads block tables, belongs to no request and stays zero.
A block is zeroed when a request gets it: attention multiplies what it masks by zero, and
zero times a leftover NaN would be NaN.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from aexec.config import CacheConfig, SchedulerConfig
from aexec.errors import OutOfMemory
from aexec.model.memory import cache_budget

__all__ = ("KVCache", "KVShape", "blocks_for", "budget_for")


@dataclass(frozen=True, slots=True)
class KVShape:
    """What one layer stores per position.

    Attributes:
        num_heads: Key/value heads on this rank.
        head_dim: Size of each, for keys and for values alike.
    """

    num_heads: int
    head_dim: int

    def bytes_per_position(self, dtype: torch.dtype) -> int:
        """Key and value together."""
        return 2 * self.num_heads * self.head_dim * dtype.itemsize


def budget_for(config: CacheConfig, free_bytes: int, block_bytes: int, max_model_len: int, *, is_cuda: bool) -> int:
    """Bytes that the cache may take.

    A given number of blocks may take all that is free, a given budget is taken as it is,
    and without either it is a share of what is free (see ``memory.cache_budget``), but not
    more than as many requests as run at a time by default could ever fill.

    Raises:
        OutOfMemory: The given budget is more than there is.
    """
    if config.num_blocks is not None:
        return free_bytes
    if config.memory_bytes is not None:
        if config.memory_bytes > free_bytes:
            raise OutOfMemory(
                "the KV cache budget of CacheConfig.memory_bytes", config.memory_bytes, free_bytes,
                "lower it, or free memory",
            )  # fmt: skip
        return config.memory_bytes
    most_blocks = 1 + SchedulerConfig().max_num_seqs * math.ceil(max_model_len / config.block_size)
    return min(cache_budget(free_bytes, is_cuda=is_cuda), most_blocks * block_bytes)


def blocks_for(config: CacheConfig, available_bytes: int, block_bytes: int) -> int:
    """Blocks of a cache: ``CacheConfig.num_blocks``, else what the bytes hold.

    Raises:
        OutOfMemory: The blocks do not fit, or there is not even one beside the null block.
    """
    num_blocks = config.num_blocks or available_bytes // block_bytes
    if num_blocks < 2:
        raise OutOfMemory(
            f"the least KV cache (2 blocks of {config.block_size} positions)", 2 * block_bytes, available_bytes,
            "raise CacheConfig.memory_bytes, lower CacheConfig.block_size, or free memory",
        )  # fmt: skip
    if num_blocks * block_bytes > available_bytes:
        raise OutOfMemory(
            f"a KV cache of {num_blocks} blocks", num_blocks * block_bytes, available_bytes,
            "lower CacheConfig.num_blocks, or leave it out to take what fits",
        )  # fmt: skip
    return num_blocks


class KVCache:
    """Keys and values of every layer of one rank.

    Attributes:
        num_blocks: Blocks, the null block included.
        block_size: Positions of a block.
        keys: By layer: ``[num_blocks, block_size, num_heads, head_dim]``.
        values: The same.
    """

    def __init__(
        self, shapes: Mapping[int, KVShape], num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.num_blocks, self.block_size, self.dtype = num_blocks, block_size, dtype
        self.keys: dict[int, Tensor] = {}
        self.values: dict[int, Tensor] = {}
        self._pools: list[Tensor] = []
        for shape in dict.fromkeys(shapes.values()):
            layers = [layer for layer, its_shape in shapes.items() if its_shape == shape]
            size = (len(layers), 2, num_blocks, block_size, shape.num_heads, shape.head_dim)
            pool = _zeros(size, dtype, device)
            self._pools.append(pool)
            for place, layer in enumerate(layers):
                self.keys[layer], self.values[layer] = pool[place, 0], pool[place, 1]

    def __repr__(self) -> str:
        return (
            f"<KVCache: {self.num_blocks} blocks of {self.block_size} positions, {len(self.keys)} layers, "
            f"{self.num_bytes / 2**20:,.1f} MiB>"
        )

    @property
    def pools(self) -> list[Tensor]:
        """The memory, each ``[num_layers, 2, num_blocks, block_size, num_heads, head_dim]``: keys, then values."""
        return self._pools

    @property
    def num_bytes(self) -> int:
        """All of it."""
        return sum(pool.nbytes for pool in self._pools)

    def zero(self, block_ids: Tensor) -> None:
        """Make these blocks (int64, on the cache's device) as new."""
        for pool in self._pools:
            pool.index_fill_(2, block_ids, 0.0)


def _zeros(size: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros that take no memory on a CPU until they are written to (``calloc``, as ``torch.zeros`` does not)."""
    if device.type != "cpu":
        return torch.zeros(size, dtype=dtype, device=device)
    return torch.as_tensor(np.zeros(math.prod(size) * dtype.itemsize, dtype=np.uint8)).view(dtype).view(size)
