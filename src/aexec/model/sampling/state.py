"""What the sampler has to know of one request, kept from step to step.

The model runner makes one :class:`SamplingState` when it learns of a request and drops
it when the request finishes or is preempted; all that is cached for the request hangs on
it, so nothing can outlive it. It holds host memory only, in proportion to the *distinct*
tokens of the request, never to the vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from aexec.errors import ProtocolError
from aexec.messages.batch import NewRequestData
from aexec.messages.request import SamplingParams

__all__ = ("SamplingState", "TokenCounts")


class TokenCounts:
    """The distinct tokens of a request, and how often its output holds each.

    Attributes:
        num_counted: Output tokens counted so far.
    """

    def __init__(self, prompt: Sequence[int]) -> None:
        distinct = np.unique(np.asarray(prompt, dtype=np.int64))
        self._ids = distinct
        self._counts = np.zeros(len(distinct), dtype=np.float32)
        self._slots = {token: slot for slot, token in enumerate(distinct.tolist())}
        self.num_counted = 0

    def __repr__(self) -> str:
        return f"<TokenCounts: {len(self._slots)} distinct tokens, {self.num_counted} in the output>"

    @property
    def ids(self) -> NDArray[np.int64]:
        """int64 ``[num_distinct]``: each token once."""
        return self._ids[: len(self._slots)]

    @property
    def counts(self) -> NDArray[np.float32]:
        """float32 ``[num_distinct]``: occurrences in the output; 0 for a token of the prompt alone."""
        return self._counts[: len(self._slots)]

    def extend(self, tokens: Sequence[int]) -> None:
        """Count more output tokens."""
        for token in tokens:
            slot = self._slots.setdefault(token, len(self._slots))
            if slot == len(self._ids):
                self._grow()
            self._ids[slot] = token
            self._counts[slot] += 1
        self.num_counted += len(tokens)

    def _grow(self) -> None:
        room = max(64, len(self._ids))
        self._ids = np.concatenate([self._ids, np.zeros(room, dtype=np.int64)])
        self._counts = np.concatenate([self._counts, np.zeros(room, dtype=np.float32)])


@dataclass(slots=True, eq=False)
class SamplingState:
    """One request, as the sampler sees it.

    Attributes:
        request_id: Its id.
        params: How to sample.
        token_ids: Prompt and output so far. The runner owns the list and appends to it;
            the sampler only reads it.
        num_prompt_tokens: How many of them are the prompt.
        stop_token_ids: Not allowed while fewer than ``params.min_tokens`` tokens are out.
        sampled: The token that this rank sampled last, which the scheduler may not have told
            yet; any token after an error, as nothing comes of the request any longer.

    Raises:
        ProtocolError: It is to be sampled and has no seed, which the engine should have drawn.
    """

    request_id: str
    params: SamplingParams
    token_ids: list[int]
    num_prompt_tokens: int
    stop_token_ids: Sequence[int] = ()
    sampled: int | None = None
    _always_edited: bool = field(init=False, repr=False)
    _bias: tuple[NDArray[np.int64], NDArray[np.float32]] | None = field(default=None, init=False, repr=False)
    _counts: TokenCounts | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        """Refuse a request that cannot be sampled the same way twice."""
        if self.params.seed is None and not self.params.is_greedy:
            raise ProtocolError(
                f"request {self.request_id} has temperature {self.params.temperature:g} and no seed: "
                "the engine has to draw one before the request reaches a model runner"
            )
        self._always_edited = bool(self.params.logit_bias) or self.has_penalties

    @classmethod
    def from_request(cls, new: NewRequestData) -> SamplingState:
        """The state of a request that the scheduler has just sent; copies its tokens."""
        return cls(new.request_id, new.sampling, list(new.token_ids), new.num_prompt_tokens, new.stop_token_ids)

    @property
    def position(self) -> int:
        """Index of the token that is sampled next."""
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Tokens sampled so far."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def has_edits(self) -> bool:
        """True when the next token's logits are changed by what was asked for."""
        return self._always_edited or bool(self.forbidden_token_ids)

    @property
    def has_penalties(self) -> bool:
        """True when tokens that were there before are treated differently."""
        params = self.params
        return bool(params.presence_penalty or params.frequency_penalty or params.repetition_penalty != 1.0)

    @property
    def forbidden_token_ids(self) -> Sequence[int]:
        """Stop tokens that may not come yet."""
        return self.stop_token_ids if self.num_output_tokens < self.params.min_tokens else ()

    def bias(self) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """``logit_bias`` as int64 ids and float32 values, made once."""
        if self._bias is None:
            bias = self.params.logit_bias
            self._bias = np.array(list(bias), dtype=np.int64), np.array(list(bias.values()), dtype=np.float32)
        return self._bias

    def counts(self) -> TokenCounts:
        """Tokens that the penalties look at, brought up to date by those that are new."""
        if self._counts is None or self._counts.num_counted > self.num_output_tokens:
            looks_at_prompt = self.params.repetition_penalty != 1.0
            self._counts = TokenCounts(self.token_ids[: self.num_prompt_tokens] if looks_at_prompt else [])
        self._counts.extend(self.token_ids[self.num_prompt_tokens + self._counts.num_counted :])
        return self._counts
