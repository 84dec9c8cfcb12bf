"""A bitmask is checked before it is believed."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aexec.errors import ProtocolError
from aexec.messages.batch import GrammarOutput
from aexec.model.sampling.bitmask import allowed_tokens, checked_bitmask, grammar_rows


@pytest.mark.parametrize(
    ("bitmask", "found"),
    [
        (np.zeros((1, 3), dtype=np.int32), r"int32 \[1, 3\]"),
        (np.zeros((2, 2), dtype=np.int32), r"int32 \[2, 2\]"),
        (np.zeros((1, 2), dtype=np.int64), r"int64 \[1, 2\]"),
    ],
)
def test_a_bitmask_that_does_not_fit_is_refused(bitmask: np.ndarray, found: str) -> None:
    """The error names what came and what was expected."""
    with pytest.raises(ProtocolError, match=rf"{found}: expected int32 \[1, 2\] for 1 requests and a vocabulary of 40"):
        checked_bitmask(GrammarOutput(request_ids=["a"], bitmask=bitmask), 40)


def test_rows_are_found_by_request() -> None:
    """Order may differ, and requests that are not in the batch are passed over."""
    grammar = GrammarOutput(request_ids=["c", "gone", "a"], bitmask=np.zeros((3, 1), dtype=np.int32))
    assert grammar_rows(["a", "b", "c"], grammar) == {0: 2, 2: 0}
    assert grammar_rows(["a"], None) == {}


@settings(max_examples=40, deadline=None, database=None)
@given(st.integers(1, 100).flatmap(lambda size: st.lists(st.booleans(), min_size=size, max_size=size)))
def test_a_row_unpacks_to_what_was_packed(allowed: list[bool]) -> None:
    """Bit t % 32 of word t // 32 is token t, the sign bit too."""
    words = [0] * -(-len(allowed) // 32)
    for token, bit in enumerate(allowed):
        words[token // 32] |= bit << (token % 32)
    row = np.array(words, dtype=np.uint32).view(np.int32)
    assert allowed_tokens(row, len(allowed)).tolist() == allowed
