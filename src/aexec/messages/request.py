"""What a caller asks of the engine, and what comes back: sampling, token chunks."""

from __future__ import annotations

import math
import operator
from collections.abc import Collection, Iterable, Mapping
from numbers import Integral, Real
from typing import Literal, SupportsIndex, TypeGuard, cast

import msgspec

from aexec.errors import InvalidRequest
from aexec.messages.structured import StructuredOutput, short

__all__ = ("FinishReason", "RequestOptions", "SamplingParams", "TokenChunk", "TokenLogprobs")

FinishReason = Literal["stop", "length", "abort"]


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How the tokens of one request are chosen.

    Temperature, top-k, top-p, min-p and the penalties mean what they mean in vLLM and in
    ``transformers``. With a ``seed`` a token depends on (seed, position) and the logits
    only, so it is the same alone, in any batch, after a preemption and on any executor.

    Attributes:
        n: Samples of the prompt, each with a seed of its own; they share the prompt's KV.
        max_tokens: New tokens at most; None: up to the context length.
        min_tokens: Stop tokens are not allowed before so many new tokens.
        temperature: 0 is greedy.
        top_k: Keep the k likeliest tokens; 0 or -1 keeps all.
        top_p: Keep the smallest set with this probability, in (0, 1].
        min_p: Drop tokens below this share of the likeliest one's probability, in [0, 1].
        repetition_penalty: Over prompt and output, > 0; 1 is none.
        presence_penalty: Taken once from each token of the output, in [-2, 2].
        frequency_penalty: Taken per occurrence in the output, in [-2, 2].
        logit_bias: Added to the logits, by token id, each in [-100, 100].
        seed: Any int of 64 bits; None draws one.
        stop: Texts that end the request; not part of its text.
        stop_token_ids: Token ids that end it, besides the model's own end tokens.
        ignore_eos: Go on past the model's own end tokens.
        logprobs: Log-probabilities of the chosen token and of so many likeliest ones.
        prompt_logprobs: The same for the prompt's tokens.
        skip_special_tokens: Leave special tokens out of the text.
        on_overflow: What happens to a prompt that is longer than the context: ``refuse``; or
            ``keep_last``: its last tokens are kept, as many as leave room for ``max_tokens``
            new ones (for one when that is None), also when it would just fit without them.
        structured: The form that the output is held to; None: any text.

    Raises:
        InvalidRequest: A value is out of range; it names the value and the range.
    """

    n: int = 1
    max_tokens: int | None = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = {}
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    on_overflow: Literal["refuse", "keep_last"] = "refuse"
    structured: StructuredOutput | None = None

    def __post_init__(self) -> None:
        """Refuse what cannot be meant."""
        self._check_numbers()
        self._check_ends()
        for name in ("ignore_eos", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                raise InvalidRequest(f"{name} is {short(getattr(self, name))}: expected True or False")
        if self.n > 1 and self.is_greedy:
            raise InvalidRequest(
                f"n is {self.n} and temperature is 0, so that all samples would be the same: expected n=1, or a "
                "temperature above 0"
            )
        if not isinstance(self.structured, StructuredOutput | None):
            raise InvalidRequest(f"structured is {short(self.structured)}: expected StructuredOutput(...)")
        if self.on_overflow not in {"refuse", "keep_last"}:
            raise InvalidRequest(f'on_overflow is {short(self.on_overflow)}: expected "refuse" or "keep_last"')

    def _check_numbers(self) -> None:
        for name, (low, high, open_low) in _RANGES.items():
            _check_range(name, getattr(self, name), low, high, open_low=open_low)
        for name, low in _COUNTS.items():
            _check_count(name, getattr(self, name), low)
        if not isinstance(self.logit_bias, Mapping):
            raise InvalidRequest(f"logit_bias is {short(self.logit_bias)}: expected a dict from token id to number")
        for token, bias in self.logit_bias.items():
            _check_range(f"logit_bias[{short(token)}]", bias, -100.0, 100.0)
        _check_ids("logit_bias", self.logit_bias)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequest(f"min_tokens is {self.min_tokens}, above max_tokens, which is {self.max_tokens}")
        if self.seed is not None and not (_is_integral(self.seed) and -_BEYOND <= self.seed < _BEYOND):
            raise InvalidRequest(f"seed is {short(self.seed)}: expected a signed integer of 64 bits, or None")

    def _check_ends(self) -> None:
        _check_series("stop", self.stop, "texts, as in stop=('END',)")
        _check_series("stop_token_ids", self.stop_token_ids, "token ids, as in stop_token_ids=(2,)")
        _check_ids("stop_token_ids", self.stop_token_ids)
        for text in self.stop:
            if not isinstance(text, str):
                raise InvalidRequest(f"stop holds {short(text)}: expected texts; ids of tokens go into stop_token_ids")
            if not text:
                raise InvalidRequest("stop holds an empty text, which would end every request at once: leave it out")

    @property
    def is_greedy(self) -> bool:
        """True when the likeliest token is taken."""
        return self.temperature == 0.0


class RequestOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How one request is scheduled.

    Attributes:
        priority: The lower, the earlier it is admitted, and the later it gives its blocks back.
        timeout: Seconds that it may take, waiting included; None: no limit.
        cache_salt: It shares the prefix cache with requests of the same salt only.

    Raises:
        InvalidRequest: A value cannot be meant.
    """

    priority: int = 0
    timeout: float | None = None
    cache_salt: str | None = None

    def __post_init__(self) -> None:
        """Refuse what cannot be meant."""
        if isinstance(self.priority, bool) or not isinstance(self.priority, int):
            raise InvalidRequest(f"priority is {short(self.priority)}: expected an integer, lower ones first")
        if self.timeout is not None and not 0 < _to_float(self.timeout) < math.inf:
            raise InvalidRequest(f"timeout is {short(self.timeout)}: expected a positive number of seconds, or None")
        if not isinstance(self.cache_salt, str | None):
            raise InvalidRequest(f"cache_salt is {short(self.cache_salt)}: expected text, or None")


