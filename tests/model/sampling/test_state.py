"""What is kept of a request between steps is what a fresh look would find."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aexec.errors import ProtocolError
from aexec.messages import NewRequestData, SamplingParams
from aexec.model.sampling.state import SamplingState, TokenCounts

TOKENS = st.lists(st.integers(0, 30), max_size=200)


def test_a_request_that_samples_without_a_seed_is_refused() -> None:
    """Such a request would give other tokens after a preemption; the error says who forgot."""
    with pytest.raises(ProtocolError, match=r"request r1 has temperature 0\.7 and no seed: the engine has to draw one"):
        SamplingState("r1", SamplingParams(temperature=0.7), [1], 1)


def test_the_state_copies_the_tokens_of_the_message() -> None:
    """Appending a token must not change the scheduler's frozen message."""
    new = NewRequestData(
        request_id="r1",
        token_ids=[1, 2, 3],
        num_prompt_tokens=2,
        block_ids=[1],
        num_computed_tokens=0,
        sampling=SamplingParams(temperature=0.0),
        stop_token_ids=[0],
    )
    state = SamplingState.from_request(new)
    state.token_ids.append(4)
    assert new.token_ids == [1, 2, 3]
    assert (state.position, state.num_output_tokens) == (4, 2)


@settings(max_examples=60, deadline=None, database=None)
@given(TOKENS, st.lists(TOKENS, max_size=6))
def test_counts_that_grow_are_the_counts_of_the_whole(prompt: list[int], pieces: list[list[int]]) -> None:
    """Prompt tokens count 0 until the output holds them; every distinct token is there once."""
    counts, output = TokenCounts(prompt), []
    for piece in pieces:
        counts.extend(piece)
        output += piece
    found = dict(zip(counts.ids.tolist(), counts.counts.tolist(), strict=True))
    assert found == dict.fromkeys(prompt, 0.0) | Counter(output)
    assert repr(counts) == f"<TokenCounts: {len(found)} distinct tokens, {len(output)} in the output>"


@pytest.mark.parametrize(
    ("penalty", "distinct"), [({"repetition_penalty": 2.0}, {1, 2, 3}), ({"presence_penalty": 1.0}, {3})]
)
def test_only_the_repetition_penalty_looks_at_the_prompt(penalty: dict[str, float], distinct: set[int]) -> None:
    """Presence and frequency concern the output alone."""
    state = SamplingState("r1", SamplingParams(temperature=0.0, **penalty), [1, 2, 3, 3], 2)
    assert set(state.counts().ids.tolist()) == distinct


def test_counts_follow_the_tokens_that_are_appended_and_taken_back() -> None:
    """Each look counts what is new; a request whose output got shorter is counted afresh."""
    state = SamplingState("r1", SamplingParams(temperature=0.0, frequency_penalty=1.0), [1, 5], 1)
    first = state.counts()
    state.token_ids += [5, 6]
    assert state.counts() is first
    assert dict(zip(first.ids.tolist(), first.counts.tolist(), strict=True)) == {5: 2.0, 6: 1.0}
    del state.token_ids[2:]
    again = state.counts()
    assert dict(zip(again.ids.tolist(), again.counts.tolist(), strict=True)) == {5: 1.0}


def test_stop_tokens_are_forbidden_until_min_tokens_are_out() -> None:
    """With min_tokens 2 they may not come as the first and second token, and the request then costs nothing extra."""
    state = SamplingState("r1", SamplingParams(temperature=0.0, min_tokens=2), [9], 1, (0, 7))
    seen = []
    for _ in range(3):
        seen.append((tuple(state.forbidden_token_ids), state.has_edits))
        state.token_ids.append(5)
    assert seen == [((0, 7), True), ((0, 7), True), ((), False)]
