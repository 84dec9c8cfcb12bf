"""The right requests have the right logits changed."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from aexec.errors import ProtocolError
from aexec.messages import GrammarOutput, SamplingParams
from aexec.model.sampling.edits import edit_logits
from aexec.model.sampling.state import SamplingState

VOCAB = 40
EXTRAS = st.fixed_dictionaries(
    {},
    optional={
        "repetition_penalty": st.floats(0.5, 2.0),
        "presence_penalty": st.floats(-2.0, 2.0),
        "frequency_penalty": st.floats(-2.0, 2.0),
        "logit_bias": st.dictionaries(st.integers(0, VOCAB - 1), st.floats(-100.0, 100.0), max_size=4),
        "min_tokens": st.integers(0, 8),
    },
)
REQUESTS = st.lists(
    st.tuples(
        EXTRAS,
        st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=12),  # prompt
        st.lists(st.integers(0, VOCAB - 1), max_size=12),  # output
        st.booleans(),  # has a grammar
    ),
    min_size=1,
    max_size=5,
)


def naive(logits: Tensor, state: SamplingState, allowed: set[int] | None) -> list[float]:
    """One row, one token at a time, in the documented order."""
    params, row = state.params, logits.tolist()
    output = state.token_ids[state.num_prompt_tokens :]
    for token in range(len(row)):
        value = row[token] if allowed is None or token in allowed else -math.inf
        value += params.logit_bias.get(token, 0.0)
        if len(output) < params.min_tokens and token in state.stop_token_ids:
            value = -math.inf
        if token in state.token_ids:
            value = value / params.repetition_penalty if value > 0 else value * params.repetition_penalty
        count = output.count(token)
        row[token] = value - params.presence_penalty * (count > 0) - params.frequency_penalty * count
    return row


@settings(max_examples=60, deadline=None, database=None, derandomize=True)
@given(REQUESTS, st.integers(0, 1000))
def test_a_batch_is_edited_as_each_row_alone(
    requests: list[tuple[dict[str, object], list[int], list[int], bool]], seed: int
) -> None:
    """Every mixture of extras and grammars equals a plain loop over tokens."""
    states = [
        SamplingState(
            f"r{row}", SamplingParams(temperature=0.0, max_tokens=None, **extras), prompt + output, len(prompt), (0, 3)
        )
        for row, (extras, prompt, output, _) in enumerate(requests)
    ]
    held = [row for row, request in enumerate(requests) if request[3]]
    bits = np.random.default_rng(seed).random((len(held), VOCAB)) < 0.5
    packed = np.packbits(np.pad(bits, ((0, 0), (0, 24))), axis=1, bitorder="little").view("<i4").astype(np.int32)
    grammar = GrammarOutput(request_ids=[f"r{row}" for row in held], bitmask=packed)
    logits = torch.randn(len(states), VOCAB, generator=torch.Generator().manual_seed(seed)) * 3
    allowed = {row: set(bits[line].nonzero()[0].tolist()) for line, row in enumerate(held)}
    expected = [naive(logits[row], state, allowed.get(row)) for row, state in enumerate(states)]
    edit_logits(logits, states, grammar)
    assert logits.allclose(torch.tensor(expected), atol=1e-4)


def test_nobody_who_asks_for_nothing_is_touched() -> None:
    """Without extras the answer is False and the logits are as they were."""
    logits = torch.randn(2, VOCAB)
    before = logits.clone()
    states = [SamplingState(name, SamplingParams(temperature=0.0), [1], 1) for name in "ab"]
    others = GrammarOutput(request_ids=["gone"], bitmask=np.zeros((1, 2), dtype=np.int32))
    assert edit_logits(logits, states, None) is False
    assert edit_logits(logits, states, others) is False
    assert logits.equal(before)


def test_tokens_outside_of_the_logits_are_passed_over() -> None:
    """A prompt or a stop token above the width of the output head has no logit to change."""
    params = SamplingParams(
        temperature=0.0, repetition_penalty=2.0, min_tokens=3, logit_bias={-1: 5.0, VOCAB: 5.0, 1: 5.0}
    )
    logits = torch.ones(1, VOCAB)
    edit_logits(logits, [SamplingState("a", params, [2, 5000], 2, (3, 5001))], None)
    expected = torch.ones(1, VOCAB)
    expected[0, 1], expected[0, 2], expected[0, 3] = 6.0, 0.5, -math.inf
    assert logits.equal(expected)


def test_a_bitmask_of_the_wrong_width_is_refused() -> None:
    """It is for another vocabulary; nothing is masked by guess."""
    grammar = GrammarOutput(request_ids=["a"], bitmask=np.zeros((1, 3), dtype=np.int32))
    state = SamplingState("a", SamplingParams(temperature=0.0), [1], 1)
    with pytest.raises(ProtocolError, match=r"int32 \[1, 3\]: expected int32 \[1, 2\]"):
        edit_logits(torch.zeros(1, VOCAB), [state], grammar)
