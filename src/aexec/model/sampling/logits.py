"""What is done to logits before a token is chosen: masks, biases, penalties, cut-offs.

Each function takes the whole batch and touches only the rows, or the single entries, that
ask for it. Logits are float32 ``[num_rows, vocab_size]`` on any device and are changed in
place; an entry of ``-inf`` is a token that cannot be chosen.

Meanings are those of vLLM and ``transformers``. A cut-off (top-k, top-p, min-p) is a
*level*: tokens that are exactly as likely as the last one kept are kept as well, so that
the set depends on the logits and never on the order in which equal ones were sorted.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

__all__ = ("CutOffs", "Entries", "add_bias", "allow_bits", "cut_off_levels", "forbid", "penalise", "weigh")

# Candidates that are sorted at first, at most; rows that need more get 16 times as many, and so on.
_HEAD = 256

# Divisors outside of this range would make infinities or NaN of finite float32 logits;
# both ends are greedy, and uniform, to within float32.
_LEAST_TEMPERATURE, _MOST_TEMPERATURE = 1e-6, 1e30


class Entries(NamedTuple):
    """Single entries of the logits, as columns of equal length.

    Attributes:
        rows: int64, their rows.
        tokens: int64, their tokens; no (row, token) comes twice.
    """

    rows: Tensor
    tokens: Tensor


class CutOffs(NamedTuple):
    """How each row is cut, as columns of length ``num_rows``.

    Attributes:
        top_k: 0 or -1 keeps all.
        top_p: 1 keeps all.
        min_p: 0 keeps all.
    """

    top_k: Sequence[int]
    top_p: Sequence[float]
    min_p: Sequence[float]


def allow_bits(logits: Tensor, rows: Sequence[int], bitmask: NDArray[np.int32]) -> None:
    """Forbid what a grammar does not allow.

    Args:
        logits: float32 ``[num_rows, vocab_size]``.
        rows: The row of the logits for each row of the bitmask.
        bitmask: int32 ``[len(rows), ceil(vocab_size / 32)]``; bit ``t % 32`` of word
            ``t // 32`` allows token ``t``; bits past the vocabulary mean nothing.
    """
    octets = torch.as_tensor(np.ascontiguousarray(bitmask).astype("<i4").view(np.uint8), device=logits.device)
    # An octet at a time by a table, and added: several times as fast as a mask of Booleans.
    added = functional.embedding(octets.int(), _octet_table(logits.device)).flatten(1)[:, : logits.shape[1]]
    logits.index_add_(0, torch.tensor(rows, device=logits.device), added)


@functools.cache
def _octet_table(device: torch.device) -> Tensor:
    """For each octet what its bits add to eight logits: nothing, or minus infinity; float32 ``[256, 8]``."""
    bits = np.arange(256)[:, None] >> np.arange(8) & 1
    return torch.as_tensor(np.where(bits, np.float32(0), np.float32(-np.inf)), device=device)


def add_bias(logits: Tensor, at: Entries, bias: Tensor) -> None:
    """Add ``bias`` (float32, one per entry)."""
    logits[at.rows, at.tokens] += bias


def forbid(logits: Tensor, at: Entries) -> None:
    """Let these tokens not be chosen."""
    logits[at.rows, at.tokens] = -math.inf


def penalise(
    logits: Tensor, at: Entries, counts: Tensor, repetition: Tensor, presence: Tensor, frequency: Tensor
) -> None:
    """Make tokens that were there before less likely (or more, with values the other way).

    Args:
        logits: float32 ``[num_rows, vocab_size]``.
        at: Every distinct token of prompt and output.
        counts: float32, how often the output holds it; 0 when the prompt alone does.
        repetition: float32, per entry: divides a positive logit and multiplies a negative one.
        presence: float32, per entry: taken once if the output holds the token.
        frequency: float32, per entry: taken for each time that it does.
    """
    old = logits[at.rows, at.tokens]
    new = torch.where(old > 0, old / repetition, old * repetition)
    logits[at.rows, at.tokens] = new - presence * (counts > 0) - frequency * counts


def weigh(logits: Tensor, peaks: Tensor, temperatures: Sequence[float], cuts: CutOffs) -> Tensor:
    """What each token weighs in the choice: its probability but for a factor of the row.

    Args:
        logits: float32 ``[num_rows, vocab_size]``; overwritten, and what is returned.
        peaks: float32 ``[num_rows]``, the greatest of each row.
        temperatures: One per row, above zero.
        cuts: One entry per row.

    Returns:
        float32 ``[num_rows, vocab_size]``: 1 for the likeliest token, 0 for what is cut off.
    """
    divisors = [min(max(temperature, _LEAST_TEMPERATURE), _MOST_TEMPERATURE) for temperature in temperatures]
    scores = logits.sub_(peaks[:, None]).div_(torch.tensor(divisors, device=logits.device)[:, None])
    levels = cut_off_levels(scores, cuts)
    if levels is not None:
        scores.masked_fill_(scores < levels, -math.inf)
    return scores.exp_()


def cut_off_levels(scores: Tensor, cuts: CutOffs) -> Tensor | None:
    """The least score that each row keeps: top-k, then top-p of what is left, then min-p.

    Args:
        scores: float32 ``[num_rows, vocab_size]``, divided by the temperature, the
            greatest of each row at 0.
        cuts: One entry per row.

    Returns:
        float32 ``[num_rows, 1]``; None when no row is cut.
    """
    vocab_size = scores.shape[1]
    limits = [k if 0 < k < vocab_size else vocab_size for k in cuts.top_k]
    ranked = [row for row, limit in enumerate(limits) if limit < vocab_size or cuts.top_p[row] < 1.0]
    if not ranked and not any(cuts.min_p):
        return None
    floors = [math.log(share) if share else -math.inf for share in cuts.min_p]
    levels = torch.tensor(floors, device=scores.device)
    if ranked:
        rows = torch.tensor(ranked, device=scores.device)
        limit = torch.tensor([limits[row] for row in ranked], device=scores.device)
        share = torch.tensor([cuts.top_p[row] for row in ranked], device=scores.device)
        whole = len(ranked) == len(limits)
        head = min(_HEAD, max(limits[row] for row in ranked))
        found = _ranked_levels(scores if whole else scores.index_select(0, rows), limit, share, head)
        levels.index_copy_(0, rows, torch.maximum(levels.index_select(0, rows), found))
    return levels[:, None]


def _ranked_levels(scores: Tensor, limit: Tensor, share: Tensor, size: int) -> Tensor:
    """The level of each row by top-k (``limit``), then top-p (``share``), from its ``size`` likeliest tokens."""
    vocab_size = scores.shape[1]
    size = min(size, vocab_size)
    head = scores.topk(size, dim=1).values
    places = torch.arange(size, device=scores.device)
    weights = head.exp().masked_fill_(places >= limit[:, None], 0.0)
    endless = limit == vocab_size
    total = torch.where(endless, _total_weight(scores, endless), weights.sum(1))
    goal = torch.where(share < 1.0, share * total, math.inf)[:, None]
    through = weights.cumsum(1)
    kept = ((through - weights < goal) & (places < limit[:, None])).sum(1, keepdim=True)
    levels = head.gather(1, (kept - 1).clamp_(min=0)).squeeze(1)
    short = (limit > size) & ~(endless & (through[:, -1:] >= goal).squeeze(1))
    if size < vocab_size and bool(short.any()):
        rows = short.nonzero().squeeze(1)
        more = _ranked_levels(scores.index_select(0, rows), limit[rows], share[rows], size * 16)
        levels.index_copy_(0, rows, more)
    return levels


def _total_weight(scores: Tensor, wanted: Tensor) -> Tensor:
    """Sum of ``exp(score)`` over each wanted row; 0 for the others."""
    total = torch.zeros(len(scores), device=scores.device)
    rows = wanted.nonzero().squeeze(1)
    return total.index_copy_(0, rows, scores.index_select(0, rows).exp_().sum(1))
