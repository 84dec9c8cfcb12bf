"""Attention over the paged KV cache: the one function that we register with ``transformers``.

Every layer of the model calls :func:`paged_attention` with queries, keys and values of the
step's new tokens only. It stores keys and values at their slots, then lets each token attend
to its own request's positions. What it needs to know of the step is one
:class:`AttentionStep`, made once per forward pass; each attention module holds its runner's
:class:`LayerCache`, so that several runners can live in one process.

On a CPU decodes of about the same length go through one padded call, with the query heads
of a key/value head packed as its queries, and each chunk of a prompt through a call of its
own. CUDA has a file of its own.

Letters: T tokens of the step, B decodes of a group, H query heads, K key/value heads,
D head size, L positions attended to.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from aexec.model.transformer.attention_cuda import VarlenStep, varlen_attention
from aexec.model.transformer.inputs import Chunk, DecodeGroup, StepInputs
from aexec.model.transformer.kv_cache import KVCache

__all__ = ("ATTENTION_NAME", "AttentionState", "AttentionStep", "LayerCache", "attach", "detach", "paged_attention")

ATTENTION_NAME = "aexec_paged"


@dataclass(frozen=True, slots=True)
class _Settings:
    """What a layer wants of its attention."""

    scaling: float | None
    window: int | None
    softcap: float | None


class _Rows(ABC):
    """Neighbouring rows of the step that one call attends for."""

    def __init__(self, start: int, stop: int, block_ids: Tensor) -> None:
        self.start, self.stop, self.block_ids = start, stop, block_ids
        self._masks: dict[tuple[int | None, torch.dtype], Tensor | None] = {}

    def mask(self, window: int | None, dtype: torch.dtype) -> Tensor | None:
        """Added to the scores, 0 or -inf; None when all of it would be 0. Layers share it."""
        if (window, dtype) not in self._masks:
            seen = self.seen(window)
            hidden = None if bool(seen.all()) else ~seen
            self._masks[window, dtype] = (
                None if hidden is None else torch.zeros_like(seen, dtype=dtype).masked_fill_(hidden, float("-inf"))
            )
        return self._masks[window, dtype]

    @abstractmethod
    def seen(self, window: int | None) -> Tensor:
        """Which positions each row attends to."""

    @abstractmethod
    def attend(self, layer: LayerCache, query: Tensor, settings: _Settings) -> Tensor:
        """Take these rows of ``query`` [1, H, T, D] to [rows, H, D]."""


class _Decodes(_Rows):
    """Requests that run one token each."""

    def __init__(self, group: DecodeGroup, device: torch.device) -> None:
        count = len(group.kv_lens)
        super().__init__(
            group.start, group.start + count, torch.as_tensor(group.block_ids.reshape(-1), device=device)
        )  # fmt: skip
        self._kv_lens = torch.as_tensor(group.kv_lens, device=device)
        self._count, self._longest = count, int(group.kv_lens.max())

    def seen(self, window: int | None) -> Tensor:
        """[B, 1, 1, L]."""
        positions, ends = torch.arange(self._longest, device=self._kv_lens.device), self._kv_lens[:, None]
        seen = positions < ends
        if window is not None:
            seen &= positions >= ends - window
        return seen[:, None, None, :]

    def attend(self, layer: LayerCache, query: Tensor, settings: _Settings) -> Tensor:
        num_heads, dim = layer.keys.shape[2:]
        # [B, L, K, D] -> [B, K, L, D]; the H / K query heads of a key/value head become its queries.
        keys, values = (
            blocks.view(self._count, -1, num_heads, dim)[:, : self._longest].transpose(1, 2)
            for blocks in layer.gather(self.block_ids)
        )
        queries = query[0, :, self.start : self.stop].transpose(0, 1).reshape(self._count, num_heads, -1, dim)
        out = _attend(queries, keys, values, self.mask(settings.window, query.dtype), settings)
        return out.reshape(self._count, -1, dim)


class _ChunkRows(_Rows):
    """Several tokens of one request."""

    def __init__(self, chunk: Chunk, device: torch.device) -> None:
        super().__init__(
            chunk.start, chunk.start + chunk.num_tokens, torch.as_tensor(chunk.block_ids, device=device)
        )  # fmt: skip
        self._kv_len = chunk.kv_len

    def seen(self, window: int | None) -> Tensor:
        """[num_tokens, L]."""
        keys = torch.arange(self._kv_len, device=self.block_ids.device)
        queries = keys[self._kv_len - (self.stop - self.start) :, None]
        seen = keys <= queries
        if window is not None:
            seen &= keys > queries - window
        return seen

    def attend(self, layer: LayerCache, query: Tensor, settings: _Settings) -> Tensor:
        keys, values = (
            blocks.flatten(0, 1)[: self._kv_len].transpose(0, 1).unsqueeze(0) for blocks in layer.gather(self.block_ids)
        )
        queries = query[:, :, self.start : self.stop]
        return _attend(queries, keys, values, self.mask(settings.window, query.dtype), settings)[0].transpose(0, 1)


@dataclass(frozen=True, slots=True)
class AttentionStep:
    """One forward pass, as attention sees it.

    Attributes:
        slots: int64 [T].
        rows: Groups of decodes, then chunks; together all rows of the step.
        varlen: The same step for CUDA's kernel; None on a CPU.
    """

    slots: Tensor
    rows: list[_Rows] = field(repr=False)
    varlen: VarlenStep | None = None

    @classmethod
    def from_inputs(cls, inputs: StepInputs, block_size: int, device: torch.device) -> AttentionStep:
        """Move a step to the device."""
        slots = torch.as_tensor(inputs.slots, device=device)
        if device.type == "cuda":
            return cls(slots, [], VarlenStep.from_inputs(inputs, block_size, device))
        decodes = [_Decodes(group, device) for group in inputs.decode_groups]
        return cls(slots, [*decodes, *(_ChunkRows(chunk, device) for chunk in inputs.chunks)])


class AttentionState:
    """What the attention modules of one runner share: the step at hand, and room to gather in.

    Attributes:
        step: The step of the forward pass that runs now.
        num_calls: Calls of the attention function so far.
    """

    def __init__(self) -> None:
        self.step: AttentionStep | None = None
        self.num_calls = 0
        self._room: dict[str, Tensor] = {}

    def __repr__(self) -> str:
        return f"<AttentionState: {self.num_calls} calls, {self.num_bytes / 2**20:,.1f} MiB of room>"

    @property
    def num_bytes(self) -> int:
        """Of the room."""
        return sum(tensor.nbytes for tensor in self._room.values())

    def gather(self, name: str, pool: Tensor, block_ids: Tensor) -> Tensor:
        """Copies of blocks, side by side; valid until the next gather of that name.

        One buffer serves all layers and steps: fresh memory for every layer would cost
        more in page faults than the copying does.
        """
        size = block_ids.shape[0] * pool[0].numel()
        room = self._room.get(name)
        if room is None or room.numel() < size:
            room = self._room[name] = torch.empty(size + size // 2, dtype=pool.dtype, device=pool.device)
        return torch.index_select(pool, 0, block_ids, out=room[:size].view(-1, *pool.shape[1:]))


class LayerCache:
    """One layer's part of the KV cache, held by its attention module.

    Attributes:
        keys: [num_blocks, block_size, K, D].
        values: The same.
        state: Shared with the other layers of the runner.
    """

    def __init__(self, keys: Tensor, values: Tensor, state: AttentionState) -> None:
        self.keys, self.values, self.state = keys, values, state
        self._flat_keys, self._flat_values = keys.flatten(0, 1), values.flatten(0, 1)

    def store(self, slots: Tensor, key: Tensor, value: Tensor) -> None:
        """Put new keys and values, [1, K, T, D], at their slots."""
        self._flat_keys.index_copy_(0, slots, key[0].transpose(0, 1))
        self._flat_values.index_copy_(0, slots, value[0].transpose(0, 1))

    def gather(self, block_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of these blocks, [len(block_ids), block_size, K, D]; valid until the next call."""
        state = self.state
        return state.gather("keys", self.keys, block_ids), state.gather("values", self.values, block_ids)