# By name: the least, the most, and whether the least itself is refused.
_RANGES: dict[str, tuple[float, float, bool]] = {
    "temperature": (0.0, math.inf, False),
    "top_p": (0.0, 1.0, True),
    "min_p": (0.0, 1.0, False),
    "repetition_penalty": (0.0, math.inf, True),
    "presence_penalty": (-2.0, 2.0, False),
    "frequency_penalty": (-2.0, 2.0, False),
}
# What no signed integer of 64 bits holds: the model's arrays have such ones, and the wire.
_BEYOND = 2**63
# Collections that are not meant as a series.
_ONE_VALUE: tuple[type, ...] = (str, bytes, Mapping)
# By name: the least.
_COUNTS: dict[str, int] = {"n": 1, "max_tokens": 1, "min_tokens": 0, "top_k": -1, "logprobs": 0, "prompt_logprobs": 0}


def _check_range(name: str, value: object, low: float, high: float, *, open_low: bool = False) -> None:
    number = _to_float(value)
    inside = (low < number if open_low else low <= number) and number <= high
    if not (math.isfinite(number) and inside):
        bracket = "(" if open_low else "["
        raise InvalidRequest(f"{name} is {short(value)}: expected a finite number in {bracket}{low:g}, {high:g}]")


def _check_count(name: str, value: object, low: int) -> None:
    if value is not None and not (_is_int(value) and low <= value < _BEYOND):
        raise InvalidRequest(f"{name} is {short(value)}: expected an integer of at least {low}, and below 2**63")


def _check_series(name: str, value: object, expected: str) -> None:
    """Of one text above all, each letter would be taken for an element."""
    if not isinstance(value, tuple | list) and (isinstance(value, _ONE_VALUE) or not isinstance(value, Collection)):
        raise InvalidRequest(f"{name} is {short(value)}: expected a tuple of {expected}")


def _check_ids(name: str, token_ids: Iterable[object]) -> None:
    """Refuse what is no token id of any vocabulary; which ones the model has, the engine knows."""
    for value in token_ids:
        try:
            is_id = not isinstance(value, bool) and abs(operator.index(cast("SupportsIndex", value))) < _BEYOND
        except TypeError:
            is_id = False
        if not is_id:
            raise InvalidRequest(f"{name} holds {short(value)}: expected token ids, which are integers below 2**63")


def _to_float(value: object) -> float:
    """What is no number is NaN; what no float can hold is infinite. Numpy's numbers are welcome."""
    if isinstance(value, float):
        return value
    if not isinstance(value, Real) or isinstance(value, bool):
        return math.nan
    try:
        return float(value)
    except OverflowError:
        return math.inf


def _is_integral(value: object) -> bool:
    """Seeds are often drawn by numpy."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def _is_int(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


class TokenLogprobs(msgspec.Struct, frozen=True):
    """Log-probabilities at one position, natural logarithm, of the model's own distribution.

    Attributes:
        token_id: The chosen (or the prompt's) token.
        logprob: Its log-probability.
        rank: How many tokens were likelier, plus one.
        top: The likeliest tokens, best first: token id to log-probability.
    """

    token_id: int
    logprob: float
    rank: int
    top: dict[int, float]


class TokenChunk(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """What is new in one request's stream.

    Attributes:
        request_id: Whose.
        index: Which of the ``n`` samples, from 0.
        text: New text; may be empty while a character or a stop text is incomplete.
        token_ids: New tokens.
        logprobs: One entry per new token when they were asked for.
        prompt_logprobs: In the first chunk, when asked for: one entry per prompt token;
            the first is None, since nothing precedes it.
        finish_reason: None until the last chunk.
        stop_reason: The stop text or the token id that ended the request.
        num_prompt_tokens: Tokens of the prompt.
        num_completion_tokens: New tokens up to and with this chunk.
    """

    request_id: str
    index: int = 0
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] | None = None
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    num_prompt_tokens: int
    num_completion_tokens: int
