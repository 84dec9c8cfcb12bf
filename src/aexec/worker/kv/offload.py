"""The worker side of ``Offload``: one rank's blocks to host memory or to a directory, and back."""

from __future__ import annotations

import time
from collections.abc import Sequence
from hashlib import blake2b

from aexec.config import Offload
from aexec.errors import ModelNotReady
from aexec.messages.batch import KVConnectorOutput, KVTransfer
from aexec.messages.kv import KVHoldings
from aexec.messages.step import StepId
from aexec.model.kv_access import KVAccess
from aexec.observe import get_logger
from aexec.worker.kv.block_file import FINGERPRINT_BYTES
from aexec.worker.kv.directory import DirectoryStore, open_directory
from aexec.worker.kv.report import MoveReport, merged
from aexec.worker.kv.store import BlockStore, MemoryStore

__all__ = ("RankOffload",)

_FORMAT = "aexec kv 1"  # another one finds nothing of what is kept in this one


class RankOffload:
    """Of one rank; a ``RankConnector``.

    Args:
        config: Where to, and how much.
        rank: This rank.
        world_size: Ranks of the group.
        blocks: The rank's cache; there is none yet.
    """

    def __init__(self, config: Offload, rank: int, world_size: int, blocks: KVAccess) -> None:
        self._config, self._rank, self._world_size, self._blocks = config, rank, world_size, blocks
        self._store: BlockStore | None = None
        self._fingerprint = b""
        self._epoch, self._version = -1, -1  # of the attachment; -1: there is none
        self._identity: tuple[int, bytes] | None = None  # the weights' version, and what was found then
        self._reports: dict[StepId, MoveReport] = {}
        self._has_warned = False

    def __repr__(self) -> str:
        state = f"attached in epoch {self._epoch}" if self._is_attached else "detached"
        return f"<RankOffload rank {self._rank}: {state}, {self._store!r}>"

    def identity(self, *, afresh: bool = False) -> bytes:
        """What this rank's KV depends on.

        Raises:
            ModelNotReady: The weights or the cache are not there, or have changed meanwhile.
        """
        if not self._blocks.is_ready:
            raise ModelNotReady("attaching a KV connector", "the model is not whole", "wake it up, or load its weights")
        version = self._blocks.weights_version
        if afresh or self._identity is None or self._identity[0] != version:
            weights = self._blocks.weights_digest()
            text = f"{_FORMAT} rank {self._rank} of {self._world_size}: {self._blocks.layout}"
            self._identity = version, blake2b(text.encode() + b"\0" + weights, digest_size=32).digest()
        return self._identity[1]

    def attach(self, epoch: int, identities: Sequence[bytes]) -> KVHoldings:
        """Carry out transfers of this epoch; what others have stored is let go, or left on its disk.

        Raises:
            ModelNotReady: This rank is not what it said that it is.
        """
        known, is_ready = self._identity, self._blocks.is_ready
        if not is_ready or known != (self._blocks.weights_version, identities[self._rank]):
            raise ModelNotReady("attaching a KV connector", "the weights have changed meanwhile", "attach it again")
        fingerprint = blake2b(b"".join(identities), digest_size=FINGERPRINT_BYTES).digest()
        if self._store is None or fingerprint != self._fingerprint:
            self._open_store(fingerprint)
        assert self._store is not None
        self._reports.clear()
        self._store.take_dropped()
        self._epoch, self._version = epoch, self._blocks.weights_version
        return KVHoldings(keys=list(self._store.keys()), capacity=self._store.capacity)

    def move(self, step: StepId, transfer: KVTransfer) -> None:
        """Store, then load; what cannot be done is in the step's report."""
        report = self._reports[step] = MoveReport()
        if self._store is None or not self._is_attached or transfer.epoch != self._epoch:
            report.refuse(transfer)
            self._blocks.spoil(transfer.load_block_ids)
            return
        began = time.perf_counter()
        self._store.touch(transfer.load_keys)
        self._store_blocks(self._store, transfer, report)
        stored = time.perf_counter()
        self._load_blocks(self._store, transfer, report)
        report.dropped |= self._store.take_dropped()
        report.count(store_seconds=stored - began, load_seconds=time.perf_counter() - stored)

    def doubt(self) -> None:
        """Refuse transfers until the next attachment."""
        self._epoch = -1

    def take_report(self, step: StepId) -> KVConnectorOutput | None:
        """Of all steps up to ``step``; blocks are invalid in ``step`` itself only."""
        if not self._reports:
            return None
        due = [each for each in self._reports if each <= step]
        return merged({each: self._reports.pop(each) for each in due}, step)

    def close(self) -> None:
        """Give the memory back; files stay."""
        self.doubt()
        if self._store is not None:
            self._store.close()
            self._store = None

    @property
    def _is_attached(self) -> bool:
        if self._epoch >= 0 and not (self._blocks.is_ready and self._blocks.weights_version == self._version):
            self.doubt()
        return self._epoch >= 0

    def _open_store(self, fingerprint: bytes) -> None:
        config, block_bytes = self._config, self._blocks.block_bytes
        self.close()
        if config.directory is None:
            self._store = MemoryStore(config.bytes // self._world_size, block_bytes)
        else:
            self._store = DirectoryStore(
                open_directory(str(config.directory), config.bytes, block_bytes),
                fingerprint,
                rank=self._rank,
                world_size=self._world_size,
                limit_bytes=config.bytes,
                block_bytes=block_bytes,
            )
        self._fingerprint = fingerprint

    def _store_blocks(self, store: BlockStore, transfer: KVTransfer, report: MoveReport) -> None:
        for block, key in zip(transfer.store_block_ids, transfer.store_keys, strict=True):
            try:
                self._blocks.read([block], [store.reserve(key)])
                store.commit(key)
            except OSError as error:
                report.dropped.add(key)
                report.count(failed_stores=1)
                self._warn(error)
            else:
                report.count(stored_blocks=1)

    def _load_blocks(self, store: BlockStore, transfer: KVTransfer, report: MoveReport) -> None:
        for block, key in zip(transfer.load_block_ids, transfer.load_keys, strict=True):
            try:
                row = store.fetch(key)
            except KeyError:
                report.invalid.add(block)
                report.dropped.add(key)
                report.count(failed_loads=1)
            else:
                self._blocks.write([block], [row])
                report.count(loaded_blocks=1)
        if report.invalid:
            self._blocks.spoil(sorted(report.invalid))
            self.doubt()  # what is computed on top of it, by any rank, must not be stored

    def _warn(self, error: OSError) -> None:
        """Once: a full disk fails for each block."""
        if not self._has_warned:
            self._has_warned = True
            get_logger("aexec.worker").warning(
                "a KV block could not be stored, and will be computed again", rank=self._rank, error=str(error)
            )
