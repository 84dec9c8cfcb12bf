"""What a request is asked with: each value is checked before it can meet another request in a batch."""

from __future__ import annotations

import numpy as np
import pytest

from aexec import InvalidRequest, SamplingParams
from aexec.messages.request import RequestOptions


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"stop": "END"}, r"stop is 'END': expected a tuple of texts, as in stop=\('END',\)"),
        ({"stop": b"END"}, "stop is b'END': expected a tuple of texts"),
        ({"stop": {"END": 1}}, "stop is {'END': 1}: expected a tuple of texts"),
        ({"stop": None}, "stop is None: expected a tuple of texts"),
        ({"stop": ["a", 3]}, "stop holds 3: expected texts; ids of tokens go into stop_token_ids"),
        ({"stop": ("a", "")}, "stop holds an empty text"),
        ({"stop_token_ids": 2}, r"stop_token_ids is 2: expected a tuple of token ids, as in stop_token_ids=\(2,\)"),
        ({"logit_bias": [1]}, r"logit_bias is \[1\]: expected a dict from token id to number"),
        ({"logit_bias": {7: "x"}}, r"logit_bias\[7\] is 'x': expected a finite number in \[-100, 100\]"),
        (
            {"logit_bias": {2**63: 1.0}},
            "logit_bias holds 9223372036854775808: expected token ids, which are integers below",
        ),
        ({"logit_bias": {-(10**5000): 1.0}}, "logit_bias holds <int without a repr>: expected token ids"),
        ({"logit_bias": {10**5000: "x"}}, r"logit_bias\[<int without a repr>\] is 'x': expected a finite number"),
        ({"logit_bias": {"7": 1.0}}, "logit_bias holds '7': expected token ids"),
        ({"stop_token_ids": (7, 2**70)}, "stop_token_ids holds 1180591620717411303424: expected token ids"),
        ({"stop_token_ids": (10**5000,)}, "stop_token_ids holds <int without a repr>: expected token ids"),
        ({"stop_token_ids": (7, True)}, "stop_token_ids holds True: expected token ids"),
        ({"seed": 1.5}, "seed is 1.5: expected a signed integer of 64 bits, or None"),
        ({"seed": True}, "seed is True: expected a signed integer"),
        ({"seed": "a"}, "seed is 'a': expected a signed integer"),
        ({"temperature": "hot"}, r"temperature is 'hot': expected a finite number in \[0, inf\]"),
        ({"temperature": True}, "temperature is True: expected a finite number"),
        ({"temperature": 10**400}, r"temperature is 10{56}\.\.\.: expected a finite number"),
        ({"temperature": 10**5000}, "temperature is <int without a repr>: expected a finite number"),
        ({"top_p": None}, r"top_p is None: expected a finite number in \(0, 1\]"),
        ({"max_tokens": "5"}, "max_tokens is '5': expected an integer of at least 1"),
        ({"max_tokens": 2**63}, r"max_tokens is 9223372036854775808: expected .* of at least 1, and below 2\*\*63"),
        ({"min_tokens": 10**5000, "max_tokens": 3}, "min_tokens is <int without a repr>: expected an integer"),
        ({"n": 10**5000}, "n is <int without a repr>: expected an integer"),
        ({"ignore_eos": "no"}, "ignore_eos is 'no': expected True or False"),
        ({"skip_special_tokens": 3}, "skip_special_tokens is 3: expected True or False"),
    ],
)
def test_a_value_of_another_type_is_refused_where_it_is_given(given, message):
    """By name, with what is expected: in a step it would fail all requests of the batch."""
    with pytest.raises(InvalidRequest, match=message):
        SamplingParams(**given)


@pytest.mark.parametrize(
    "given",
    [
        {"stop": ["a"]},
        {"stop": {"a"}},
        {"stop_token_ids": np.array([1, 2])},
        {"max_tokens": 2**63 - 1},
        {"logit_bias": {np.int64(3): 1.0, 2**63 - 1: 1.0}},
        {"temperature": np.float32(0.5)},
        {"top_p": 1},
        {"seed": np.int64(5)},
    ],
)
def test_what_means_the_same_is_taken(given):
    """Lists and sets for tuples, and numpy's numbers."""
    assert SamplingParams(**given)


@pytest.mark.parametrize("timeout", ["1", True, 10**400, pytest.param(10**5000, id="huge")])
def test_a_timeout_is_a_number(timeout):
    """Of seconds."""
    with pytest.raises(InvalidRequest, match=r"timeout is .*: expected a positive number of seconds, or None"):
        RequestOptions(timeout=timeout)
