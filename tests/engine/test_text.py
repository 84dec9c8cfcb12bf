"""No half characters, no part of a stop text, and nothing lost."""

from __future__ import annotations

import doctest

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aexec.engine import text
from aexec.engine.bytes_text import ByteTokenizer
from aexec.engine.text import RequestText, StopTexts, TextDelta
from aexec.errors import InvalidRequest

short_texts = st.text(alphabet="ab", min_size=0, max_size=12)
stop_texts = st.lists(st.text(alphabet="ab", min_size=1, max_size=4), min_size=1, max_size=3)


@given(pieces=st.lists(short_texts, max_size=8), stops=stop_texts)
def test_a_stop_text_is_found_wherever_the_pieces_are_cut(pieces, stops):
    """What is shown is all text before the stop that completes first, and nothing of a stop text."""
    matcher, shown, read = StopTexts(stops), "", ""
    for piece in pieces:
        delta = matcher.feed(piece)
        shown, read = shown + delta.text, read + piece
        assert not any(stop in shown for stop in stops)
        if delta.stop is not None:
            place, first = min((read.find(stop), order) for order, stop in enumerate(stops) if stop in read)
            assert (shown, delta.stop) == (read[:place], stops[first])
            return
        assert not any(stop in read for stop in stops)
    assert shown + matcher.flush() == read


@given(pieces=st.lists(short_texts, max_size=8), stops=stop_texts)
def test_only_what_may_begin_a_stop_text_is_held_back(pieces, stops):
    """Text that cannot become one is shown at once."""
    matcher, shown, read = StopTexts(stops), "", ""
    for piece in pieces:
        delta = matcher.feed(piece)
        if delta.stop is not None:
            return
        shown, read = shown + delta.text, read + piece
        held = read[len(shown) :]
        assert held == "" or any(stop.startswith(held) for stop in stops)


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
    assert output.feed(list(b"abc")) == TextDelta("a", "b")


def test_the_byte_tokenizer_has_a_plain_chat_format():
    """One line for each message, then the assistant's turn."""
    messages = [{"role": "user", "content": "Hello"}]
    assert ByteTokenizer().chat_prompt(messages) == "user: Hello\nassistant:"


@pytest.mark.parametrize("messages", [[], "Hello", {"role": "user"}, [{"role": "user"}], [3]])
def test_what_is_no_conversation_is_refused(messages):
    """The error shows the form that is expected."""
    with pytest.raises(InvalidRequest, match=r"expected .*role"):
        ByteTokenizer().chat_prompt(messages)
