"""The distribution of the dummy model: a favourite token by hash, and halving from there.

The favourite has probability 1/2, the next id (wrapping at the vocabulary's end) 1/4, and
so on. The favourite is what it says unless that is not allowed.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from aexec.messages.request import SamplingParams, TokenLogprobs
from aexec.model.dummy.settings import DummySettings
from aexec.model.sampling.noise import mix64

__all__ = ("DummyDistribution",)

_PRINTABLE = range(32, 127)


class DummyDistribution:
    """What the dummy says after any history."""

    def __init__(self, settings: DummySettings) -> None:
        """``settings`` name the vocabulary, the end token and the seed."""
        self._settings = settings
        eos, size = settings.eos_token_id, settings.vocab_size
        printable = [token for token in _PRINTABLE if token < size and token != eos]
        self._sayable = printable or [token for token in range(size) if token != eos]

    @property
    def settings(self) -> DummySettings:
        """What it was made with."""
        return self._settings

    def state(self, prefix_hash: int, sampling: SamplingParams) -> int:
        """A hash of the seeds and of all tokens so far; it decides the next one."""
        seed = 0 if sampling.is_greedy else mix64(sampling.seed or 0) | 1
        return mix64(prefix_hash ^ mix64(self._settings.seed ^ seed))

    def favourite(self, state: int) -> int:
        """The likeliest token."""
        if (mix64(state) >> 11) * 2.0**-53 < self._settings.eos_probability:
            return self._settings.eos_token_id
        return self._sayable[state % len(self._sayable)]

    def choose(self, state: int, may_come: Callable[[int], bool]) -> int | None:
        """The favourite if it may come, else one that may, printable if one is; None if none."""
        favourite = self.favourite(state)
        if may_come(favourite):
            return favourite
        pool = [token for token in self._sayable if may_come(token)]
        pool = pool or [token for token in range(self._settings.vocab_size) if may_come(token)]
        return pool[state % len(pool)] if pool else None

    def logprobs(self, token: int, state: int, num_top: int) -> TokenLogprobs:
        """Log-probabilities of ``token`` and of the ``num_top`` likeliest ones."""
        favourite, size = self.favourite(state), self._settings.vocab_size
        rank = (token - favourite) % size + 1
        top = {(favourite + place) % size: -(place + 1) * math.log(2.0) for place in range(min(num_top, size))}
        return TokenLogprobs(token_id=token, logprob=-rank * math.log(2.0), rank=rank, top=top)
