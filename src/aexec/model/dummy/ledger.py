"""Keeps book of what a scheduler told a model runner, and refuses what does not add up.

A real runner believes its scheduler: a wrong block id overwrites another request's KV in
silence, and the text goes bad pages later. The ledger simulates the KV cache instead. Each
slot stores a hash of the token at that position *and of all before it*, so one comparison
per request and step proves that the blocks it names hold exactly its own history, whether
it computed them or shares them with a request that began alike.

The first thing that is wrong raises ``ProtocolError``; the ledger is not to be used after.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np
from numpy.typing import NDArray

from aexec.errors import ProtocolError
from aexec.messages.batch import PLACEHOLDER, NewRequestData, SchedulerOutput
from aexec.messages.request import SamplingParams
from aexec.model.sampling.noise import mix64

__all__ = ("BatchLedger", "LedgerEntry", "ScheduledSpan")

#: A hash of tokens that this rank does not know, as another one samples; it passes for any.
_UNKNOWN = 2**64 - 1
_NONSENSE = np.uint64(0x5EED)  # changes what is computed on top of a block that holds nothing


@dataclass(slots=True, eq=False)
class LedgerEntry:
    """One live request.

    Attributes:
        request_id: Its id.
        sampling: How to sample it.
        stop_token_ids: Ids that end it.
        num_prompt_tokens: Tokens of the prompt.
        num_computed_tokens: Tokens whose KV is stored.
        token_ids: Prompt and output, as the scheduler told them.
        block_ids: Its blocks, in order of position.
        slots: For each position that the blocks hold, its place in the cache.
        prefix_hashes: For each token, a hash of it and of all before it.
        is_spoiled: It has a block that holds nothing; see :meth:`BatchLedger.spoil`.
        unheard: Tokens that were sampled and that the scheduler has not sent back yet.
    """

    request_id: str
    sampling: SamplingParams
    stop_token_ids: Sequence[int]
    num_prompt_tokens: int
    num_computed_tokens: int
    token_ids: list[int] = field(default_factory=list[int])
    block_ids: list[int] = field(default_factory=list[int])
    slots: array[int] = field(default_factory=lambda: array("q"))
    prefix_hashes: array[int] = field(default_factory=lambda: array("Q"))
    unheard: list[int] = field(default_factory=list[int])
    is_spoiled: bool = False

    @property
    def prompt(self) -> list[int]:
        """The prompt's tokens."""
        return self.token_ids[: self.num_prompt_tokens]

    def append(self, tokens: Sequence[int]) -> None:
        """Take more tokens."""
        self.token_ids.extend(tokens)
        last = self.prefix_hashes[-1] if self.prefix_hashes else 0
        for token in tokens:
            unknown = token == PLACEHOLDER or last == _UNKNOWN
            last = _UNKNOWN if unknown else mix64(last ^ mix64(token + 1))
            self.prefix_hashes.append(last)


class ScheduledSpan(msgspec.Struct, frozen=True, gc=False):
    """Tokens ``start`` to ``end`` of one request, to be run in one step."""

    entry: LedgerEntry
    start: int
    end: int

    @property
    def is_sampled(self) -> bool:
        """True when it reaches the request's last token."""
        return self.end == len(self.entry.token_ids)


