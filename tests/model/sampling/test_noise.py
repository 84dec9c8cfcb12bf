"""Noise is a function of its place."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aexec.model.sampling.noise import exponentials, mix64, mix64_array

GOLDEN = [[0.486717016, 0.798265874, 1.5779773], [0.908902049, 0.865282655, 0.482566565]]
SEEDS = st.integers(-(2**63), 2**63 - 1)


@pytest.mark.parametrize(
    ("state", "output"),
    [(0x9E3779B97F4A7C15, 0xE220A8397B1DCDAF), (1234567 + 0x9E3779B97F4A7C15, 6457827717110365317)],
)
def test_mixing_gives_the_published_outputs_of_splitmix64(state: int, output: int) -> None:
    """The first outputs of SplitMix64 for seeds 0 and 1234567 are those that everybody gets."""
    assert mix64(state) == output


@settings(max_examples=50, deadline=None, database=None)
@given(st.lists(st.integers(0, 2**64 - 1), min_size=1, max_size=20))
def test_mixing_an_array_is_mixing_each_number(values: list[int]) -> None:
    """Both forms of the mixing function are the same function."""
    assert mix64_array(np.array(values, dtype=np.uint64)).tolist() == [mix64(value) for value in values]


def test_noise_is_the_same_in_every_process_and_on_every_platform() -> None:
    """Draws of a known place have known values."""
    draws = exponentials([42, -1], [0, 7], 3)
    assert draws == pytest.approx(np.array(GOLDEN), rel=1e-6)


@settings(max_examples=30, deadline=None, database=None)
@given(st.lists(st.tuples(SEEDS, st.integers(0, 10**6)), min_size=1, max_size=8), st.integers(1, 40))
def test_a_row_is_the_same_in_any_company(places: list[tuple[int, int]], count: int) -> None:
    """A row alone, and a longer one, begin as the row in the batch does."""
    seeds, positions = zip(*places, strict=True)
    together = exponentials(seeds, positions, count)
    for row, (seed, position) in enumerate(places):
        assert exponentials([seed], [position], count + 5)[0, :count].tolist() == together[row].tolist()


def test_rows_are_exponential_and_do_not_resemble_each_other() -> None:
    """Mean and spread are 1, and neighbouring seeds and positions do not correlate."""
    draws = exponentials([0, 0, 1, 1], [0, 1, 0, 1], 20_000).astype(np.float64)
    assert (draws > 0).all()
    assert draws.mean(axis=1) == pytest.approx(np.ones(4), abs=0.05)
    assert draws.std(axis=1) == pytest.approx(np.ones(4), abs=0.05)
    assert np.corrcoef(draws) == pytest.approx(np.eye(4), abs=0.05)
