"""Which blocks a request begins with: those that others have computed, those that are to be loaded, and new ones.

The scheduler says how far a request runs; here its block table is made. A request that is
admitted takes as many cached blocks as its tokens begin with, then as many as a KV connector
can bring, and computes the rest, at least its last token, as somebody has to be sampled.
When a step is decided its full blocks are cached, so that the next step may share them: steps
run in order, and so do their writes and reads.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from aexec.engine.blocks import BlockPool
from aexec.engine.connector.base import KVConnector
from aexec.engine.prefix import BlockHash, PrefixStatistics, extend_hashes, root_hash
from aexec.engine.request import NEVER, Request
from aexec.messages.batch import KVConnectorOutput, KVTransfer

__all__ = ("KVAllocator",)


class KVAllocator:
    """Makes block tables.

    Args:
        blocks: The pool.
        prefix_caching: Requests share what they begin with. If not, the samples of one request still do.
        connector: Keeps blocks elsewhere; None: what is evicted is lost.
    """

    def __init__(
        self, blocks: BlockPool, *, prefix_caching: bool = False, connector: KVConnector | None = None
    ) -> None:
        self.blocks, self.prefix_caching = blocks, prefix_caching
        self.connector = connector
        blocks.reports_evictions = connector is not None
        self._loads: list[tuple[int, BlockHash]] = []
        self._num_queried = self._num_hit = self._num_loaded = 0

    def enroll(self, request: Request) -> None:
        """Decide with whom a request shares."""
        if self.prefix_caching:
            request.root_hash = root_hash(request.cache_salt)
        elif request.leader is not None:
            request.root_hash = request.leader.root_hash
        elif request.followers:
            request.root_hash = root_hash(f"samples of {request.arrival}")
        self._restart(request)

    def begin(self, request: Request, budget: int) -> int:
        """Give a request that is admitted its first blocks.

        Args:
            request: It holds none; what need not be computed is counted as computed.
            budget: Tokens that may be scheduled.

        Returns:
            How many are; 0: there is no room for all of its tokens, and nothing has changed.
        """
        pool, tokens = self.blocks, request.token_ids
        hashes = self._hashes_to_find(request)
        shared = pool.match(hashes)
        # All its tokens must fit now, not only the chunk: half a prompt would soon be preempted again.
        if pool.num_blocks_for(len(tokens)) - len(shared) + pool.num_free_among(shared) > pool.num_free:
            return 0
        pool.share(request.request_id, shared)
        wanted = hashes[len(shared) :]
        num_loaded = self.connector.match(wanted) if self.connector is not None and wanted else 0
        num_found = (len(shared) + num_loaded) * pool.block_size
        num_tokens = min(len(tokens) - num_found, budget)
        fresh = pool.grow(request.request_id, num_found + num_tokens) or []
        self._count_slots(request)
        self._loads += zip(fresh[:num_loaded], wanted, strict=False)
        request.num_computed_tokens = request.num_cached_tokens = num_found
        self._restart(request, len(shared))
        if request.root_hash:
            self._num_queried += len(tokens)
            self._num_hit += len(shared) * pool.block_size
            self._num_loaded += num_loaded * pool.block_size
        return num_tokens

    def grow(self, request: Request, num_tokens: int) -> list[int] | None:
        """Blocks for a request that runs, so that it has ``num_tokens`` positions; None: there are too few free ones."""
        block_ids = self.blocks.grow(request.request_id, num_tokens)
        if block_ids:
            self._count_slots(request)
        return block_ids

    def cache(self, request: Request) -> None:
        """Let the full blocks be found whose tokens are known and stored, or will be by the steps in flight."""
        pool = self.blocks
        num_full = min(request.num_computed_tokens, len(request.token_ids)) // pool.block_size
        if num_full > request.num_cached_blocks:
            extend_hashes(request.block_hashes, request.root_hash, request.token_ids, pool.block_size)
            table = pool.table(request.request_id)
            for place in range(request.num_cached_blocks, num_full):
                pool.set_hash(table[place], request.block_hashes[place])
            self._restart(request, num_full)

    def distrust(self, wrong: Iterable[Request], others: Iterable[Request]) -> list[Request]:
        """What these computed is wrong, and nobody shall share it; what they found was there before them, and stays.

        Args:
            wrong: Whose.
            others: All who may have shared it since; ``wrong`` may be among them.

        Returns:
            Those that may have done so. Nobody finds what they computed on top of it.
        """
        wrong, others = list(wrong), list(others)
        sharers: dict[int, Request] = {}
        for request in wrong:
            place = request.num_cached_tokens // self.blocks.block_size
            first = request.block_hashes[place : place + 1]
            if first:  # a block of its own is full, or will be
                alike = [other for other in others if other.block_hashes[place : place + 1] == first]
                sharers.update((id(other), other) for other in alike if other not in wrong)
                for each in (request, *alike):
                    self.blocks.forget(each.block_hashes[place:])
        return list(sharers.values())

    def release(self, request: Request) -> None:
        """Take all blocks back."""
        self.blocks.release(request.request_id)
        request.num_slots = 0
        self._restart(request)
        if self.connector is not None and request.is_finished:
            self.connector.request_finished(request.request_id)

    def stop_caching(self, request: Request) -> None:
        """What a request has computed is of no use to others, nor what it computes on top of it."""
        request.caches_at = NEVER

    def reset(self, *, afresh: bool = False) -> None:
        """Nothing that is stored can be found any longer; ``afresh``: the weights may be others, too."""
        self.blocks.drop_all_hashes()
        self._loads.clear()
        if self.connector is not None:
            self.connector.detach(afresh=afresh)

    def transfer(self) -> KVTransfer | None:
        """What has to be moved before the step that is being decided."""
        if self.connector is None:
            return None
        loads, self._loads = self._loads, []
        return self.connector.plan(self.blocks.take_evicted(), loads)

    def take_report(self, report: KVConnectorOutput, requests: Iterable[Request]) -> list[Request]:
        """What the ranks say of a transfer; returns those of ``requests`` whose blocks could not be filled.

        Whatever was computed on top of such a block is wrong, whoever did it: nothing that is
        stored is shared any longer.
        """
        is_trusted = self.connector is None or self.connector.take_report(report)
        invalid = report.invalid_block_ids
        if is_trusted and not invalid:
            return []
        self.reset()
        requests = list(requests)
        if not is_trusted:
            for request in requests:
                self.stop_caching(request)
        return [request for request in requests if not invalid.isdisjoint(self.blocks.table(request.request_id))]

    def statistics(self) -> PrefixStatistics:
        """The prefix cache in numbers."""
        return PrefixStatistics(
            self.blocks.num_cached, self._num_queried, self._num_hit, self._num_loaded, self.blocks.num_evictions
        )

    def __repr__(self) -> str:
        """As in ``<KVAllocator: prefix caching on, <BlockPool: ...>>``."""
        return f"<KVAllocator: prefix caching {'on' if self.prefix_caching else 'off'}, {self.blocks!r}>"

    def _hashes_to_find(self, request: Request) -> Sequence[BlockHash]:
        if not request.root_hash or request.sampling.prompt_logprobs is not None:  # whose prompt has to run whole
            return ()
        extend_hashes(request.block_hashes, request.root_hash, request.token_ids, self.blocks.block_size)
        return request.block_hashes[: (len(request.token_ids) - 1) // self.blocks.block_size]

    def _count_slots(self, request: Request) -> None:
        request.num_slots = len(self.blocks.table(request.request_id)) * self.blocks.block_size

    def _restart(self, request: Request, num_cached_blocks: int = 0) -> None:
        request.num_cached_blocks = num_cached_blocks
        request.caches_at = (num_cached_blocks + 1) * self.blocks.block_size if request.root_hash else NEVER
