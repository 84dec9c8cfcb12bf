"""What a block of tokens is called, so that requests that begin alike find each other's KV.

The KV of a position depends on its token and on all before it. So a full block is named by a
hash over its own tokens and the name of the block before it: equal names mean equal
beginnings. Names are the same in every process and on every platform (no ``hash()``), so
that what is kept outside of the cache is found again after a restart.

Requests share only within one ``cache_salt``: it is where the chain begins, and who does not
know it can neither find a block nor learn from the speed of an answer that it is there.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Sequence
from hashlib import blake2b
from typing import NamedTuple

__all__ = ("BlockHash", "PrefixStatistics", "extend_hashes", "root_hash")

BlockHash = bytes
"""Names a full block and all that comes before it; 32 bytes."""

_DIGEST_BYTES = 32
_CHAIN = b"aexec-kv-1"  # another way of hashing is another chain, so that old names are not found


class PrefixStatistics(NamedTuple):
    """The prefix cache in numbers; all but the first count from the start.

    Attributes:
        num_cached_blocks: Blocks that can be found by their hash, held or free.
        num_queried_tokens: Tokens of requests that looked for their beginning.
        num_hit_tokens: Those of them that were found in the cache.
        num_loaded_tokens: Those of them that a connector is to bring.
        num_evictions: Cached blocks that were given to somebody else.
    """

    num_cached_blocks: int = 0
    num_queried_tokens: int = 0
    num_hit_tokens: int = 0
    num_loaded_tokens: int = 0
    num_evictions: int = 0

    @property
    def hit_rate(self) -> float:
        """Share of the tokens that had not to be computed."""
        found = self.num_hit_tokens + self.num_loaded_tokens
        return found / self.num_queried_tokens if self.num_queried_tokens else 0.0


def root_hash(cache_salt: str = "") -> BlockHash:
    """Where a chain begins."""
    return blake2b(_CHAIN + cache_salt.encode("utf-8", "surrogatepass"), digest_size=_DIGEST_BYTES).digest()


def extend_hashes(hashes: list[BlockHash], root: BlockHash, token_ids: Sequence[int], block_size: int) -> None:
    """Append the hashes of the full blocks of ``token_ids`` that are not in ``hashes`` yet.

    >>> hashes: list[BlockHash] = []
    >>> extend_hashes(hashes, root_hash(), [5, 6, 7, 8, 9], block_size=2)
    >>> [each.hex()[:8] for each in hashes]
    ['7d5a3ea6', '107f68aa']
    """
    pack = _packer(block_size).pack
    last = hashes[-1] if hashes else root
    for start in range(len(hashes) * block_size, len(token_ids) - block_size + 1, block_size):
        last = blake2b(last + pack(*token_ids[start : start + block_size]), digest_size=_DIGEST_BYTES).digest()
        hashes.append(last)


@functools.cache
def _packer(block_size: int) -> struct.Struct:
    return struct.Struct(f"<{block_size}i")
