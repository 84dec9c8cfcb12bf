"""One rank's model under torch: a ``transformers`` model over our own paged KV cache.

A step is one ragged forward pass over the tokens of all scheduled requests, decodes and
chunks of prompts together. Logits are computed for the rows that need them only, and wait
until ``sample_tokens`` spends them; several steps may wait, first in, first out.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from aexec.config import CacheConfig, ModelConfig
from aexec.errors import ProtocolError, UnsupportedModel
from aexec.messages.batch import GrammarOutput, ModelRunnerOutput, SchedulerOutput
from aexec.messages.request import TokenLogprobs
from aexec.model.base import LoadProgress, ModelInfo
from aexec.model.memory import peak_host_bytes
from aexec.model.operations import ModelOperations
from aexec.model.sampling.logprobs import token_logprobs
from aexec.model.sampling.sampler import Sampler
from aexec.model.sampling.state import SamplingState
from aexec.model.sources.resolve import ModelFiles, resolve_model
from aexec.model.sources.sharded import RankPlace
from aexec.model.transformer.attention import AttentionStep
from aexec.model.transformer.hooks import Stage
from aexec.model.transformer.inputs import ScheduledTokens, StepInputs, build_inputs, prompt_rows
from aexec.model.transformer.kv_access import TorchKVAccess
from aexec.model.transformer.kv_cache import KVCache, blocks_for, budget_for
from aexec.model.transformer.live_requests import LiveRequests
from aexec.model.transformer.loader import LoadedModel, free_bytes, load_model
from aexec.model.transformer.store import TorchStore
from aexec.parallel.tensor import TensorGroup

__all__ = ("TorchRunner", "TorchRunnerStatistics")

_MOST_PENDING = 64
_ANY = [0]  # token


class TorchRunnerStatistics(NamedTuple):
    """What a runner has done and holds.

    Attributes:
        steps: Forward passes.
        tokens: Tokens that were run.
        live_requests: Requests that it knows now.
        pending: Forward passes that wait to be sampled.
    """

    steps: int
    tokens: int
    live_requests: int
    pending: int


class _PromptRows(NamedTuple):
    """Rows of the logits that tell about a prompt, and the prompt's tokens that they tell about."""

    request_id: str
    first: int
    token_ids: list[int]
    num_top: int


@dataclass(frozen=True, slots=True)
class _Pending:
    """A forward pass that waits to be sampled.

    Attributes:
        logits: float32 ``[num_sampled + num_prompt_rows, vocab_size]``.
        sampled: Requests of the first rows.
        prompts: What the rows after them are.
    """

    logits: Tensor
    sampled: list[SamplingState]
    prompts: list[_PromptRows]


