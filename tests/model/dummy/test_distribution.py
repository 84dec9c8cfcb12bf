"""The dummy's words are a function of their history."""

from __future__ import annotations

import math

import pytest

from aexec.messages import SamplingParams
from aexec.model.dummy.distribution import DummyDistribution
from aexec.model.dummy.settings import DummySettings


def test_greedy_requests_do_not_look_at_the_seed() -> None:
    """Sampled ones do, and differ from the greedy one."""
    distribution = DummyDistribution(DummySettings())
    greedy = [distribution.state(99, SamplingParams(temperature=0.0, seed=seed)) for seed in (None, 1, 2)]
    sampled = [distribution.state(99, SamplingParams(seed=seed)) for seed in (0, 1, 2, -1)]
    assert len(set(greedy)) == 1
    assert len({*greedy, *sampled}) == 5


def test_it_says_printable_things_and_ends_as_often_as_told() -> None:
    """Of 10,000 words about a tenth is the end token, and the others are printable ASCII."""
    distribution = DummyDistribution(DummySettings(eos_probability=0.1))
    words = [
        distribution.favourite(distribution.state(place, SamplingParams(temperature=0.0))) for place in range(10_000)
    ]
    assert 800 < words.count(256) < 1200
    assert set(words) == {256, *range(32, 127)}


@pytest.mark.parametrize(("size", "eos", "words"), [(20, 3, set(range(20)) - {3}), (40, 35, set(range(32, 40)) - {35})])
def test_small_vocabularies_are_spoken_too(size: int, eos: int, words: set[int]) -> None:
    """Printable tokens where there are any, else all but the end token."""
    distribution = DummyDistribution(DummySettings(vocab_size=size, eos_token_id=eos))
    assert {distribution.favourite(state) for state in range(1000)} == words


def test_what_may_not_come_does_not_come() -> None:
    """The favourite, then what is printable, then anything, then nothing."""
    distribution = DummyDistribution(DummySettings())
    favourite = distribution.favourite(7)
    assert distribution.choose(7, lambda _: True) == favourite
    assert distribution.choose(7, lambda token: token in {favourite + 1, 3}) == favourite + 1
    assert distribution.choose(7, lambda token: token == 500) == 500
    assert distribution.choose(7, lambda _: False) is None


def test_probabilities_sum_to_one_and_agree_with_each_other() -> None:
    """A token has the same log-probability as itself and among the likeliest; ranks follow."""
    distribution = DummyDistribution(DummySettings(vocab_size=64, eos_token_id=0))
    entries = [distribution.logprobs(token, 12345, 64) for token in range(64)]
    assert sum(math.exp(entry.logprob) for entry in entries) == pytest.approx(1.0)
    assert sorted(entry.rank for entry in entries) == list(range(1, 65))
    for entry in entries:
        assert entry.top[entry.token_id] == entry.logprob
        assert list(entry.top)[entry.rank - 1] == entry.token_id
