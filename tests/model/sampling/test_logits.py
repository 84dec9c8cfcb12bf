"""Masks, penalties and cut-offs are those of transformers, row by row."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from aexec.model.sampling.bitmask import allowed_tokens
from aexec.model.sampling.logits import CutOffs, Entries, add_bias, allow_bits, forbid, penalise, weigh

VOCAB = 700
ROWS = st.lists(
    st.tuples(
        st.floats(0.05, 5.0),  # temperature
        st.one_of(st.sampled_from([-1, 0, 1, 699, 700, 5000]), st.integers(1, VOCAB)),  # top_k
        st.one_of(st.just(1.0), st.floats(0.01, 1.0)),  # top_p
        st.one_of(st.just(0.0), st.floats(0.0, 1.0)),  # min_p
    ),
    min_size=1,
    max_size=6,
)


def random_logits(num_rows: int, seed: int, vocab_size: int = VOCAB) -> Tensor:
    """Normal logits of the spread that a language model has."""
    return torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * 3


def probabilities(logits: Tensor, rows: list[tuple[float, int, float, float]]) -> Tensor:
    """What ``weigh`` makes of a copy of the logits, normalised."""
    temperatures, top_k, top_p, min_p = zip(*rows, strict=True)
    weights = weigh(logits.clone(), logits.amax(1), temperatures, CutOffs(top_k, top_p, min_p))
    return weights / weights.sum(1, keepdim=True)


def by_transformers(logits: Tensor, temperature: float, top_k: int, top_p: float, min_p: float) -> Tensor:
    """One row's distribution, made by transformers' processors in their own order."""
    ids = torch.zeros(1, 1, dtype=torch.int64)
    scores = TemperatureLogitsWarper(temperature)(ids, logits[None])
    if top_k > 0:
        scores = TopKLogitsWarper(top_k)(ids, scores)
    if top_p < 1.0:
        scores = TopPLogitsWarper(top_p)(ids, scores)
    if min_p > 0.0:
        scores = MinPLogitsWarper(min_p)(ids, scores)
    return scores.softmax(1)[0]


@settings(max_examples=60, deadline=None, database=None, derandomize=True)
@given(ROWS, st.integers(0, 2**31))
def test_a_mixed_batch_has_the_distributions_of_transformers(
    rows: list[tuple[float, int, float, float]], seed: int
) -> None:
    """Each row of a batch with every kind of setting is what the processors make of it alone."""
    logits = random_logits(len(rows), seed)
    found = probabilities(logits, rows)
    for row, (temperature, top_k, top_p, min_p) in enumerate(rows):
        expected = by_transformers(logits[row], temperature, top_k, top_p, min_p)
        assert (found[row] - expected).abs().max() < 1e-4


@pytest.mark.parametrize(("top_k", "top_p"), [(0, 0.99), (0, 0.5), (5000, 1.0), (5000, 0.9), (300, 0.999)])
def test_cut_offs_beyond_the_first_candidates_are_exact(top_k: int, top_p: float) -> None:
    """A flat distribution needs thousands of candidates, and keeps just as many as a full sort says."""
    logits = random_logits(3, seed=4, vocab_size=9000) / 10
    found = probabilities(logits, [(1.0, top_k, top_p, 0.0), (1.0, 3, 1.0, 0.0), (1.0, 0, 1.0, 0.0)])
    expected = by_transformers(logits[0], 1.0, top_k, top_p, 0.0)
    assert abs(int((found[0] > 0).sum()) - int((expected > 0).sum())) <= 2  # the sums' last digits
    assert (found[0] - expected).abs().max() < 1e-4
    assert (found[1] > 0).sum() == 3
    assert (found[2] > 0).all()


def test_equals_at_the_level_are_all_kept() -> None:
    """top_k=2 of 5, 4, 4, 1 keeps three: the set does not depend on how equals were sorted."""
    logits = torch.tensor([[4.0, 1.0, 5.0, 4.0]])
    assert (probabilities(logits, [(1.0, 2, 1.0, 0.0)]) > 0).tolist() == [[True, False, True, True]]


@pytest.mark.parametrize("top_k", [1, 3, 300, 999])
def test_top_k_keeps_k_even_when_the_rest_weigh_nothing(top_k: int) -> None:
    """Steep logits lose no token to rounding of the summed weights."""
    logits = -torch.arange(1000.0)[None] / 12
    assert int((probabilities(logits, [(1.0, top_k, 1.0, 0.0)]) > 0).sum()) == top_k


@pytest.mark.parametrize("top_p", [1e-9, 0.3])
def test_the_likeliest_token_is_always_kept(top_p: float) -> None:
    """However small top_p is, one token remains; min_p=1 leaves it too."""
    logits = random_logits(2, seed=8)
    found = probabilities(logits, [(1.0, 0, top_p, 1.0), (1.0, 50, top_p, 1.0)])
    assert found.argmax(1).equal(logits.argmax(1))
    assert (found > 0).sum(1).tolist() == [1, 1]


@pytest.mark.parametrize("temperature", [5e-324, 1e-30, 1e30, 1.7e308])
def test_extreme_temperatures_give_numbers(temperature: float) -> None:
    """Next to zero is greedy, next to infinity is uniform; forbidden tokens stay forbidden."""
    logits = random_logits(1, seed=2)
    logits[0, :10] = -math.inf
    found = probabilities(logits, [(temperature, 0, 1.0, 0.0)])
    expected = torch.zeros(1, VOCAB) if temperature < 1 else torch.full((1, VOCAB), 1 / (VOCAB - 10))
    expected[0, :10] = 0.0
    if temperature < 1:
        expected[0, logits.argmax()] = 1.0
    assert found.allclose(expected, atol=1e-6)


@pytest.mark.parametrize("vocab_size", [31, 32, 33, 100])
def test_a_bitmask_forbids_what_it_does_not_allow(vocab_size: int) -> None:
    """Rows that it names lose the tokens whose bit is 0, all else is untouched."""
    words = -(-vocab_size // 32)
    bitmask = np.random.default_rng(vocab_size).integers(-(2**31), 2**31, (2, words)).astype(np.int32)
    logits = random_logits(4, seed=3, vocab_size=vocab_size)
    expected = logits.clone()
    for row, line in ((3, 0), (1, 1)):
        expected[row, torch.from_numpy(~allowed_tokens(bitmask[line], vocab_size))] = -math.inf
    allow_bits(logits, [3, 1], bitmask)
    assert logits.equal(expected)


@settings(max_examples=40, deadline=None, database=None, derandomize=True)
@given(
    st.lists(st.integers(0, 19), min_size=1, max_size=30),
    st.floats(0.1, 5.0),
    st.floats(-2.0, 2.0),
    st.floats(-2.0, 2.0),
)
def test_penalties_are_those_of_the_field(
    tokens: list[int], repetition: float, presence: float, frequency: float
) -> None:
    """Repetition as in transformers; presence once and frequency per occurrence, as in OpenAI's API."""
    logits = random_logits(1, seed=len(tokens), vocab_size=20)
    expected = RepetitionPenaltyLogitsProcessor(repetition)(torch.tensor([tokens]), logits.clone())
    counts = torch.bincount(torch.tensor(tokens), minlength=20).float()
    expected -= presence * (counts > 0) + frequency * counts
    distinct = torch.tensor(sorted(set(tokens)))
    at = Entries(torch.zeros_like(distinct), distinct)
    same = torch.ones(len(distinct))
    penalise(logits, at, counts[distinct], repetition * same, presence * same, frequency * same)
    assert logits.allclose(expected, atol=1e-5)


def test_bias_and_prohibition_touch_single_entries() -> None:
    """Each entry names its row and its token."""
    logits = torch.zeros(2, 3)
    add_bias(logits, Entries(torch.tensor([0, 1]), torch.tensor([2, 0])), torch.tensor([1.5, -2.0]))
    forbid(logits, Entries(torch.tensor([1]), torch.tensor([1])))
    assert logits.tolist() == [[0.0, 0.0, 1.5], [-2.0, -math.inf, 0.0]]
