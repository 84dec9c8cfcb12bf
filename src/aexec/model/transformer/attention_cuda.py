"""Attention over the paged KV cache on CUDA: torch's own variable-length kernel.

Not exercised by our tests: no machine of this project's CI has a GPU. It is kept to one
call, so that there is little to be wrong.

Source: torch 2.13, ``torch/nn/attention/varlen.py``; the kernel takes float16 and bfloat16,
and a key/value layout of ``[blocks, block_size, heads, head_dim]``, which is ours.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from aexec.errors import UnsupportedModel
from aexec.model.transformer.inputs import StepInputs, padded_tables

__all__ = ("VarlenStep", "varlen_attention")


@dataclass(frozen=True, slots=True)
class VarlenStep:
    """A step in the terms of the kernel; R requests.

    Attributes:
        query_ends: int32 [R + 1], cumulated numbers of tokens, from 0.
        kv_lens: int32 [R].
        block_table: int32 [R, width], padded with the null block.
        max_query_len: The most tokens of one request.
        max_kv_len: The most positions attended to.
    """

    query_ends: Tensor
    kv_lens: Tensor
    block_table: Tensor
    max_query_len: int
    max_kv_len: int

    @classmethod
    def from_inputs(cls, inputs: StepInputs, block_size: int, device: torch.device) -> VarlenStep:
        """Move a step to the device."""
        num_tokens = [share.num_tokens for share in inputs.order]
        kv_lens = [share.stop for share in inputs.order]
        table = padded_tables([share.block_table(block_size) for share in inputs.order])
        return cls(
            query_ends=torch.tensor([*accumulate(num_tokens, initial=0)], dtype=torch.int32, device=device),
            kv_lens=torch.tensor(kv_lens, dtype=torch.int32, device=device),
            block_table=torch.as_tensor(table, dtype=torch.int32, device=device),
            max_query_len=max(num_tokens),
            max_kv_len=max(kv_lens),
        )


def varlen_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    step: VarlenStep,
    *,
    scaling: float | None,
    window: int | None,
    softcap: float | None,
) -> Tensor:
    """``[1, H, T, D]`` queries over a layer's cache: ``[1, T, H, D]``.

    Raises:
        UnsupportedModel: The kernel has no soft cap.
    """
    from torch.nn.attention.varlen import varlen_attn

    if softcap is not None:
        raise UnsupportedModel("attention with a soft cap (Gemma 2) runs on a CPU only: expected device='cpu'")
    out = varlen_attn(
        query[0].transpose(0, 1),
        keys,
        values,
        step.query_ends,
        None,
        step.max_query_len,
        step.max_kv_len,
        scale=scaling,
        window_size=(-1, 0) if window is None else (window - 1, 0),
        enable_gqa=query.shape[1] != keys.shape[2],
        seqused_k=step.kv_lens,
        block_table=step.block_table,
    )
    assert isinstance(out, Tensor), "without return_aux it is the output alone"
    return out.unsqueeze(0)
