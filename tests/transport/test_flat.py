"""Messages as one string of bytes."""

from __future__ import annotations

import numpy as np
import pytest

from aexec.errors import MessageNotDecoded, MessageTooLarge
from aexec.messages.batch import GrammarOutput
from aexec.messages.step import ExecuteModel, SampleTokens, StepId, StepResult
from aexec.transport import Kind
from aexec.transport.codec import encode
from aexec.transport.flat import flat_size, flatten, restore
from aexec.transport.frames import BadFrame


def there_and_back(value: object) -> object:
    """A value that has travelled."""
    encoded = encode(value)
    data = flatten(Kind.MESSAGE, 7, encoded, 1 << 30, "", "")
    assert len(data) == flat_size(encoded)
    frame = restore("road", data)
    assert (frame.kind, frame.call, frame.error) == (Kind.MESSAGE, 7, None)
    return frame.value


@pytest.mark.parametrize(
    "value",
    [
        None,
        5,
        ExecuteModel(StepId(1), {"a": [1]}, 3),
        SampleTokens(StepId(2)),
        StepResult(StepId(3), [1, 2]),
        "x" * 50000,
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_travels_arrives(value: object) -> None:
    """Short and long, by msgspec and by pickle."""
    assert there_and_back(value) == value


@pytest.mark.parametrize("size", [3, 100_000])
def test_arrays_that_arrive_are_the_receivers_own(size: int) -> None:
    """Whoever lent the string may have it back, and the receiver may write."""
    array = there_and_back(StepResult(StepId(1), np.arange(size))).output  # type: ignore[attr-defined]
    array[0] = 9
    assert array.tolist() == [9, *range(1, size)]


def test_a_bitmask_arrives() -> None:
    """It is a buffer, or part of the message."""
    for rows in (1, 200):
        grammar = GrammarOutput(request_ids=["a"] * rows, bitmask=np.full((rows, 100), 3, dtype=np.int32))
        arrived = there_and_back(SampleTokens(StepId(1), grammar))
        assert arrived.grammar.bitmask.sum() == rows * 300  # type: ignore[attr-defined]


def test_more_than_may_be_sent_is_refused_with_what_to_do() -> None:
    """Before anything is copied."""
    with pytest.raises(MessageTooLarge) as caught:
        flatten(Kind.REPLY, 1, encode(np.zeros(5000)), 10_000, "the answer of rank 1", "ExecutorConfig.x")
    assert str(caught.value) == (
        "the answer of rank 1: 40,256 bytes, and a message may have 10,000; raise ExecutorConfig.x, or make steps smaller"
    )


class Odd:
    """Pickles, and does not come back."""

    def __reduce__(self) -> tuple[object, ...]:
        return int, ("no number",)


def test_a_value_that_cannot_be_made_is_told_with_its_call() -> None:
    """Its sender hears of it."""
    frame = restore("graph", flatten(Kind.MESSAGE, 3, encode([Odd()]), 1 << 20, "", ""))
    assert frame.call == 3
    assert isinstance(frame.error, MessageNotDecoded)
    assert "channel graph: a MESSAGE of call 3 cannot be decoded here (ValueError" in str(frame.error)


def test_garbage_is_no_message() -> None:
    """A fault of ours."""
    with pytest.raises(BadFrame):
        restore("graph", b"x" * 40)
