"""Requests that the model cannot run are refused before anything looks at them."""

from __future__ import annotations

import numpy as np
import pytest

from aexec.engine.admission import RequestLimits, check_token_ids, make_request
from aexec.errors import InvalidRequest
from aexec.messages.request import SamplingParams

LIMITS = RequestLimits(vocab_size=100, max_model_len=16, num_token_slots=64, max_logprobs=5, eos_token_ids=(2,))


@pytest.mark.parametrize(
    ("prompt", "sampling", "words"),
    [
        ([], {}, "the prompt of request a is empty: expected at least one token"),
        ([1] * 16, {}, "has 16 tokens and the context holds 16: expected at most 15"),
        ([1, 100], {}, r"prompt\[1\] is 100: expected a token id from 0 to 99"),
        ([-1], {}, r"prompt\[0\] is -1: expected a token id"),
        (["Hello"], {}, r"prompt\[0\] is 'Hello': expected a token id"),
        ([1, 2.5], {}, r"prompt\[1\] is 2.5: expected a token id"),
        ([10**5000], {}, r"prompt\[0\] is <int without a repr>: expected a token id"),
        ([True], {}, r"prompt\[0\] is True: expected a token id"),
        ([1], {"stop_token_ids": (5, 500)}, r"stop_token_ids\[1\] is 500: expected a token id from 0 to 99"),
        ([1], {"logit_bias": {777: 1.0}}, r"logit_bias token\[0\] is 777: expected a token id"),
        ([1], {"logprobs": 6}, "logprobs is 6: expected at most 5; or open the engine with a larger max_logprobs"),
        ([1], {"prompt_logprobs": 6}, "prompt_logprobs is 6: expected at most 5"),
    ],
)
def test_a_bad_request_is_named_with_value_expectation_and_remedy(prompt, sampling, words):
    """The error tells what was given, what would be right, and what to change."""
    with pytest.raises(InvalidRequest, match=words):
        make_request("a", prompt, SamplingParams(**sampling), LIMITS)


def test_numpy_integers_are_token_ids():
    """They come out as plain integers, which every codec knows."""
    ids = check_token_ids("prompt", np.array([3, 4], dtype=np.int64), 100)
    assert ids == [3, 4]
    assert {type(token_id) for token_id in ids} == {int}


@pytest.mark.parametrize(
    ("max_tokens", "limits", "expected"),
    [
        (4, {}, 8),  # prompt and new tokens
        (100, {}, 16),  # the context ends before
        (None, {}, 16),  # all the context
        (None, {"num_token_slots": 8}, 9),  # the KV cache ends before; the last token needs no slot
        (None, {"num_token_slots": 2}, 5),  # does not even fit: the scheduler refuses it
    ],
)
def test_a_request_may_grow_to_the_least_of_its_limits(max_tokens, limits, expected):
    """``max_tokens``, the context and, when nothing was asked for, the KV cache bound it."""
    sizes = {"vocab_size": 100, "max_model_len": 16, "num_token_slots": 64, "max_logprobs": 5} | limits
    request = make_request("a", [1] * 4, SamplingParams(max_tokens=max_tokens), RequestLimits(**sizes))
    assert request.max_num_tokens == expected


def test_the_models_end_tokens_stop_a_request_unless_it_ignores_them():
    """Stop ids of its own count either way."""
    stops = [
        make_request("a", [1], SamplingParams(stop_token_ids=(9,), ignore_eos=ignore), LIMITS).stop_token_ids
        for ignore in (False, True)
    ]
    assert stops == [{2, 9}, {9}]
