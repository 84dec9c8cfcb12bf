from __future__ import annotations

import pickle
import threading
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from aexec.errors import MessageNotPortable
from aexec.messages import Message
from aexec.messages.portable import copy_of


class Parcel(Message[None], frozen=True):
    """Anything."""

    content: Any


@dataclass
class Box:
    """A place for something."""

    thing: Any


def test_a_message_arrives_as_an_equal_copy():
    """Types are kept, and nothing is shared."""
    inner = [1, (2, {"a": {3}})]
    copy = copy_of(Parcel(inner))
    assert copy == Parcel(inner)
    assert copy.content is not inner


def test_an_array_is_copied_with_its_values():
    """It can be written to, and the one that was sent stays as it is."""
    array = np.arange(6, dtype=np.int32).reshape(2, 3)
    copy = copy_of(Parcel(array)).content
    np.testing.assert_array_equal(copy, array)
    copy[0, 0] = 7
    assert array[0, 0] == 0


@pytest.mark.parametrize(
    ("content", "where"),
    [
        (threading.Lock(), "content"),
        ({"a": 1, "lock": threading.Lock()}, "content['lock']"),
        (Box([0, (threading.Lock(),)]), "content.thing[1][0]"),
        (Parcel(threading.Lock()), "content.content"),
    ],
)
def test_what_cannot_travel_is_named(content, where):
    """The way to it, its type, and what the codec said."""
    with pytest.raises(MessageNotPortable) as caught:
        copy_of(Parcel(content))
    assert str(caught.value) == (
        f"Parcel cannot travel: its {where} is a lock (TypeError: cannot pickle '_thread.lock' object); "
        "send plain data in its place"
    )
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_what_cannot_be_read_again_cannot_travel():
    """As an exception whose arguments are not those of its constructor."""
    with pytest.raises(MessageNotPortable, match="its content is a Odd"):
        copy_of(Parcel(Odd(1, 2)))


class Odd(Exception):
    """Pickles with one argument too few."""

    def __init__(self, one: int, two: int) -> None:
        super().__init__(one)
        self.two = two


def test_a_reply_that_cannot_travel_is_itself_named():
    """There is no field then."""
    with pytest.raises(MessageNotPortable, match=r"^a lock cannot travel to another process"):
        copy_of(threading.Lock())
