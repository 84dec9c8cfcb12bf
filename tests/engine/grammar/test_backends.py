"""What every library must do that is installed here."""

from __future__ import annotations

import json
from importlib import import_module
from importlib.util import find_spec

import numpy as np
import pytest

from aexec.engine.grammar.base import GrammarError, GrammarSpec, Vocabulary
from aexec.engine.grammar.manager import BACKENDS

HERE = [name for name in BACKENDS if find_spec(name)]
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
SPECS = {
    "regex": (GrammarSpec("regex", "[ab]{2}c+"), "abc", ["cba", "ab "]),
    "choice": (GrammarSpec("choice", '["yes", "no", "n\\"ö\\n"]'), 'n"ö\n', ["maybe", "yess"]),
    "json_schema": (
        GrammarSpec("json_schema", json.dumps(SCHEMA)),
        '{"name": "Ann", "age": 42}',
        ['{"name": 3', "[", '{\n"'],
    ),
    "whitespace": (GrammarSpec("json_schema", '{"type": "array"}', whitespace=True), "[1,\n\n  2]", ["{"]),
}
GRAMMARS = {"llguidance": 'start: "a" b\nb: /[0-9]/ "!"', "xgrammar": 'root ::= "a" b\nb ::= [0-9] "!"'}


def open_backend(name, vocabulary):
    module, _, attribute = BACKENDS[name][0].partition(":")
    return getattr(import_module(module), attribute)(vocabulary)


@pytest.fixture(params=HERE)
def backend(request, vocabulary):
    """Of bytes and an end token."""
    return open_backend(request.param, vocabulary)


def compiled(backend, spec):
    return backend.load(backend.prepare(spec))


def row_of(grammar, vocabulary):
    row = np.zeros(vocabulary.num_words, dtype=np.int32)
    grammar.fill(row)
    return row


@pytest.mark.parametrize("kind", SPECS)
def test_a_text_of_the_grammar_passes_token_by_token(backend, vocabulary, allowed, kind):
    """Each of its tokens is allowed where it comes; at its end the end token is."""
    spec, text, _ = SPECS[kind]
    grammar = compiled(backend, spec)
    for token in text.encode():
        assert token in allowed(row_of(grammar, vocabulary))
        assert grammar.accept([token]) == 1
    assert 256 in allowed(row_of(grammar, vocabulary))


@pytest.mark.parametrize("kind", SPECS)
def test_other_texts_stop_at_the_first_token_that_may_not_come(backend, vocabulary, allowed, kind):
    """The mask forbids what ``accept`` refuses, and the grammar stays where it was."""
    spec, _, others = SPECS[kind]
    for text in others:
        grammar = compiled(backend, spec)
        tokens = list(text.encode())
        count = grammar.accept(tokens)
        assert count < len(tokens)
        assert tokens[count] not in allowed(row_of(grammar, vocabulary))


def test_a_grammar_in_the_librarys_own_notation(backend, vocabulary, allowed):
    """Lark for one, EBNF for the other."""
    name = next(name for name in HERE if name in type(backend).__module__)
    grammar = compiled(backend, GrammarSpec("grammar", GRAMMARS[name]))
    assert allowed(row_of(grammar, vocabulary)) == list(b"a")
    assert grammar.accept(list(b"a7!")) == 3
    assert grammar.is_terminated


def test_it_is_terminated_when_nothing_can_follow(backend):
    """Not where the text may end and may go on."""
    closed, open_ended = compiled(backend, GrammarSpec("regex", "ab")), compiled(backend, GrammarSpec("regex", "ab+"))
    assert not closed.is_terminated
    assert (closed.accept(list(b"ab")), open_ended.accept(list(b"ab"))) == (2, 2)
    assert closed.is_terminated
    assert not open_ended.is_terminated


def test_rolling_back_is_as_if_nothing_had_come(backend, vocabulary):
    """From the end of the text too."""
    grammar = compiled(backend, GrammarSpec("regex", "abcd"))
    grammar.accept(list(b"ab"))
    before = row_of(grammar, vocabulary)
    grammar.accept(list(b"cd"))
    assert grammar.is_terminated
    grammar.rollback(2)
    assert not grammar.is_terminated
    assert (row_of(grammar, vocabulary) == before).all()


def test_a_fork_begins_at_the_beginning(backend, vocabulary):
    """Whichever way the other has gone, and it goes its own."""
    grammar = compiled(backend, GrammarSpec("regex", "abcd"))
    first = row_of(grammar, vocabulary)
    grammar.accept(list(b"abc"))
    fork = grammar.fork()
    assert (row_of(fork, vocabulary) == first).all()
    fork.accept(list(b"a"))
    assert grammar.accept(list(b"d")) == 1


@pytest.mark.parametrize(
    "spec",
    [
        GrammarSpec("regex", "((("),
        GrammarSpec("json_schema", '{"type": "strnig"}'),
        GrammarSpec("json_schema", "{"),
        GrammarSpec("grammar", "nothing that anybody reads ::"),
    ],
    ids=lambda spec: spec.text,
)
def test_what_does_not_compile_says_why(backend, spec):
    """In the library's words."""
    with pytest.raises(GrammarError, match=r"\w{3}"):
        backend.prepare(spec)


@pytest.mark.parametrize("name", HERE)
@pytest.mark.parametrize("padding", [0, 50])
@pytest.mark.parametrize("kind", ["regex", "choice", "json_schema"])
def test_the_tokens_of_a_tokenizer_are_what_they_spell(name, padding, kind, hub_tokens, allowed):
    """Each token that the tokenizer makes of a text is allowed; special ones, and ids past its own, never are."""
    end = hub_tokens.token_to_id("<|end|>")
    size = hub_tokens.get_vocab_size() + padding
    vocabulary = Vocabulary(size, (end,), hub_tokens.to_str())
    spec, text, _ = SPECS[kind]
    grammar = compiled(open_backend(name, vocabulary), spec)
    for token in hub_tokens.encode(text).ids:
        row = allowed(row_of(grammar, vocabulary))
        assert token in row
        assert max(row) < end
        assert grammar.accept([token]) == 1
    assert end in allowed(row_of(grammar, vocabulary))


@pytest.mark.parametrize("name", HERE)
@pytest.mark.parametrize("size", [256, 512])
def test_a_model_without_an_end_token_can_have_a_grammar(name, size, allowed):
    """The row has the model's width, and where the text is whole nothing may come."""
    vocabulary = Vocabulary(size, ())
    grammar = compiled(open_backend(name, vocabulary), GrammarSpec("regex", "ab"))
    assert allowed(row_of(grammar, vocabulary)) == [97]
    grammar.accept(list(b"ab"))
    assert grammar.is_terminated
