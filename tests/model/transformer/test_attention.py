"""Paged attention against attention written out, one token at a time."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from aexec.model.transformer.attention import AttentionState, AttentionStep, attach, paged_attention
from aexec.model.transformer.attention_cuda import VarlenStep
from aexec.model.transformer.inputs import ScheduledTokens, build_inputs
from aexec.model.transformer.kv_cache import KVCache, KVShape

CPU = torch.device("cpu")
BLOCK, DIM = 4, 8


class History:
    """Random keys, values and queries for every position of some requests."""

    def __init__(self, lengths: dict[str, int], num_heads: int, num_kv_heads: int) -> None:
        generator = torch.Generator().manual_seed(3)
        self.lengths = lengths
        self.q = {name: torch.randn(n, num_heads, DIM, generator=generator) for name, n in lengths.items()}
        self.k = {name: torch.randn(n, num_kv_heads, DIM, generator=generator) for name, n in lengths.items()}
        self.v = {name: torch.randn(n, num_kv_heads, DIM, generator=generator) for name, n in lengths.items()}
        free = iter(torch.randperm(39, generator=generator).add(1).tolist())
        self.blocks = {name: np.array([next(free) for _ in range(-(-n // BLOCK))]) for name, n in lengths.items()}
        self.cache = KVCache({7: KVShape(num_kv_heads, DIM)}, 40, BLOCK, torch.float32, CPU)
        self.state = AttentionState()
        self.module: Any = SimpleNamespace()
        attach([(7, self.module)], self.cache, self.state)

    def step(self, spans: dict[str, tuple[int, int]], **settings: Any) -> dict[str, Tensor]:
        """Run these spans through the paged function; outputs [num_tokens, H, D] by request."""
        shares = [
            ScheduledTokens(name, range(self.lengths[name]), self.blocks[name], start, stop)
            for name, (start, stop) in spans.items()
        ]
        inputs = build_inputs(shares, BLOCK)
        self.state.step = AttentionStep.from_inputs(inputs, BLOCK, CPU)
        flat = [
            torch.cat([table[each.request_id][each.start : each.stop] for each in inputs.order]).transpose(0, 1)[None]
            for table in (self.q, self.k, self.v)
        ]
        out, weights = paged_attention(self.module, *flat, None, **settings)
        assert weights is None
        parts = out[0].split([each.num_tokens for each in inputs.order])
        return {each.request_id: part for each, part in zip(inputs.order, parts, strict=True)}

    def expected(self, name: str, place: int, scaling: float, window: int | None, softcap: float | None) -> Tensor:
        first = 0 if window is None else max(0, place + 1 - window)
        repeats = self.q[name].shape[1] // self.k[name].shape[1]
        keys, values = (table[name][first : place + 1].repeat_interleave(repeats, 1) for table in (self.k, self.v))
        scores = torch.einsum("hd,lhd->hl", self.q[name][place], keys) * scaling
        if softcap is not None:
            scores = torch.tanh(scores / softcap) * softcap
        return torch.einsum("hl,lhd->hd", scores.softmax(-1), values)


@pytest.mark.parametrize("num_kv_heads", [4, 2, 1])
@pytest.mark.parametrize(
    ("window", "softcap", "scaling"), [(None, None, None), (5, None, 0.3), (None, 2.0, 0.3), (3, 2.0, None)]
)
def test_each_token_attends_to_its_own_past(num_kv_heads, window, softcap, scaling) -> None:
    """Chunks that start anywhere, decodes of any length, all in one step: as written out token by token."""
    history = History({"a": 22, "b": 9, "c": 30, "d": 13}, 4, num_kv_heads)
    settings = {"sliding_window": window, "softcap": softcap, "scaling": scaling}
    history.step({"a": (0, 14), "b": (0, 8), "d": (0, 12)}, **settings)
    spans = {"a": (14, 22), "b": (8, 9), "c": (0, 30), "d": (12, 13)}
    outputs = history.step(spans, **settings)
    for name, (start, stop) in spans.items():
        wanted = [history.expected(name, place, scaling or DIM**-0.5, window, softcap) for place in range(start, stop)]
        torch.testing.assert_close(outputs[name], torch.stack(wanted), rtol=1e-5, atol=1e-5)


def test_requests_of_very_different_lengths_decode_in_one_step() -> None:
    """Groups by length change who is padded with whom, and no result."""
    lengths = {"long": 140, "short": 3}
    history = History({**lengths}, 2, 1)
    history.step({name: (0, length - 1) for name, length in lengths.items()})
    outputs = history.step({name: (length - 1, length) for name, length in lengths.items()})
    for name, length in lengths.items():
        torch.testing.assert_close(outputs[name][0], history.expected(name, length - 1, DIM**-0.5, None, None))


def test_what_is_masked_does_not_matter_while_it_is_finite() -> None:
    """The null block and the unused end of a block are read, multiplied by zero, and seen by nobody."""
    history = History({"a": 6, "b": 21}, 2, 2)
    history.cache.keys[7].fill_(1e6)
    history.cache.values[7].fill_(1e6)
    history.step({"a": (0, 5), "b": (0, 20)})
    outputs = history.step({"a": (5, 6), "b": (20, 21)})
    torch.testing.assert_close(outputs["a"][0], history.expected("a", 5, DIM**-0.5, None, None))


def test_room_is_kept_from_step_to_step() -> None:
    """The buffer that blocks are gathered in is made once, and again only when a step needs more."""
    history = History({"a": 30}, 2, 2)
    history.step({"a": (0, 28)})
    room = dict(history.state._room)
    history.step({"a": (28, 29)})
    assert all(history.state._room[name] is tensor for name, tensor in room.items())
    assert repr(history.state) == "<AttentionState: 2 calls, 0.0 MiB of room>"


def test_a_step_in_the_terms_of_the_cuda_kernel() -> None:
    """Cumulated query lengths, lengths attended to, padded block tables: int32, in row order."""
    shares = [
        ScheduledTokens("a", range(6), np.array([5, 6]), 0, 6),
        ScheduledTokens("b", range(3), np.array([9]), 2, 3),
    ]
    step = VarlenStep.from_inputs(build_inputs(shares, BLOCK), BLOCK, CPU)
    assert step.query_ends.tolist() == [0, 1, 7]
    assert step.kv_lens.tolist() == [3, 6]
    assert step.block_table.tolist() == [[9, 0], [5, 6]]
    assert (step.max_query_len, step.max_kv_len) == (6, 6)
    assert {tensor.dtype for tensor in (step.query_ends, step.kv_lens, step.block_table)} == {torch.int32}
