"""Vocabularies, and grammars that do as they are told."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from aexec.engine.grammar.base import GrammarError, Vocabulary

END = 256


class ScriptedGrammar:
    """Allows the next byte of a text, and an end token after it; may be slow, or fail."""

    def __init__(self, text=b"abc", *, gate=None, error=None):
        self.text, self.place, self.gate, self.error = text, 0, gate, error
        self.started = threading.Event()

    @property
    def is_terminated(self):
        return self.place >= len(self.text)

    def fill(self, row):
        self.started.set()
        if self.gate is not None:
            self.gate.wait(20)
        if self.error is not None:
            raise self.error
        token = END if self.is_terminated else self.text[self.place]
        row[token // 32] |= np.int32(1 << token % 32) if token % 32 < 31 else np.int32(-(2**31))

    def accept(self, token_ids):
        for count, token in enumerate(token_ids):
            if self.is_terminated or token != self.text[self.place]:
                return count
            self.place += 1
        return len(token_ids)

    def rollback(self, num_tokens):
        self.place -= num_tokens

    def fork(self):
        return ScriptedGrammar(self.text)


@pytest.fixture
def vocabulary():
    """Bytes, and one end token."""
    return Vocabulary(512, (END,))


@pytest.fixture(scope="session")
def hub_tokens():
    """A small tokenizer of the ``tokenizers`` library: bytes, a few words, and an end token."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("y", "e"), ("ye", "s"), ("n", "o"), ("{", '"'), ('"', ":"), ("\u0120", '"')]
    words = [*letters, *(left + right for left, right in merges)]
    tokens = Tokenizer(models.BPE({word: number for number, word in enumerate(words)}, merges))
    tokens.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokens.decoder = decoders.ByteLevel()
    tokens.add_special_tokens([AddedToken("<|end|>", special=True)])
    return tokens


@pytest.fixture
def too_complex():
    """A library's reason."""
    return GrammarError("too many states")


def allowed(row):
    """The tokens of a row."""
    return np.unpackbits(row.view(np.uint8), bitorder="little").nonzero()[0].tolist()


@pytest.fixture(name="allowed")
def allowed_of():
    """From a row of a bitmask to the tokens that it allows."""
    return allowed


@pytest.fixture
def scripted():
    """Makes grammars that do as they are told."""
    return ScriptedGrammar
