"""What a request has to satisfy before anything else looks at it. Pure."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import SupportsIndex, cast

import msgspec

from aexec.engine.request import Request, RequestStatus
from aexec.errors import InvalidRequest
from aexec.messages.request import RequestOptions, SamplingParams
from aexec.messages.structured import short

__all__ = ("RequestLimits", "check_token_ids", "make_request")

_NO_OPTIONS = RequestOptions()


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestLimits:
    """What one engine can take.

    Attributes:
        vocab_size: Token ids are below it.
        max_model_len: Tokens of prompt and output together.
        num_token_slots: Token positions of the KV cache.
        max_logprobs: Most log-probabilities per position.
        eos_token_ids: The model's own end tokens.
    """

    vocab_size: int
    max_model_len: int
    num_token_slots: int
    max_logprobs: int
    eos_token_ids: tuple[int, ...] = ()

    @property
    def max_num_tokens(self) -> int:
        """Tokens that one request can reach: the last one is never fed back and needs no slot."""
        return min(self.max_model_len, self.num_token_slots + 1)


def make_request(
    request_id: str,
    prompt: Sequence[object],
    sampling: SamplingParams,
    limits: RequestLimits,
    options: RequestOptions = _NO_OPTIONS,
) -> Request:
    """A request that the model can run.

    Args:
        request_id: Its id.
        prompt: Token ids; numpy's integers and torch's are welcome.
        sampling: How to sample.
        limits: What the engine can take.
        options: How it is scheduled.

    Raises:
        InvalidRequest: The prompt is empty, too long or not of this vocabulary, or a
            sampling value does not fit the model.
    """
    if not prompt:
        raise InvalidRequest(f"the prompt of request {request_id} is empty: expected at least one token")
    if sampling.on_overflow == "keep_last":
        prompt = prompt[-_most_prompt_tokens(sampling, limits) :]
    if len(prompt) >= limits.max_model_len:
        raise InvalidRequest(
            f"the prompt of request {request_id} has {len(prompt)} tokens and the context holds "
            f"{limits.max_model_len}: expected at most {limits.max_model_len - 1}, to leave room for one new token; "
            'or on_overflow="keep_last" in its SamplingParams'
        )
    _check_sampling(sampling, limits)
    structured, sampling = sampling.structured, _without_structure(sampling)
    ends = sampling.stop_token_ids if sampling.ignore_eos else (*sampling.stop_token_ids, *limits.eos_token_ids)
    return Request(
        request_id=request_id,
        token_ids=check_token_ids("prompt", prompt, limits.vocab_size),
        num_prompt_tokens=len(prompt),
        sampling=sampling,
        stop_token_ids=frozenset(ends),
        max_num_tokens=_max_num_tokens(len(prompt), sampling.max_tokens, limits),
        priority=options.priority,
        cache_salt=options.cache_salt or "",
        structured=structured,
        status=RequestStatus.WAITING if structured is None else RequestStatus.WAITING_FOR_GRAMMAR,
    )


def check_token_ids(what: str, token_ids: Iterable[object], vocab_size: int) -> list[int]:
    """Token ids as plain integers.

    Raises:
        InvalidRequest: One is no integer, or out of the vocabulary.
    """
    checked: list[int] = []
    for place, value in enumerate(token_ids):
        try:
            token_id = -1 if isinstance(value, bool) else operator.index(cast("SupportsIndex", value))
        except TypeError:
            token_id = -1
        if not 0 <= token_id < vocab_size:
            raise InvalidRequest(
                f"{what}[{place}] is {short(value)}: expected a token id from 0 to {vocab_size - 1}, "
                "as the model's tokenizer gives them"
            )
        checked.append(token_id)
    return checked


def _most_prompt_tokens(sampling: SamplingParams, limits: RequestLimits) -> int:
    """What a prompt is cut to, so that all its new tokens fit, or at least one if they never do."""
    return max(limits.max_num_tokens - (sampling.max_tokens or 1), 1)


def _max_num_tokens(num_prompt_tokens: int, max_tokens: int | None, limits: RequestLimits) -> int:
    if max_tokens is None:
        # As far as it goes; a prompt that does not even fit is for the scheduler to refuse.
        return max(limits.max_num_tokens, num_prompt_tokens + 1)
    return min(num_prompt_tokens + max_tokens, limits.max_model_len)


def _without_structure(sampling: SamplingParams) -> SamplingParams:
    """The workers get bitmasks: a schema of a megabyte need not travel to each of them."""
    return sampling if sampling.structured is None else msgspec.structs.replace(sampling, structured=None)


def _check_sampling(sampling: SamplingParams, limits: RequestLimits) -> None:
    check_token_ids("stop_token_ids", sampling.stop_token_ids, limits.vocab_size)
    check_token_ids("logit_bias token", sampling.logit_bias, limits.vocab_size)
    for name in ("logprobs", "prompt_logprobs"):
        value = getattr(sampling, name)
        if value is not None and value > limits.max_logprobs:
            raise InvalidRequest(
                f"{name} is {value}: expected at most {limits.max_logprobs}; "
                "or open the engine with a larger max_logprobs"
            )
