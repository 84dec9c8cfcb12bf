"""No half characters, no part of a stop text, and nothing lost."""

from __future__ import annotations

import doctest
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aexec.engine import text
from aexec.engine.bytes_text import ByteTokenizer
from aexec.engine.text import RequestText, StopTexts
from aexec.errors import InvalidRequest

short_texts = st.text(alphabet="ab", min_size=0, max_size=12)
stop_texts = st.lists(st.text(alphabet="ab", min_size=1, max_size=4), min_size=1, max_size=3)


def first_stop(whole, stops):
    found = [(whole.find(stop), order) for order, stop in enumerate(stops) if stop in whole]
    return min(found, default=None)


@given(pieces=st.lists(short_texts, max_size=8), stops=stop_texts)
def test_a_stop_text_is_found_wherever_the_pieces_are_cut(pieces, stops):
    """What is shown is the text before the first stop that is complete, to the last character."""
    matcher, shown, stop = StopTexts(stops), "", None
    for piece in pieces:
        delta = matcher.feed(piece)
        shown, stop = shown + delta.text, delta.stop
        if stop is not None:
            break
    read = "".join(itertools.islice(pieces, pieces.index(piece) + 1)) if pieces else ""
    if stop is None:
        whole = "".join(pieces)
        assert first_stop(whole, stops) is None
        assert shown + matcher.flush() == whole
    else:
        assert stop in stops
        assert read.startswith(shown + stop) or "".join(pieces).startswith(shown + stop)
        assert not any(each in shown for each in stops)


@given(pieces=st.lists(short_texts, max_size=8), stops=stop_texts)
def test_no_character_of_a_stop_text_is_shown_before_it_is_sure(pieces, stops):
    """After every piece, what was shown is a beginning of what will be shown in the end."""
    matcher, shown = StopTexts(stops), ""
    whole = "".join(pieces)
    for piece in pieces:
        delta = matcher.feed(piece)
        shown += delta.text
        if delta.stop is not None:
            break
        assert not any(shown.endswith(stop[: len(stop)]) for stop in stops)
    assert whole.startswith(shown)


def test_the_example_in_the_docstring_holds():
    """The doctest of ``StopTexts``."""
    assert doctest.testmod(text).failed == 0


@given(st.text(max_size=20))
def test_bytes_become_text_character_by_character(whole):
    """Each step shows whole characters only, and all of them are the text."""
    tokenizer = ByteTokenizer()
    decoder = tokenizer.decoder([], skip_special_tokens=True)
    shown = ""
    for token_id in tokenizer.encode(whole):
        piece = decoder.step(token_id)
        assert len(piece) <= 1
        shown += piece
    assert shown == whole == tokenizer.decode(tokenizer.encode(whole))


def test_half_a_character_at_the_end_is_dropped():
    """The first two of three bytes are no text."""
    output = RequestText(ByteTokenizer().decoder([], skip_special_tokens=True))
    euro = list("€".encode())
    assert output.feed([65, *euro[:2]]).text + output.flush() == "A"


def test_tokens_above_the_bytes_have_no_text():
    """The dummy's end token, 256, is not shown."""
    output = RequestText(ByteTokenizer().decoder([], skip_special_tokens=True))
    assert output.feed([72, 256, 105]).text == "Hi"


def test_what_was_held_back_for_a_stop_text_is_shown_at_the_end():
    """A request that ends within a beginning of a stop text loses nothing."""
    output = RequestText(ByteTokenizer().decoder([], skip_special_tokens=True), stops=("END",))
    assert output.feed(list(b"the EN")).text == "the "
    assert output.flush() == "EN"


def test_stop_texts_do_not_count_among_the_first_min_tokens():
    """The text of those tokens is shown at once, stop texts in it too."""
    output = RequestText(ByteTokenizer().decoder([], skip_special_tokens=True), stops=("x",), min_tokens=2)
    deltas = [output.feed([ord(letter)]) for letter in "xxax"]
    assert [(delta.text, delta.stop) for delta in deltas] == [("x", None), ("x", None), ("a", None), ("", "x")]


def test_tokens_after_the_stop_text_are_not_turned_into_text():
    """A step that brings several tokens is cut at the stop."""
    output = RequestText(ByteTokenizer().decoder([], skip_special_tokens=True), stops=("b",))
    assert output.feed(list(b"abc")) == ("a", "b")


def test_the_byte_tokenizer_has_a_plain_chat_format():
    """One line for each message, then the assistant's turn."""
    messages = [{"role": "user", "content": "Hello"}]
    assert ByteTokenizer().chat_prompt(messages) == "user: Hello\nassistant:"


@pytest.mark.parametrize("messages", [[], "Hello", {"role": "user"}, [{"role": "user"}], [3]])
def test_what_is_no_conversation_is_refused(messages):
    """The error shows the form that is expected."""
    with pytest.raises(InvalidRequest, match=r"expected .*role"):
        ByteTokenizer().chat_prompt(messages)