class BatchLedger:
    """The live requests and the simulated KV cache of one runner."""

    def __init__(
        self, *, num_blocks: int, block_size: int, max_model_len: int, vocab_size: int, samples: bool = True
    ) -> None:
        """Sizes as in ``ModelInfo``; block 0 is the null block. ``samples``: this rank knows what was sampled."""
        self._samples = samples
        self._num_blocks, self._block_size = num_blocks, block_size
        self._max_model_len, self._vocab_size = max_model_len, vocab_size
        self._kv = np.zeros(num_blocks * block_size, dtype=np.uint64)
        self._holders: dict[int, set[str]] = {}
        self._spoiled: set[int] = set()
        self.entries: dict[str, LedgerEntry] = {}

    def __repr__(self) -> str:
        held = f"{len(self._holders)}/{self._num_blocks - 1} blocks held"
        return f"<BatchLedger: {len(self.entries)} live requests, {held}>"

    @property
    def num_bytes(self) -> int:
        """What the simulated KV takes."""
        return self._kv.nbytes

    def block(self, block_id: int) -> NDArray[np.uint64]:
        """The simulated KV of one block, to be read or to be filled."""
        self._spoiled.discard(block_id)
        return self._kv[block_id * self._block_size : (block_id + 1) * self._block_size]

    def spoil(self, block_ids: Sequence[int]) -> None:
        """These hold nothing, and the scheduler does not know it yet: whoever has them computes nonsense until then."""
        self._spoiled.update(block_ids)

    def apply(self, batch: SchedulerOutput) -> list[ScheduledSpan]:
        """Learn the deltas of a step and store its KV; spans come in the order of the batch.

        Raises:
            ProtocolError: They contradict each other, or what was said before.
        """
        for request_id in batch.finished_request_ids:
            self._forget(request_id)
        for new in batch.new:
            self._learn(new)
        self._advance_cached(batch)
        named = {*batch.cached.request_ids, *(new.request_id for new in batch.new)}
        spans = [self._span(name, count, named) for name, count in batch.num_scheduled_tokens.items()]
        for span in spans:
            self._write(span)
        for span in spans:
            self._verify(span)
            span.entry.num_computed_tokens = span.end
        return spans

    def _forget(self, name: str) -> None:
        entry = self.entries.pop(name, None)
        for block in entry.block_ids if entry else ():
            holders = self._holders[block]
            holders.discard(name)
            if not holders:
                del self._holders[block]

    def _learn(self, new: NewRequestData) -> None:
        name, total = new.request_id, len(new.token_ids)
        prompt, computed = new.num_prompt_tokens, new.num_computed_tokens
        if name in self.entries:
            raise _wrong(name, "is sent as new and is live already")
        if not 1 <= prompt <= total:
            raise _wrong(name, f"has num_prompt_tokens {prompt}: expected 1 to {total}, the tokens it comes with")
        if not 0 <= computed < total:
            raise _wrong(
                name, f"comes with num_computed_tokens {computed}: expected 0 to {total - 1}, one token is run"
            )
        entry = self.entries[name] = LedgerEntry(name, new.sampling, new.stop_token_ids, prompt, computed)
        self._append_tokens(entry, new.token_ids)
        self._claim(entry, new.block_ids)

    def _advance_cached(self, batch: SchedulerOutput) -> None:
        cached = batch.cached
        columns = (cached.request_ids, cached.new_token_ids, cached.new_block_ids, cached.num_computed_tokens)
        lengths = [len(column) for column in columns]
        if len(set(lengths)) > 1:
            raise ProtocolError(f"the columns of CachedRequestData have lengths {lengths}: expected equal ones")
        named = {new.request_id for new in batch.new}
        for name, tokens, blocks, computed in zip(*columns, strict=True):
            if name not in self.entries:
                raise _wrong(name, "is sent as cached and is not live: it was never sent as new, or has finished")
            if name in named:
                raise _wrong(name, "comes twice in one step")
            named.add(name)
            self._advance(self.entries[name], tokens, blocks, computed)

    def _advance(self, entry: LedgerEntry, tokens: list[int], blocks: list[int], computed: int) -> None:
        name, expected = entry.request_id, entry.num_computed_tokens
        if computed != expected:
            raise _wrong(name, f"has num_computed_tokens {computed}: expected {expected}")
        if self._samples:
            tokens = _told(entry, tokens)
        entry.unheard = []
        self._append_tokens(entry, tokens)
        self._claim(entry, blocks)

    def _append_tokens(self, entry: LedgerEntry, tokens: list[int]) -> None:
        least = 0 if self._samples else PLACEHOLDER
        outside = [token for token in tokens if not least <= token < self._vocab_size]
        if outside:
            raise _wrong(entry.request_id, f"has token {outside[0]}: expected ids from 0 to {self._vocab_size - 1}")
        entry.append(tokens)
        if len(entry.token_ids) > self._max_model_len:
            raise _wrong(entry.request_id, f"has {len(entry.token_ids)} tokens: max_model_len is {self._max_model_len}")

    def _claim(self, entry: LedgerEntry, blocks: list[int]) -> None:
        name = entry.request_id
        for block in blocks:
            if not 1 <= block < self._num_blocks:
                raise _wrong(name, f"gets block {block}: expected 1 to {self._num_blocks - 1}")
            holders = self._holders.setdefault(block, set())
            if name in holders:
                raise _wrong(name, f"gets block {block} twice")
            end = (len(entry.block_ids) + 1) * self._block_size
            if holders and end > entry.num_computed_tokens:
                raise _wrong(name, f"would write block {block}, which request {min(holders)} holds")
            holders.add(name)
            if end > entry.num_computed_tokens:
                self._spoiled.discard(block)
            entry.is_spoiled = entry.is_spoiled or block in self._spoiled
            entry.block_ids.append(block)
            entry.slots.extend(range(block * self._block_size, (block + 1) * self._block_size))

    def _span(self, name: str, count: int, named: set[str]) -> ScheduledSpan:
        if name not in named:
            raise _wrong(name, "is scheduled and is neither new nor cached in this step")
        entry = self.entries[name]
        span = ScheduledSpan(entry, entry.num_computed_tokens, entry.num_computed_tokens + count)
        left, room = len(entry.token_ids) - span.start, len(entry.block_ids) * self._block_size
        if not 1 <= count <= left:
            raise _wrong(name, f"is scheduled for {count} tokens: expected 1 to {left}, those not computed yet")
        if span.end > room:
            raise _wrong(name, f"runs to token {span.end}: its {len(entry.block_ids)} blocks hold {room}")
        return span

    def _write(self, span: ScheduledSpan) -> None:
        slots, hashes = _slots_and_hashes(span.entry)
        computed = hashes[span.start : span.end]
        self._kv[slots[span.start : span.end]] = computed ^ _NONSENSE if span.entry.is_spoiled else computed

    def _verify(self, span: ScheduledSpan) -> None:
        entry = span.entry
        if entry.is_spoiled:
            return
        slots, hashes = _slots_and_hashes(entry)
        stored, expected = self._kv[slots[: span.end]], hashes[: span.end]
        differs = stored != expected
        if not self._samples:
            differs &= (stored != _UNKNOWN) & (expected != _UNKNOWN)
        wrong = differs.nonzero()[0]
        if len(wrong):
            block = entry.block_ids[int(wrong[0]) // self._block_size]
            problem = f"reads block {block} at position {wrong[0]} and finds the KV of something else"
            raise _wrong(entry.request_id, f"{problem}: it was overwritten, or never computed for these tokens")


def _told(entry: LedgerEntry, tokens: list[int]) -> list[int]:
    """What the scheduler says was sampled, with the token itself for a placeholder."""
    told = tokens
    if tokens and tokens[-1] == PLACEHOLDER and len(entry.unheard) == len(tokens):
        told = [*tokens[:-1], *entry.unheard[len(tokens) - 1 :]]
    if told != entry.unheard:
        raise _wrong(entry.request_id, f"has new_token_ids {tokens}: expected {entry.unheard}, which were sampled")
    return told


def _slots_and_hashes(entry: LedgerEntry) -> tuple[NDArray[np.int64], NDArray[np.uint64]]:
    """Views; the entry cannot grow while they live."""
    return np.frombuffer(entry.slots, dtype=np.int64), np.frombuffer(entry.prefix_hashes, dtype=np.uint64)


def _wrong(request_id: str, problem: str) -> ProtocolError:
    return ProtocolError(f"request {request_id} {problem}")
