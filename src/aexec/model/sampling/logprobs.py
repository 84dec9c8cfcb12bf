"""Log-probabilities of given tokens, and of the likeliest ones, under the model itself.

They are taken from the logits as the model wrote them, before grammar, bias, penalties and
temperature: what the model believed, not what the sampler was allowed to choose from.

Source: the same choice as vLLM 0.25's default, ``logprobs_mode="raw_logprobs"``.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from aexec.messages.request import TokenLogprobs
from aexec.model.sampling.tensors import to_list

__all__ = ("token_logprobs",)


def token_logprobs(logits: Tensor, token_ids: Sequence[int], num_top: int | Sequence[int]) -> list[TokenLogprobs]:
    """One entry per row; for sampled tokens and for the tokens of a prompt alike.

    For a prompt, row ``i`` holds the logits at some position and ``token_ids[i]`` the
    token at the next one.

    Args:
        logits: ``[num_rows, vocab_size]``, any float type; worked on in float32, unchanged.
        token_ids: The token of each row, each below ``vocab_size``.
        num_top: How many of the likeliest tokens to list, for all rows or for each.
    """
    if not token_ids:
        return []
    tops = [num_top] * len(token_ids) if isinstance(num_top, int) else list(num_top)
    with torch.inference_mode():
        return _entries(logits.float(), list(token_ids), [min(top, logits.shape[1]) for top in tops])


def _entries(logits: Tensor, token_ids: list[int], tops: list[int]) -> list[TokenLogprobs]:
    total = logits.logsumexp(1, keepdim=True)
    chosen = logits.gather(1, torch.tensor(token_ids, device=logits.device)[:, None])
    ranks = to_list((logits > chosen).sum(1) + 1)
    own = to_list((chosen - total).squeeze(1))
    best = logits.topk(max(tops), dim=1)
    best_ids, best_logprobs = to_list(best.indices), to_list(best.values - total)
    return [
        TokenLogprobs(
            token_id=token,
            logprob=own[row],
            rank=ranks[row],
            top=dict(zip(best_ids[row][:top], best_logprobs[row], strict=False)),
        )
        for row, (token, top) in enumerate(zip(token_ids, tops, strict=True))
    ]
