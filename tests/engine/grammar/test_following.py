from __future__ import annotations

import threading

import numpy as np
import pytest

from aexec.engine.grammar.base import GrammarError, Vocabulary
from aexec.engine.grammar.following import RequestGrammar, end_bits


def filled(grammar, vocabulary, text=b""):
    row = np.zeros(vocabulary.num_words, dtype=np.int32)
    grammar.fill(list(text), row)
    return row


def test_it_comes_to_where_the_tokens_are(scripted, vocabulary, allowed):
    """Whether they are told one by one, several at a time, again, or taken back: only the tokens count."""
    grammar = RequestGrammar(scripted(b"abcd"))
    for tokens, follows in ((b"", b"a"), (b"a", b"b"), (b"abc", b"d"), (b"abc", b"d"), (b"a", b"b"), (b"ab", b"c")):
        grammar.advance(list(tokens))
        assert allowed(filled(grammar, vocabulary, tokens)) == list(follows)
    assert allowed(filled(grammar, vocabulary, b"abc")) == list(b"d")


def test_a_token_that_may_not_come_is_an_error(scripted, vocabulary, allowed):
    """It names the token and the position; up to there all is as it was."""
    grammar = RequestGrammar(scripted(b"abc"))
    with pytest.raises(GrammarError, match="token 120 came at position 2 of the output and may not"):
        grammar.advance(list(b"abx"))
    assert allowed(filled(grammar, vocabulary, b"ab")) == list(b"c")


def test_it_is_whole_where_nothing_can_follow(scripted):
    """With the last token of the text, not with an end token after it."""
    grammar = RequestGrammar(scripted(b"ab"))
    assert not grammar.advance([97])
    assert grammar.advance([97, 98])


def test_the_loop_never_waits_for_a_mask(scripted, vocabulary, allowed):
    """One that nobody waits for any longer may be under way: the next mask makes up for what was missed."""
    gate = threading.Event()
    slow = scripted(b"ab", gate=gate)
    grammar = RequestGrammar(slow)
    late = threading.Thread(target=filled, args=(grammar, vocabulary))
    late.start()
    assert slow.started.wait(10)
    assert not grammar.advance([97])
    gate.set()
    assert allowed(filled(grammar, vocabulary, b"a")) == list(b"b")
    late.join(10)
    assert not late.is_alive()


def test_end_tokens_that_are_ignored_may_not_come(vocabulary, allowed):
    """While anything else may; where nothing else may, they stay."""

    class Anything:
        rows = ([97, 256], [256])

        def fill(self, row):
            for token in self.rows[0]:
                row[token // 32] |= 1 << token % 32
            self.rows = self.rows[1:]

    grammar = RequestGrammar(Anything(), end_bits(vocabulary))
    assert allowed(filled(grammar, vocabulary)) == [97]
    assert allowed(filled(grammar, vocabulary)) == [256]


def test_end_bits_are_a_row_of_a_bitmask(allowed):
    """The highest bit of a word among them."""
    assert allowed(end_bits(Vocabulary(100, (0, 31, 99)))) == [0, 31, 99]
    assert allowed(end_bits(Vocabulary(33, ()))) == []
