"""A step's arrays: where each token lies, what it attends to, which rows are wanted."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aexec.errors import ProtocolError
from aexec.model.transformer.inputs import ScheduledTokens, build_inputs, group_decodes, prompt_rows, slot_mapping


def share(name: str, num_known: int, start: int, stop: int, blocks: list[int] | None = None, size: int = 4):
    table = blocks if blocks is not None else list(range(10, 10 + -(-num_known // size)))
    return ScheduledTokens(name, list(range(100, 100 + num_known)), np.array(table, dtype=np.int64), start, stop)


@st.composite
def steps(draw: st.DrawFn):
    size = draw(st.integers(1, 8))
    free = iter(draw(st.permutations(range(1, 400))))
    shares = []
    for index in range(draw(st.integers(1, 8))):
        known = draw(st.integers(1, 40))
        start = draw(st.integers(0, known - 1))
        stop = draw(st.integers(start + 1, known))
        shares.append(share(str(index), known, start, stop, [next(free) for _ in range(-(-known // size))], size))
    return shares, size


@given(steps())
def test_each_token_of_a_step_has_its_own_place(step) -> None:
    """Ids, positions and slots are what one gets by walking over the requests one token at a time."""
    shares, size = step
    inputs = build_inputs(shares, size)
    walked = [
        (each.token_ids[place], place, each.block_ids[place // size] * size + place % size)
        for each in inputs.order
        for place in range(each.start, each.stop)
    ]
    assert list(zip(inputs.token_ids, inputs.positions, inputs.slots, strict=True)) == walked
    assert len(set(inputs.slots.tolist())) == len(walked)
    assert 0 not in set((inputs.slots // size).tolist())


@given(steps())
def test_decode_groups_and_chunks_cover_every_request_once(step) -> None:
    """Rows of groups, then of chunks, follow each other without a gap, each with its request's blocks."""
    shares, size = step
    inputs = build_inputs(shares, size)
    assert {each.request_id for each in inputs.order} == {each.request_id for each in shares}
    row = 0
    requests = iter(inputs.order)
    for group in inputs.decode_groups:
        assert group.start == row
        for kv_len, table in zip(group.kv_lens, group.block_ids, strict=True):
            each = next(requests)
            used = -(-each.stop // size)
            assert kv_len == each.stop
            assert table.tolist() == [*each.block_ids[:used], *[0] * (len(table) - used)]
        row += len(group.kv_lens)
    for chunk in inputs.chunks:
        each = next(requests)
        assert (chunk.start, chunk.num_tokens, chunk.kv_len) == (row, each.num_tokens, each.stop)
        assert chunk.block_ids.tolist() == each.block_ids[: -(-each.stop // size)].tolist()
        row += each.num_tokens
    assert [inputs.order[i].stop - 1 for i in range(len(inputs.order))] == inputs.positions[inputs.last_rows].tolist()


def test_requests_of_similar_length_decode_together_in_their_order() -> None:
    """One group, in the order of the scheduler, while the longest is not much longer than the shortest."""
    decodes = [share(str(length), length, length - 1, length) for length in (150, 20, 90)]
    assert group_decodes(decodes) == [decodes]


def test_a_long_request_does_not_pad_the_short_ones() -> None:
    """A request of thousands of tokens decodes in a group of its own."""
    decodes = [share(str(length), length, length - 1, length) for length in (30, 4000, 25)]
    assert [[each.request_id for each in group] for group in group_decodes(decodes)] == [["25", "30"], ["4000"]]


def test_slots_follow_the_block_table() -> None:
    """Position p lies in the block of index p // block_size, at offset p % block_size."""
    assert slot_mapping(np.array([7, 3]), 2, 6, 4).tolist() == [30, 31, 12, 13]
    assert slot_mapping(np.array([7, 3]), 5, 6, 4).tolist() == [13]


def test_a_request_is_sampled_when_its_last_token_runs() -> None:
    """A chunk that ends before the last known token is not sampled."""
    assert not share("a", 9, 0, 8).is_sampled
    assert share("a", 9, 8, 9).is_sampled


@pytest.mark.parametrize(
    ("start", "stop", "rows", "tokens"),
    [(0, 3, [5, 6, 7], [101, 102, 103]), (2, 6, [5, 6], [103, 104]), (4, 6, [], []), (5, 6, [], [])],
)
def test_a_position_tells_of_the_next_token_of_the_prompt(start, stop, rows, tokens) -> None:
    """Rows of a chunk up to the one before the prompt's last token, each with the token after it."""
    assert prompt_rows(share("a", 6, start, stop), 5, 5) == (rows, tokens)


@pytest.mark.parametrize(
    ("each", "words"),
    [
        (share("a", 4, 2, 2), "request a is to run positions 2 to 2 and has 4 tokens"),
        (share("a", 4, 2, 5, [1, 2]), "has 4 tokens: expected at least one, all of them known"),
        (share("a", 9, 4, 9, [1, 2]), "request a is to run up to position 9 and its 2 blocks hold 8"),
    ],
)
def test_what_cannot_run_is_refused(each, words) -> None:
    """No token, unknown tokens and tokens without a slot are the scheduler's fault, by name."""
    with pytest.raises(ProtocolError, match=words):
        build_inputs([each], 4)
