"""From the logits of a step to its tokens.

The order is fixed: grammar bitmask; ``logit_bias``, ``min_tokens``, penalties; temperature;
top-k; top-p; min-p; choice. A greedy request takes the likeliest token after the first two,
the lowest id among equals. A batch of greedy requests without extras costs one ``argmax``,
and everything else is done for the rows that ask for it.

A sampled token depends on its request's seed, on its position and on its logits: see
``aexec.model.sampling.race`` for how, and for what that promises on which device.

A request whose logits are not numbers, or to whom nothing is left to choose, gets an error
text in place of a token; the others do not notice.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from aexec.errors import ProtocolError
from aexec.messages.batch import GrammarOutput, ModelRunnerOutput
from aexec.messages.request import TokenLogprobs
from aexec.model.sampling.bitmask import grammar_rows
from aexec.model.sampling.edits import edit_logits
from aexec.model.sampling.logits import CutOffs, weigh
from aexec.model.sampling.logprobs import token_logprobs
from aexec.model.sampling.race import choose
from aexec.model.sampling.state import SamplingState
from aexec.model.sampling.tensors import to_list

__all__ = ("Sampler", "SamplerStatistics")


class SamplerStatistics(NamedTuple):
    """What a sampler has done so far, counted in rows.

    Attributes:
        greedy: Rows that took the likeliest token.
        sampled: Rows that drew one.
        failed: Rows that got an error text, of either kind.
    """

    greedy: int
    sampled: int
    failed: int


class Sampler:
    """Samples the requests of one step; keeps nothing of them from step to step."""

    def __init__(self, vocab_size: int) -> None:
        """``vocab_size`` is the width of the logits."""
        self._vocab_size = vocab_size
        self._greedy = self._sampled = self._failed = 0

    def __repr__(self) -> str:
        counts = f"{self._greedy} greedy, {self._sampled} sampled, {self._failed} failed rows"
        return f"<Sampler: vocabulary of {self._vocab_size}, {counts}>"

    def statistics(self) -> SamplerStatistics:
        """Rows so far."""
        return SamplerStatistics(self._greedy, self._sampled, self._failed)

    def sample(
        self, logits: Tensor, states: Sequence[SamplingState], grammar: GrammarOutput | None = None
    ) -> ModelRunnerOutput:
        """Choose one token for each request, or say why it cannot have one.

        Args:
            logits: float32 ``[len(states), vocab_size]``, on any device. **Overwritten**: it
                is the largest tensor of a step, and a copy would cost more than sampling.
            states: The requests, one per row, in batch order. They are not changed but for
                what they cache; appending the token is the runner's part.
            grammar: Bitmask rows of some requests; those for others are passed over.

        Returns:
            Tokens, log-probabilities where asked for, and errors by request id.

        Raises:
            ProtocolError: The shapes do not fit each other.
        """
        if not states:
            return ModelRunnerOutput()
        self._check(logits, states)
        with torch.inference_mode():
            asking = [row for row, state in enumerate(states) if state.params.logprobs is not None]
            kept = logits[asking] if asking else None
            tokens, raw_peaks, peaks = _tokens(logits, states, grammar)
            problems = _problems(raw_peaks, peaks, states, grammar, self._vocab_size)
            logprobs = None if kept is None else _logprobs(kept, asking, tokens, states)
        self._count(states, problems)
        return _output(states, tokens, logprobs, problems, raw_peaks)

    def _check(self, logits: Tensor, states: Sequence[SamplingState]) -> None:
        expected = (len(states), self._vocab_size)
        if tuple(logits.shape) != expected or logits.dtype != torch.float32:
            raise ProtocolError(f"logits are {logits.dtype} {list(logits.shape)}: expected float32 {list(expected)}")

    def _count(self, states: Sequence[SamplingState], problems: dict[int, str]) -> None:
        greedy = sum(state.params.is_greedy for state in states)
        self._greedy += greedy
        self._sampled += len(states) - greedy
        self._failed += len(problems)


def _tokens(
    logits: Tensor, states: Sequence[SamplingState], grammar: GrammarOutput | None
) -> tuple[list[int], list[float], list[float]]:
    """Tokens, and each row's greatest logit before and after the edits.

    The greatest logit tells all that can be wrong with a row: NaN wins over any number,
    and ``-inf`` is greatest only where nothing else is left.
    """
    sampled = [row for row, state in enumerate(states) if not state.params.is_greedy]
    edits = grammar is not None or any(state.has_edits for state in states)
    if not sampled and not edits:
        likeliest = logits.argmax(1)
        greatest = to_list(logits.gather(1, likeliest[:, None]).squeeze(1))
        return to_list(likeliest), greatest, greatest
    raw_peaks = logits.amax(1)
    peaks = logits.amax(1) if edit_logits(logits, states, grammar) else raw_peaks
    tokens = _choices(logits, peaks, states, sampled)
    return to_list(tokens), to_list(raw_peaks), to_list(peaks)


def _choices(logits: Tensor, peaks: Tensor, states: Sequence[SamplingState], sampled: list[int]) -> Tensor:
    if not sampled:
        return logits.argmax(1)
    if len(sampled) == len(states):
        return _draw(logits, peaks, states)
    tokens = torch.empty(len(states), dtype=torch.int64, device=logits.device)
    greedy = [row for row, state in enumerate(states) if state.params.is_greedy]
    tokens[greedy] = logits[greedy].argmax(1)
    if sampled:
        tokens[sampled] = _draw(logits[sampled], peaks[sampled], [states[row] for row in sampled])
    return tokens


def _draw(logits: Tensor, peaks: Tensor, states: Sequence[SamplingState]) -> Tensor:
    """Temperature, cut-offs and choice, for rows that all sample; overwrites the logits."""
    weights = weigh(logits, peaks, [state.params.temperature for state in states], _cut_offs(states))
    return choose(weights, [state.params.seed or 0 for state in states], [state.position for state in states])


def _cut_offs(states: Sequence[SamplingState]) -> CutOffs:
    every = [state.params for state in states]
    return CutOffs([each.top_k for each in every], [each.top_p for each in every], [each.min_p for each in every])


def _problems(
    raw_peaks: list[float],
    peaks: list[float],
    states: Sequence[SamplingState],
    grammar: GrammarOutput | None,
    vocab_size: int,
) -> dict[int, str]:
    """Row to what is wrong with it."""
    found: dict[int, str] = {}
    masked = grammar_rows([state.request_id for state in states], grammar)
    for row, (raw, peak, state) in enumerate(zip(raw_peaks, peaks, states, strict=True)):
        outside = [token for token in state.params.logit_bias if not 0 <= token < vocab_size]
        if not math.isfinite(raw):
            found[row] = _broken_model(raw, state)
        elif outside:
            found[row] = f"logit_bias names token {outside[0]}: expected ids from 0 to {vocab_size - 1}"
        elif not math.isfinite(peak):
            found[row] = _broken_request(peak, state, masked=row in masked)
    return found


def _broken_model(peak: float, state: SamplingState) -> str:
    what = "hold NaN" if math.isnan(peak) else "hold +inf" if peak > 0 else "are -inf for every token"
    return (
        f"the model's logits {what} at position {state.position}: its weights are damaged, "
        "or its dtype overflows (try float32 or bfloat16)"
    )


def _broken_request(peak: float, state: SamplingState, *, masked: bool) -> str:
    params = state.params
    if peak != -math.inf:
        return f"repetition_penalty {params.repetition_penalty:g} makes logits that are not finite at position {state.position}"
    causes = ["the grammar"] * masked + [f"min_tokens {params.min_tokens}"] * bool(state.forbidden_token_ids)
    causes = causes or [f"repetition_penalty {params.repetition_penalty:g}"]
    verb = "forbids" if len(causes) == 1 else "forbid"
    return f"no token may come at position {state.position}: {' and '.join(causes)} {verb} all of them"


def _logprobs(
    kept: Tensor, asking: list[int], tokens: list[int], states: Sequence[SamplingState]
) -> dict[int, TokenLogprobs]:
    entries = token_logprobs(
        kept, [tokens[row] for row in asking], [states[row].params.logprobs or 0 for row in asking]
    )
    return dict(zip(asking, entries, strict=True))


def _output(
    states: Sequence[SamplingState],
    tokens: list[int],
    logprobs: dict[int, TokenLogprobs] | None,
    problems: dict[int, str],
    raw_peaks: list[float],
) -> ModelRunnerOutput:
    good = [row for row in range(len(states)) if row not in problems]
    return ModelRunnerOutput(
        request_ids=[states[row].request_id for row in good],
        sampled_token_ids=[[tokens[row]] for row in good],
        logprobs=None if logprobs is None else [logprobs.get(row) for row in good],
        errors={states[row].request_id: text for row, text in problems.items()},
        refused=frozenset(states[row].request_id for row in problems if math.isfinite(raw_peaks[row])),
    )