class TorchRunner:
    """A ``ModelRunner`` over torch, on a CPU or on CUDA."""

    def __init__(
        self,
        model: ModelConfig,
        cache: CacheConfig,
        *,
        stage: Stage | None = None,
        tp_rank: int = 0,
        tp_size: int = 1,
        samples: bool = True,
        device: str = "cpu",
        num_sharers: int = 0,
        progress: LoadProgress | None = None,
    ) -> None:
        """A runner that has loaded nothing yet.

        Args:
            model: Which model, and how it is held.
            cache: Sizes of the KV cache.
            stage: This rank's share of the layers; None: all.
            tp_rank: Place among the ranks that share each of these layers.
            tp_size: How many they are; with more than one :meth:`join` has to come before :meth:`load_model`.
            samples: False: another rank of the last stage does it, and logits are dropped here.
            device: As in ``cpu`` or ``cuda:0``.
            num_sharers: Ranks that share the memory of this host, itself counted; 0: all ranks of the model.
            progress: Told how far loading has come.
        """
        self._config, self._cache_config, self._progress = model, cache, progress
        self._stage, self._samples = stage or Stage(), samples
        self._tp_rank, self._tp_size = tp_rank, tp_size
        self._tensor_process_group: Any = None
        self._device = torch.device(device)
        self._num_sharers = num_sharers or tp_size * self._stage.size
        place = RankPlace(tp_rank, tp_size, self._stage.rank, self._stage.size)
        self._store = TorchStore(model.model, self._load, cache, self._device, find=self._find, place=place)
        self._sampler: Sampler | None = None
        self._requests = LiveRequests(None if tp_size == 1 else self._tell)
        self._pending: deque[_Pending] = deque()
        self._steps = self._tokens = 0
        self.operations = ModelOperations(self._store, self._requests.forget_all, lambda: len(self._pending))
        self.kv_access = TorchKVAccess(self._store, self.operations.residency, self._requests.filled)

    def __repr__(self) -> str:
        store = self._store
        what = store.model.architecture if store.is_loaded else f"{self._config.model}, not loaded"
        return f"<TorchRunner: {what} on {self._device}, {store.cache!r}, {len(self._pending)} to sample>"

    @property
    def device(self) -> str:
        """Where its tensors are."""
        return str(self._device)

    def statistics(self) -> TorchRunnerStatistics:
        """What it has done and holds."""
        return TorchRunnerStatistics(self._steps, self._tokens, len(self._requests), len(self._pending))

    def join(self, tensor_group: Any) -> None:
        """Take the process group of the ranks that share its layers, to load and run with."""
        self._tensor_process_group = tensor_group

    def load_model(self) -> None:
        """Find the files, convert them if need be, load this rank's weights."""
        self.operations.load_weights()
        self._sampler = Sampler(self._loaded.vocab_size)

    def _find(self, name: str) -> ModelFiles:
        return resolve_model(name, progress=self._progress)

    def _load(self, files: ModelFiles) -> LoadedModel:
        tensor = self._tensor_group() if self._tp_size > 1 else None
        return load_model(
            files, self._config, stage=self._stage, device=self._device, tensor=tensor, progress=self._progress
        )  # fmt: skip

    def determine_available_memory(self) -> int:
        """Bytes that the KV cache of this rank may take; see ``kv_cache.budget_for``.

        On a CPU the ranks of a node share its memory; on CUDA each has a device of its own.
        """
        is_cuda = self._device.type == "cuda"
        sharers = 1 if is_cuda else self._num_sharers
        return budget_for(
            self._cache_config,
            free_bytes(self._device) // sharers,
            self._block_bytes,
            self._loaded.max_model_len,
            is_cuda=is_cuda,
        )

    def initialize_cache(self, available_bytes: int) -> None:
        """Allocate the KV cache: ``CacheConfig.num_blocks``, else what the bytes hold.

        Raises:
            OutOfMemory: There is no room for the null block and one other.
        """
        self._store.make_first_cache(blocks_for(self._cache_config, available_bytes, self._block_bytes))
        self.operations.residency.cache_made()

    @torch.inference_mode()
    def compile_or_warm_up(self) -> None:
        """Run a decode and a chunk in the null block, so that no request pays for first calls.

        Raises:
            UnsupportedModel: The model does not attend through the function that we registered.
        """
        cache, null_block = self._kv, np.zeros(1, dtype=np.int64)
        for count in {1, min(2, self._cache_config.block_size)}:
            share = ScheduledTokens("warm-up", [0] * count, null_block, 0, count)
            before, layers = self._store.attention.num_calls, len(self._loaded.kv_shapes)
            self._forward(build_inputs([share], self._cache_config.block_size), [0], self._blank_incoming(count))
            if self._store.attention.num_calls - before != layers:
                raise UnsupportedModel(f"{self._loaded.architecture} attends in a way of its own, past our KV cache")
        cache.zero(torch.zeros(1, dtype=torch.int64, device=self._device))

    def info(self) -> ModelInfo:
        """Facts about the model."""
        model = self._loaded
        on_cuda = self._device.type == "cuda"
        return ModelInfo(
            architecture=model.architecture,
            vocab_size=model.vocab_size,
            max_model_len=model.max_model_len,
            block_size=self._cache_config.block_size,
            num_blocks=self._store.num_blocks,
            block_bytes=self._block_bytes,
            num_parameters=model.num_parameters,
            dtype=str(model.dtype).removeprefix("torch."),
            device=str(self._device),
            peak_memory_bytes=torch.cuda.max_memory_allocated(self._device) if on_cuda else peak_host_bytes(),
            resolves_placeholders=True,
        )

    def execute_model(self, batch: SchedulerOutput) -> None:
        """Apply the deltas of ``batch``, run the forward pass, keep the logits.

        A batch without tokens only updates the requests, and leaves nothing to sample.

        Raises:
            ProtocolError: The batch contradicts what was said before, or comes too early.
        """
        self.execute_stage(batch)

    @torch.inference_mode()
    def execute_stage(self, batch: SchedulerOutput, incoming: Tensor | None = None) -> Tensor | None:
        """:meth:`execute_model` of one pipeline stage.

        Args:
            batch: The same on every stage.
            incoming: Hidden states ``[1, num_tokens, hidden_size]`` of the stage before; None
                on the first.

        Returns:
            Hidden states for the next stage; None on the last one, which keeps the logits.
        """
        if len(self._pending) == _MOST_PENDING:
            raise ProtocolError(f"{_MOST_PENDING} forward passes wait for sample_tokens: sample before the next one")
        if batch.num_scheduled_tokens:
            self.operations.require_ready("a forward pass")
        if fresh := self._requests.apply(batch, self._cache_config.block_size):
            self._kv.zero(torch.tensor(fresh, device=self._device))
        shares = self._requests.shares(batch.num_scheduled_tokens)
        if not shares:
            return None
        inputs = build_inputs(shares, self._cache_config.block_size)
        sampled, prompts, rows = self._wanted(inputs)
        out = self._forward(inputs, rows, incoming)
        self._steps += 1
        self._tokens += len(inputs.token_ids)
        if not self._stage.is_last:
            return out
        if self._samples:
            self._pending.append(_Pending(out, sampled, prompts))
        return None

    @torch.inference_mode()
    def sample_tokens(self, grammar: GrammarOutput | None) -> ModelRunnerOutput:
        """Sample the oldest forward pass that was not sampled yet.

        Raises:
            ProtocolError: None waits to be sampled.
        """
        if not self._pending or self._sampler is None:
            raise ProtocolError("sample_tokens came and no forward pass waits to be sampled")
        pending = self._pending.popleft()
        found = _prompt_logprobs(pending)
        output = self._sampler.sample(pending.logits[: len(pending.sampled)], pending.sampled, grammar)
        _remember(pending.sampled, output)
        if not found:
            return output
        return ModelRunnerOutput(
            request_ids=output.request_ids,
            sampled_token_ids=output.sampled_token_ids,
            logprobs=output.logprobs,
            prompt_logprobs=found,
            errors=output.errors,
            refused=output.refused,
        )

    def blank_hidden(self, num_tokens: int) -> Tensor:
        """Zeros ``[1, num_tokens, hidden_size]`` in the model's dtype: the shape of what passes between stages."""
        size = self._loaded.module.config.get_text_config().hidden_size
        return torch.zeros((1, num_tokens, size), dtype=self._loaded.dtype, device=self._device)

    @property
    def _loaded(self) -> LoadedModel:
        return self._store.model

    @property
    def _kv(self) -> KVCache:
        if self._store.cache is None:
            raise ProtocolError("the model runner was used before initialize_cache")
        return self._store.cache

    @property
    def _block_bytes(self) -> int:
        model = self._loaded
        position = sum(shape.bytes_per_position(model.dtype) for shape in model.kv_shapes.values())
        return position * self._cache_config.block_size

    def _wanted(self, inputs: StepInputs) -> tuple[list[SamplingState], list[_PromptRows], list[int]]:
        """Who is sampled, what is asked about prompts, and the rows of the step that both need."""
        sampled: list[SamplingState] = []
        prompts: list[_PromptRows] = []
        rows: list[int] = []
        more_rows: list[int] = []
        for share, last_row in zip(inputs.order, inputs.last_rows, strict=True):
            state = self._requests[share.request_id].sampling
            if share.is_sampled:
                sampled.append(state)
                rows.append(last_row)
            if state.params.prompt_logprobs is not None:
                its_rows, tokens = prompt_rows(share, state.num_prompt_tokens, last_row + 1 - share.num_tokens)
                prompts.append(_PromptRows(share.request_id, len(more_rows), tokens, state.params.prompt_logprobs))
                more_rows += its_rows
        return sampled, prompts, rows + more_rows

    def _forward(self, inputs: StepInputs, rows: list[int], incoming: Tensor | None) -> Tensor:
        """Logits float32 ``[len(rows), vocab_size]`` on the last stage, else hidden states."""
        module: Any = self._loaded.module
        self._store.attention.step = AttentionStep.from_inputs(inputs, self._cache_config.block_size, self._device)
        self._stage.incoming = incoming
        arguments: dict[str, Any] = {
            "position_ids": torch.as_tensor(inputs.positions, device=self._device)[None],
            "use_cache": False,
        }
        if incoming is None:
            arguments["input_ids"] = torch.as_tensor(inputs.token_ids, device=self._device)[None]
        else:
            arguments["inputs_embeds"] = incoming
        if not rows or not self._stage.is_last:
            hidden: Tensor = module.base_model(**arguments).last_hidden_state
            return hidden if not self._stage.is_last else hidden.new_empty((0, self._loaded.vocab_size))
        keep = torch.tensor(rows, device=self._device)
        logits: Tensor = module(**arguments, logits_to_keep=keep).logits
        return logits[0].float()

    def _tell(self, sampled: list[int | None]) -> list[int]:
        """The tokens of the group's first rank, which samples, on all its ranks."""
        return self._tensor_group().told_by_first([token or 0 for token in sampled])

    def _tensor_group(self) -> TensorGroup:
        own_rank = self._stage.rank * self._tp_size + self._tp_rank
        return TensorGroup.checked(self._tensor_process_group, self._tp_rank, self._tp_size, own_rank)

    def _blank_incoming(self, num_tokens: int) -> Tensor | None:
        return None if self._stage.is_first else self.blank_hidden(num_tokens)


def _remember(states: list[SamplingState], output: ModelRunnerOutput) -> None:
    """What was sampled, for a step that goes on with it before the scheduler tells it."""
    tokens = dict(zip(output.request_ids, output.sampled_token_ids, strict=True))
    for state in states:
        state.sampled = tokens.get(state.request_id, _ANY)[-1]


def _prompt_logprobs(pending: _Pending) -> dict[str, list[TokenLogprobs]]:
    """Before sampling, which overwrites the logits."""
    found: dict[str, list[TokenLogprobs]] = {}
    for prompt in pending.prompts:
        first = len(pending.sampled) + prompt.first
        rows = pending.logits[first : first + len(prompt.token_ids)]
        if prompt.token_ids:
            found[prompt.request_id] = token_logprobs(rows, prompt.token_ids, prompt.num_top)
    return found
