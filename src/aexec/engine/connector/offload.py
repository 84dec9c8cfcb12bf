"""The scheduler side of ``Offload``: which blocks all ranks have kept, by what they hold. Pure.

Ranks let those blocks go first that were used least recently, and so does this index, by
the same rules and the capacity of the least of them: what it promises is there. What a rank
says beside goes before.

A key is a block's hash and a stamp of the step that stored it. The parts of a block on
different ranks are of one forward pass if their keys are equal, and are put together only
then: a rank that could not store its part spoils the block, not the tokens.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from typing import NamedTuple

from aexec.config import Offload
from aexec.engine.connector.base import NamedBlocks
from aexec.engine.prefix import BlockHash
from aexec.messages.batch import KVConnectorOutput, KVTransfer
from aexec.messages.kv import KVHoldings

__all__ = ("OffloadConnector", "OffloadStatistics")

_HASH_BYTES, _STAMP_BYTES = 32, 4
_FLUSH_BLOCKS = 64  # of one step
_NO_KEY = b""  # of a block that nobody holds: loading it fails, and it is computed


class OffloadStatistics(NamedTuple):
    """An offload in numbers; all but the first three count from the start, the last six over all ranks.

    Attributes:
        is_attached: Blocks are stored and found now.
        num_blocks: Blocks that can be found.
        capacity: Blocks that can be kept.
        num_matched_blocks: Blocks that were to be loaded.
        stored_blocks: That ranks have stored.
        loaded_blocks: That ranks have loaded.
        failed_stores: That they could not store.
        failed_loads: That they could not load; their requests were computed again.
        store_seconds: What storing took from their steps.
        load_seconds: What loading took.
    """

    is_attached: bool = False
    num_blocks: int = 0
    capacity: int = 0
    num_matched_blocks: int = 0
    stored_blocks: int = 0
    loaded_blocks: int = 0
    failed_stores: int = 0
    failed_loads: int = 0
    store_seconds: float = 0.0
    load_seconds: float = 0.0


class OffloadConnector:
    """Knows what is kept; a ``KVConnector``.

    Args:
        config: The settings.
        session: 4 bytes that no other engine has which fills the same directory.

    Attributes:
        epoch: See ``KVConnector``.
        afresh: See there.
        on_detached: See there.
        flush_timeout: See there.
    """

    def __init__(self, config: Offload, session: bytes) -> None:
        self.epoch, self.afresh = 0, False
        self.on_detached: Callable[[], None] = _nobody_asked
        self.flush_timeout = config.flush_timeout if config.directory is not None else 0.0
        self._session, self._num_plans = session, 0
        self._is_attached = False
        self._capacity = 0
        self._keys: OrderedDict[BlockHash, bytes] = OrderedDict()  # least recently used first
        self._num_matched = 0
        self._figures: Counter[str] = Counter()

    def __repr__(self) -> str:
        state = f"{len(self._keys)}/{self._capacity} blocks" if self._is_attached else "detached"
        return f"<OffloadConnector: {state}, epoch {self.epoch}>"

    def statistics(self) -> OffloadStatistics:
        """The offload in numbers."""
        figures = self._figures
        return OffloadStatistics(
            self._is_attached,
            len(self._keys),
            self._capacity,
            self._num_matched,
            *(int(figures[name]) for name in ("stored_blocks", "loaded_blocks", "failed_stores", "failed_loads")),
            *(float(figures[name]) for name in ("store_seconds", "load_seconds")),
        )

    # ------------------------------------------------------------ the ranks

    def detach(self, *, afresh: bool = False) -> None:
        """Find nothing and store nothing until the ranks are attached anew."""
        self.afresh = self.afresh or afresh
        self.epoch += 1
        self._is_attached = False
        self._keys.clear()
        self.on_detached()

    def attached(self, epoch: int, holdings: Sequence[KVHoldings]) -> None:
        """Find what all ranks hold."""
        if epoch != self.epoch:
            return
        self._is_attached, self.afresh = True, False
        self._capacity = min(each.capacity for each in holdings)
        common = set(holdings[0].keys).intersection(*(each.keys for each in holdings[1:]))
        self._keys = OrderedDict((key[:_HASH_BYTES], key) for key in holdings[0].keys if key in common)
        self._trim()

    # ------------------------------------------------------------ a step

    def match(self, hashes: Sequence[BlockHash]) -> int:
        """How many of these blocks, from the first on, all ranks hold."""
        found = 0
        while found < len(hashes) and hashes[found] in self._keys:
            found += 1
        self._num_matched += found
        return found

    def plan(self, evicted: NamedBlocks, loads: NamedBlocks) -> KVTransfer | None:
        """Keep what is given away and is not kept yet; what is loaded was used just now."""
        if not (evicted or loads):
            return None
        load_keys = [self._keys.get(block_hash, _NO_KEY) for _, block_hash in loads]
        for key in load_keys:
            if key:
                self._keys.move_to_end(key[:_HASH_BYTES])
        stores = self._stores(evicted, self._capacity - len(set(load_keys)))
        if not (stores or loads):
            return None
        return self._transfer(stores, loads, load_keys)

    def take_report(self, report: KVConnectorOutput) -> bool:
        """Forget what a rank does not hold; False: a rank is not what it was when it was attached."""
        for key in report.dropped:
            if self._keys.get(key[:_HASH_BYTES]) == key:
                del self._keys[key[:_HASH_BYTES]]
        self._figures.update(report.stats)
        return not self._is_attached or "refusals" not in report.stats

    def request_finished(self, request_id: str) -> None:
        """Blocks are kept when they are given away, whoever had them."""

    # ------------------------------------------------------------ the end

    def flush(self, cached: NamedBlocks) -> list[KVTransfer]:
        """Keep what the cache holds, in steps of some blocks each."""
        stores = self._stores(cached, self._capacity)
        return [self._transfer(stores[i : i + _FLUSH_BLOCKS], (), []) for i in range(0, len(stores), _FLUSH_BLOCKS)]

    def _stores(self, blocks: NamedBlocks, most: int) -> NamedBlocks:
        if not self._is_attached or most <= 0:
            return ()
        return [(block, block_hash) for block, block_hash in blocks if block_hash not in self._keys][-most:]

    def _transfer(self, stores: NamedBlocks, loads: NamedBlocks, load_keys: list[bytes]) -> KVTransfer:
        self._num_plans += 1
        stamp = self._session + (self._num_plans % 2 ** (8 * _STAMP_BYTES)).to_bytes(_STAMP_BYTES, "little")
        store_keys = [block_hash + stamp for _, block_hash in stores]
        self._keys.update((key[:_HASH_BYTES], key) for key in store_keys)
        self._trim()
        return KVTransfer(
            epoch=self.epoch,
            store_block_ids=[block for block, _ in stores],
            store_keys=store_keys,
            load_block_ids=[block for block, _ in loads],
            load_keys=load_keys,
        )

    def _trim(self) -> None:
        while len(self._keys) > self._capacity:
            self._keys.popitem(last=False)


def _nobody_asked() -> None:
    """Nobody attaches the ranks."""
