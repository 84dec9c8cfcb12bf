"""Log-probabilities are those of the model's own distribution."""

from __future__ import annotations

import pytest
import torch

from aexec.model.sampling.logprobs import token_logprobs


@pytest.fixture
def logits() -> torch.Tensor:
    """Four rows of 50 logits, no two alike."""
    return torch.randn(4, 50, generator=torch.Generator().manual_seed(1)) * 3


def test_logprobs_are_those_of_log_softmax(logits: torch.Tensor) -> None:
    """Own and top values agree with torch, ranks with a sort, the best comes first."""
    expected = logits.log_softmax(1)
    for row, entry in enumerate(token_logprobs(logits, [3, 14, 15, 9], 5)):
        order = expected[row].argsort(descending=True).tolist()
        assert entry.logprob == pytest.approx(expected[row, entry.token_id].item(), abs=1e-5)
        assert entry.rank == order.index(entry.token_id) + 1
        assert list(entry.top) == order[:5]
        assert list(entry.top.values()) == pytest.approx(expected[row, order[:5]].tolist(), abs=1e-5)


def test_each_row_gets_as_many_as_it_asked_for(logits: torch.Tensor) -> None:
    """0 lists none, and no row lists more than the vocabulary holds."""
    entries = token_logprobs(logits, [0, 1, 2, 3], [0, 1, 50, 200])
    assert [len(entry.top) for entry in entries] == [0, 1, 50, 50]


def test_nobody_asks_for_anything() -> None:
    """No rows, no entries; and no top tokens at all is a request like another."""
    assert token_logprobs(torch.zeros(0, 5), [], 3) == []
    assert token_logprobs(torch.zeros(1, 4), [2], 0)[0].top == {}


def test_equals_share_a_rank() -> None:
    """The rank counts tokens that are likelier, so that equals do not push each other down."""
    assert [entry.rank for entry in token_logprobs(torch.zeros(2, 7), [0, 6], 0)] == [1, 1]


def test_bfloat16_logits_are_worked_on_in_float32(logits: torch.Tensor) -> None:
    """A model's own float type does not coarsen the sum over the vocabulary, and the input is left alone."""
    coarse = logits.bfloat16()
    before = coarse.clone()
    (entry, *_) = token_logprobs(coarse, [3, 3, 3, 3], 0)
    assert entry.logprob == pytest.approx(coarse[0].float().log_softmax(0)[3].item(), abs=1e-5)
    assert coarse.equal(before)