def attach(modules: Iterable[tuple[int, nn.Module]], cache: KVCache, state: AttentionState) -> None:
    """Give each attention module (by layer index) its part of the cache."""
    for layer, module in modules:
        holder: Any = module
        holder.aexec_layer = LayerCache(cache.keys[layer], cache.values[layer], state)


def detach(modules: Iterable[tuple[int, nn.Module]]) -> None:
    """Take the cache away from attention modules again, so that nothing holds its memory."""
    for _, module in modules:
        vars(module).pop("aexec_layer", None)


def paged_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,  # noqa: ARG001  # transformers passes it by place
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **_ignored: Any,
) -> tuple[Tensor, None]:
    """Store the new keys and values, then attend over the cache.

    Args:
        module: The attention module; :func:`attach` gave it its :class:`LayerCache`.
        query: [1, H, T, D].
        key: [1, K, T, D].
        value: [1, K, T, D].
        attention_mask: None: what a token sees follows from the step.
        scaling: Of the scores; None is ``1 / sqrt(D)``.
        sliding_window: A token sees so many positions, its own included.
        softcap: Bound of the scores, by a hyperbolic tangent.

    Returns:
        [1, T, H, D], and None for the weights.
    """
    layer: LayerCache = module.aexec_layer
    step = layer.state.step
    assert step is not None, "the runner sets the step before each forward pass"
    layer.state.num_calls += 1
    layer.store(step.slots, key, value)
    if step.varlen is not None:
        return varlen_attention(
            query, layer.keys, layer.values, step.varlen, scaling=scaling, window=sliding_window, softcap=softcap
        ), None
    settings = _Settings(scaling, sliding_window, softcap)
    parts = [rows.attend(layer, query, settings) for rows in step.rows]
    return (parts[0] if len(parts) == 1 else torch.cat(parts)).unsqueeze(0), None


def _attend(queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, settings: _Settings) -> Tensor:
    """[.., H or K, Q, D] over [.., K, L, D]."""
    if settings.softcap is None:
        return F.scaled_dot_product_attention(
            queries, keys, values, attn_mask=mask, scale=settings.scaling, enable_gqa=queries.shape[1] != keys.shape[1]
        )
    if queries.shape[1] != keys.shape[1]:
        repeats = queries.shape[1] // keys.shape[1]
        keys, values = keys.repeat_interleave(repeats, 1), values.repeat_interleave(repeats, 1)
    scaling = queries.shape[-1] ** -0.5 if settings.scaling is None else settings.scaling
    scores = torch.tanh(queries @ keys.transpose(-1, -2) * scaling / settings.softcap) * settings.softcap
    if mask is not None:
        scores = scores + mask
    return scores.softmax(-1, dtype=torch.float32).to(queries.dtype) @ values
