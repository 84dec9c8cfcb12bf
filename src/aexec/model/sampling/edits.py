"""Which logits of a batch are changed before the temperature, and for whom.

This is the host's half: it walks the requests, collects single (row, token) entries as
numpy columns, and hands them to ``aexec.model.sampling.logits``, which does the arithmetic on the
device for all rows at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from aexec.messages.batch import GrammarOutput
from aexec.model.sampling.bitmask import checked_bitmask, grammar_rows
from aexec.model.sampling.logits import Entries, add_bias, allow_bits, forbid, penalise
from aexec.model.sampling.state import SamplingState

__all__ = ("edit_logits",)

Rows = list[tuple[int, SamplingState]]


def edit_logits(logits: Tensor, states: Sequence[SamplingState], grammar: GrammarOutput | None) -> bool:
    """Apply grammar, ``logit_bias``, ``min_tokens`` and penalties in place; False: nobody asked.

    Raises:
        ProtocolError: The bitmask does not fit the vocabulary or its request ids.
    """
    masked = _apply_grammar(logits, states, grammar)
    rows = [(row, state) for row, state in enumerate(states) if state.has_edits]
    _apply_bias(logits, [(row, state) for row, state in rows if state.params.logit_bias])
    _apply_min_tokens(logits, [(row, state) for row, state in rows if state.forbidden_token_ids])
    _apply_penalties(logits, [(row, state) for row, state in rows if state.has_penalties])
    return masked or bool(rows)


def _apply_grammar(logits: Tensor, states: Sequence[SamplingState], grammar: GrammarOutput | None) -> bool:
    if grammar is None:
        return False
    bitmask = checked_bitmask(grammar, logits.shape[1])
    rows = grammar_rows([state.request_id for state in states], grammar)
    if not rows:
        return False
    allow_bits(logits, list(rows), bitmask[list(rows.values())])
    return True


def _apply_bias(logits: Tensor, rows: Rows) -> None:
    if rows:
        at, inside = _entries(logits, rows, lambda state: state.bias()[0])
        add_bias(logits, at, _column(logits, [state.bias()[1] for _, state in rows], inside))


def _apply_min_tokens(logits: Tensor, rows: Rows) -> None:
    if rows:
        at, _ = _entries(logits, rows, lambda state: np.array(state.forbidden_token_ids, dtype=np.int64))
        forbid(logits, at)


def _apply_penalties(logits: Tensor, rows: Rows) -> None:
    if not rows:
        return
    at, inside = _entries(logits, rows, lambda state: state.counts().ids)
    counts = _column(logits, [state.counts().counts for _, state in rows], inside)
    sizes = [len(state.counts().ids) for _, state in rows]

    def each(name: str) -> Tensor:
        values = np.array([getattr(state.params, name) for _, state in rows], dtype=np.float64)
        with np.errstate(over="ignore"):  # infinity is found in the logits, and fails that request alone
            return _column(logits, [values.astype(np.float32).repeat(sizes)], inside)

    penalise(logits, at, counts, each("repetition_penalty"), each("presence_penalty"), each("frequency_penalty"))


def _entries(
    logits: Tensor, rows: Rows, ids_of: Callable[[SamplingState], NDArray[np.int64]]
) -> tuple[Entries, NDArray[np.bool_]]:
    """Entries of several rows on the device, and which of them lie inside the vocabulary."""
    parts = [ids_of(state) for _, state in rows]
    tokens = np.concatenate(parts)
    owners = np.array([row for row, _ in rows], dtype=np.int64).repeat([len(part) for part in parts])
    inside = (tokens >= 0) & (tokens < logits.shape[1])
    device = logits.device
    at = Entries(torch.as_tensor(owners[inside], device=device), torch.as_tensor(tokens[inside], device=device))
    return at, inside


def _column(logits: Tensor, parts: list[NDArray[np.float32]], inside: NDArray[np.bool_]) -> Tensor:
    return torch.as_tensor(np.concatenate(parts)[inside], device=logits.device)
