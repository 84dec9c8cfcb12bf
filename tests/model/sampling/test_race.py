"""The race draws from the right distribution, and the same token wherever it is run."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from aexec.model.sampling.race import GROUP_SIZE, choose


def random_weights(num_rows: int, vocab_size: int, spread: float = 2.0, seed: int = 0) -> Tensor:
    """Weights of normal logits, the greatest of each row 1."""
    logits = torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * spread
    return (logits - logits.amax(1, keepdim=True)).exp_()


def test_tokens_come_as_often_as_they_weigh() -> None:
    """Over 20,000 positions each of three groups' tokens comes with its share, by a wide chi-square bound."""
    row = torch.zeros(3 * GROUP_SIZE - 100)
    held = torch.tensor([0, 1, 5, 255, 256, 300, 511, 512, 600, 667])
    shares = torch.tensor([0.3, 0.02, 0.05, 0.1, 0.2, 0.03, 0.1, 0.1, 0.05, 0.05])
    row[held] = shares
    draws, num_draws = 2_000, 20_000
    counts = torch.zeros(len(row))
    for start in range(0, num_draws, draws):
        tokens = choose(row.expand(draws, -1), [7] * draws, range(start, start + draws))
        counts += torch.bincount(tokens, minlength=len(row))
    expected = shares * num_draws
    assert counts.sum() == counts[held].sum(), "a token without weight came"
    assert ((counts[held] - expected) ** 2 / expected).sum() < 40.0  # 9 degrees of freedom: 1 in 100,000


@pytest.mark.parametrize("vocab_size", [1, 2, 255, 256, 257, 1000, 4096])
def test_every_vocabulary_size_works(vocab_size: int) -> None:
    """The last group may be short, or be the only one; a token that has all the weight comes."""
    weights = torch.zeros(vocab_size, vocab_size).fill_diagonal_(1.0)
    assert choose(weights, [3] * vocab_size, range(vocab_size)).tolist() == list(range(vocab_size))


@pytest.mark.parametrize("padding", [1, 24, 1000])
def test_padding_the_vocabulary_changes_nothing(padding: int) -> None:
    """Columns that a padded output head adds, all without weight, leave each choice as it is."""
    weights = random_weights(64, 1000)
    padded = torch.nn.functional.pad(weights, (0, padding))
    assert choose(padded, range(64), [5] * 64).equal(choose(weights, range(64), [5] * 64))


def test_a_choice_depends_on_its_own_row_only() -> None:
    """Each of 40 rows gets alone, and in reverse order, what it gets in the batch."""
    weights = random_weights(40, 3000)
    seeds, positions = list(range(-20, 20)), [7 * row for row in range(40)]
    together = choose(weights, seeds, positions)
    alone = [choose(weights[row : row + 1], seeds[row : row + 1], positions[row : row + 1]).item() for row in range(40)]
    assert alone == together.tolist()
    assert choose(weights.flip(0), seeds[::-1], positions[::-1]).flip(0).equal(together)


def test_seed_and_position_both_matter() -> None:
    """Flat weights give other tokens for other seeds and for other positions."""
    flat = torch.ones(100, 5000)
    assert len(set(choose(flat, range(100), [0] * 100).tolist())) > 90
    assert len(set(choose(flat, [0] * 100, range(100)).tolist())) > 90


def test_small_differences_of_the_logits_hardly_ever_change_a_choice() -> None:
    """Noise of 1e-5, which another batch puts on the logits, changes at most 2 of 1,000 choices."""
    weights = random_weights(1000, 8192, spread=1.0)
    jitter = torch.randn(1000, 8192, generator=torch.Generator().manual_seed(9)) * 1e-5
    plain = choose(weights, range(1000), [3] * 1000)
    assert int((choose(weights * jitter.exp(), range(1000), [3] * 1000) != plain).sum()) <= 2
