"""A model runner without a model: tokens from a hash, no torch.

A token is a function of the runner's seed, the request's seed and all tokens before it:
the same in any batch, after a preemption, in another process and on another platform. It
is mostly printable ASCII, so that a demonstration can be read.

It also is the oracle of scheduler tests: ``aexec.model.dummy.ledger`` checks every batch and
raises ``ProtocolError`` at the first delta that contradicts what was said before.

Grammar, ``min_tokens``, stop ids, the seed and log-probabilities are honoured; temperature,
cut-offs, penalties and ``logit_bias`` have no meaning for it.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from aexec.config import CacheConfig, ModelConfig
from aexec.errors import OutOfMemory, ProtocolError
from aexec.messages.batch import GrammarOutput, ModelRunnerOutput, SchedulerOutput
from aexec.messages.request import TokenLogprobs
from aexec.model.base import ModelInfo
from aexec.model.dummy.distribution import DummyDistribution
from aexec.model.dummy.kv_access import DummyKVAccess
from aexec.model.dummy.ledger import BatchLedger, LedgerEntry, ScheduledSpan
from aexec.model.dummy.settings import DUMMY_EOS_TOKEN_ID, DummySettings, is_dummy
from aexec.model.dummy.store import DummyStore
from aexec.model.memory import peak_host_bytes
from aexec.model.operations import ModelOperations
from aexec.model.sampling.bitmask import allowed_tokens, checked_bitmask, grammar_rows
from aexec.model.sampling.noise import mix64

__all__ = ("DUMMY_EOS_TOKEN_ID", "DummyRunner", "DummySettings", "DummyStatistics", "is_dummy")

_SLOT_BYTES = 8  # the ledger's hash of a token position
_DEFAULT_BLOCKS = 4096
_MOST_LAUNCHED = 64


class DummyStatistics(NamedTuple):
    """What a dummy runner has done and holds.

    Attributes:
        steps: Forward passes.
        tokens: Tokens that were run.
        sampled: Tokens that were sampled.
        live_requests: Requests that it knows now.
        launched: Forward passes that wait to be sampled.
    """

    steps: int
    tokens: int
    sampled: int
    live_requests: int
    launched: int


@dataclass(frozen=True, slots=True)
class _Launched:
    """A forward pass that waits to be sampled: what to say after each complete request."""

    rows: list[_Row]
    prompt_logprobs: dict[str, list[TokenLogprobs]]


class _Row(msgspec.Struct, frozen=True, gc=False):
    entry: LedgerEntry
    position: int
    state: int  # hash of the seeds and of all tokens so far


class DummyRunner:
    """A ``ModelRunner`` without weights, for tests and for benches of all that is around it."""

    def __init__(
        self,
        model: ModelConfig | None = None,
        cache: CacheConfig | None = None,
        settings: DummySettings | None = None,
        *,
        stage: int = 0,
        num_stages: int = 1,
        samples: bool = True,
    ) -> None:
        """A runner for ``model``, by default ``dummy``.

        Args:
            model: Its name holds the settings, as in ``dummy:vocab_size=64``.
            cache: Sizes of the simulated KV cache.
            settings: In place of those that the name holds.
            stage: Its pipeline stage.
            num_stages: Stages of the pipeline; a forward pass takes each an equal share of ``forward_seconds``.
            samples: False: another rank does it.

        Raises:
            ConfigError: The name is not the dummy's, or a setting is wrong.
        """
        model = model or ModelConfig(model="dummy")
        self.settings = settings or DummySettings.parse(model.model)
        self._cache = cache or CacheConfig()
        self._max_model_len = model.max_model_len or self.settings.max_model_len
        self._num_blocks = 0
        self._launched: deque[_Launched] = deque()
        self._failures: deque[BaseException] = deque()
        self._steps = self._tokens = self._sampled = 0
        self._stage, self._num_stages, self._samples = stage, num_stages, samples
        self._store = DummyStore(self.settings, self._make_ledger)
        self.operations = ModelOperations(self._store, self._forget, lambda: len(self._launched))
        self.operations.load_weights()
        self.kv_access = DummyKVAccess(self._store, self.operations.residency, self._cache.block_size)

    def __repr__(self) -> str:
        done = f"{self._steps} steps, {self._tokens} tokens"
        return f"<DummyRunner: vocabulary of {self.settings.vocab_size}, {done}, {len(self._launched)} to sample>"

    @property
    def device(self) -> str:
        """Always ``cpu``."""
        return "cpu"

    def statistics(self) -> DummyStatistics:
        """What it has done and holds."""
        live = len(self._ledger.entries) if self._ledger else 0
        return DummyStatistics(self._steps, self._tokens, self._sampled, live, len(self._launched))

    def fail_next(self, error: BaseException) -> None:
        """Raise ``error`` from the next ``execute_model``, which then does nothing; may be queued."""
        self._failures.append(error)

    def join(self, tensor_group: object) -> None:
        """It has nothing to share."""

    def load_model(self) -> None:
        """There is nothing to load: the seed is in its name."""

    def determine_available_memory(self) -> int:
        """Bytes of the budget, or of 4096 blocks."""
        return self._cache.memory_bytes or _DEFAULT_BLOCKS * self._block_bytes

    def initialize_cache(self, available_bytes: int) -> None:
        """Take ``CacheConfig.num_blocks``, else what the bytes hold.

        Raises:
            OutOfMemory: They do not hold the null block and one other.
        """
        self._num_blocks = self._cache.num_blocks or available_bytes // self._block_bytes
        if self._num_blocks < 2:
            remedy = "raise CacheConfig.memory_bytes, or lower CacheConfig.block_size"
            raise OutOfMemory("the smallest KV cache, two blocks,", 2 * self._block_bytes, available_bytes, remedy)
        self._store.make_cache()
        self.operations.residency.cache_made()

    def _make_ledger(self) -> BatchLedger:
        return BatchLedger(
            num_blocks=self._num_blocks,
            block_size=self._cache.block_size,
            max_model_len=self._max_model_len,
            vocab_size=self.settings.vocab_size,
            samples=self._samples,
        )

    def _forget(self, why: str) -> None:
        """Other weights have other KV; the ledger finds whoever relies on the old."""
        del why
        if self._ledger is not None:
            self._store.make_cache()

    def compile_or_warm_up(self) -> None:
        """There is nothing to warm up."""

    def info(self) -> ModelInfo:
        """Facts about it."""
        return ModelInfo(
            architecture="Dummy",
            vocab_size=self.settings.vocab_size,
            max_model_len=self._max_model_len,
            block_size=self._cache.block_size,
            num_blocks=self._num_blocks,
            block_bytes=self._block_bytes,
            num_parameters=0,
            dtype="none",
            device="cpu",
            peak_memory_bytes=peak_host_bytes(),
            resolves_placeholders=True,
        )

    def execute_model(self, batch: SchedulerOutput) -> None:
        """Check the deltas, block for ``forward_seconds``, keep what there is to sample.

        A batch without tokens only updates the requests, and leaves nothing to sample.

        Raises:
            ProtocolError: The batch contradicts what was said before, or comes too early.
        """
        self.execute_stage(batch)

    def execute_stage(self, batch: SchedulerOutput, incoming: int | None = None) -> int | None:
        """:meth:`execute_model` of one stage; hidden states are a hash of all tokens that the step reads.

        Args:
            batch: The same on every stage.
            incoming: What the stage before returned.

        Raises:
            ProtocolError: The batch contradicts what was said before, or comes too early, or the
                hidden states are those of another step.
        """
        if self._failures:
            raise self._failures.popleft()
        if batch.num_scheduled_tokens:
            self.operations.require_ready("a forward pass")
        if self._ledger is None:
            if self.operations.residency.cache_sleeps:
                return None  # nobody is known whom the batch could tell about
            raise ProtocolError("execute_model came before initialize_cache")
        if len(self._launched) == _MOST_LAUNCHED:
            raise ProtocolError(f"{_MOST_LAUNCHED} forward passes wait for sample_tokens: sample before the next one")
        spans = self._ledger.apply(batch)
        if not spans:
            return None
        self._refuse_crash_token(spans)
        self._check_incoming(spans, incoming)
        if self.settings.forward_seconds:  # sleep(0) would give the core away
            time.sleep(self.settings.forward_seconds / self._num_stages)
        self._steps += 1
        self._tokens += sum(span.end - span.start for span in spans)
        if self._stage < self._num_stages - 1:
            return _hidden(spans, self._stage)
        if self._samples:
            self._launched.append(self._launch(spans))
        return None

    def blank_hidden(self, num_tokens: int) -> int:  # noqa: ARG002 - one word for any number of tokens
        """Zero."""
        return 0

    def sample_tokens(self, grammar: GrammarOutput | None) -> ModelRunnerOutput:
        """Sample the oldest forward pass.

        Raises:
            ProtocolError: None waits to be sampled.
        """
        if not self._launched:
            raise ProtocolError("sample_tokens came and no forward pass waits to be sampled")
        launched = self._launched.popleft()
        tokens, errors, refused = self._sample(launched.rows, grammar)
        self._sampled += len(tokens)
        return ModelRunnerOutput(
            request_ids=list(tokens),
            sampled_token_ids=[[token] for token in tokens.values()],
            logprobs=self._logprobs(launched.rows, tokens),
            prompt_logprobs=launched.prompt_logprobs,
            errors=errors,
            refused=refused,
        )

    @property
    def _ledger(self) -> BatchLedger | None:
        return self._store.ledger

    @property
    def _distribution(self) -> DummyDistribution:
        return self._store.distribution

    @property
    def _block_bytes(self) -> int:
        return self._cache.block_size * _SLOT_BYTES

    def _check_incoming(self, spans: Sequence[ScheduledSpan], incoming: int | None) -> None:
        expected = None if self._stage == 0 else _hidden(spans, self._stage - 1)
        if incoming != expected:
            raise ProtocolError(
                f"stage {self._stage} got the hidden states {incoming}: expected {expected}, those of its own step"
            )

    def _refuse_crash_token(self, spans: Sequence[ScheduledSpan]) -> None:
        crash = self.settings.crash_token_id
        for span in spans:
            if crash >= 0 and crash in span.entry.prompt:
                raise RuntimeError(
                    f"the prompt of {span.entry.request_id} holds token {crash}, which crashes the dummy"
                )

    def _launch(self, spans: Sequence[ScheduledSpan]) -> _Launched:
        rows = [_Row(span.entry, span.end, self._state(span.entry, span.end - 1)) for span in spans if span.is_sampled]
        asked = [span for span in spans if span.entry.sampling.prompt_logprobs is not None]
        found = {span.entry.request_id: self._prompt_logprobs(span) for span in asked}
        return _Launched(rows, {request_id: entries for request_id, entries in found.items() if entries})

    def _state(self, entry: LedgerEntry, place: int) -> int:
        """What decides the token after the one at ``place``."""
        return self._distribution.state(entry.prefix_hashes[place] ^ entry.is_spoiled, entry.sampling)

    def _sample(
        self, rows: Sequence[_Row], grammar: GrammarOutput | None
    ) -> tuple[dict[str, int], dict[str, str], frozenset[str]]:
        """Tokens and errors, by request id, and whose errors are their own."""
        tokens: dict[str, int] = {}
        errors: dict[str, str] = {}
        refused: set[str] = set()
        masks = self._masks(rows, grammar)
        for place, row in enumerate(rows):
            name, poison = row.entry.request_id, self.settings.poison_token_id
            token = self._distribution.choose(row.state, _filter(row, masks.get(place)))
            if poison >= 0 and poison in row.entry.prompt:
                errors[name] = f"the prompt holds token {poison}, which poisons the dummy"
            elif token is None:
                refused.add(name)
                errors[name] = (
                    f"no token may come at position {row.position}: grammar and min_tokens forbid all of them"
                )
            else:
                tokens[name] = token
            row.entry.unheard.append(tokens.get(name, 0))  # after an error any will do
        return tokens, errors, frozenset(refused)

    def _masks(self, rows: Sequence[_Row], grammar: GrammarOutput | None) -> dict[int, NDArray[np.bool_]]:
        """Allowed tokens of the rows that have a grammar."""
        if grammar is None:
            return {}
        size = self.settings.vocab_size
        bitmask = checked_bitmask(grammar, size)
        places = grammar_rows([row.entry.request_id for row in rows], grammar)
        return {place: allowed_tokens(bitmask[line], size) for place, line in places.items()}

    def _logprobs(self, rows: Sequence[_Row], tokens: dict[str, int]) -> list[TokenLogprobs | None] | None:
        if not any(row.entry.sampling.logprobs is not None for row in rows):
            return None
        good = [row for row in rows if row.entry.request_id in tokens]
        return [self._own_logprobs(row, tokens[row.entry.request_id]) for row in good]

    def _own_logprobs(self, row: _Row, token: int) -> TokenLogprobs | None:
        num_top = row.entry.sampling.logprobs
        return None if num_top is None else self._distribution.logprobs(token, row.state, num_top)

    def _prompt_logprobs(self, span: ScheduledSpan) -> list[TokenLogprobs]:
        """For the prompt's tokens that follow those of the span."""
        entry, num_top = span.entry, span.entry.sampling.prompt_logprobs or 0
        places = range(span.start, min(span.end, entry.num_prompt_tokens - 1))
        return [
            self._distribution.logprobs(entry.token_ids[place + 1], self._state(entry, place), num_top)
            for place in places
        ]


def _hidden(spans: Sequence[ScheduledSpan], stage: int) -> int:
    """What a stage makes of a step: other tokens, another order or another stage give another word."""
    word = stage + 1
    for span in spans:
        word = mix64(word ^ span.entry.prefix_hashes[span.end - 1])
    return word


def _filter(row: _Row, allowed: NDArray[np.bool_] | None) -> Callable[[int], bool]:
    """Whether a token may come, by the grammar and by ``min_tokens``."""
    entry = row.entry
    early = row.position - entry.num_prompt_tokens < entry.sampling.min_tokens
    forbidden = frozenset(entry.stop_token_ids if early else ())
    return lambda token: token not in forbidden and (allowed is None or bool(allowed[token]))
