from __future__ import annotations

import pytest

from aexec import InvalidRequest, StructuredOutput
from aexec.engine.grammar.base import GrammarSpec
from aexec.engine.grammar.spec import check_size, grammar_spec

LIMIT = 1000


@pytest.mark.parametrize(
    ("given", "spec"),
    [
        ({"regex": "a+"}, GrammarSpec("regex", "a+")),
        ({"grammar": "start: /a/"}, GrammarSpec("grammar", "start: /a/")),
        ({"choice": ("yes", "nö")}, GrammarSpec("choice", '["yes", "nö"]')),
        ({"json_schema": '{"type":"null"}'}, GrammarSpec("json_schema", '{"type":"null"}')),
        ({"json_schema": {"type": "null"}}, GrammarSpec("json_schema", '{"type": "null"}')),
        ({"json_schema": {}, "whitespace": True}, GrammarSpec("json_schema", "{}", whitespace=True)),
        ({"regex": "a", "whitespace": True}, GrammarSpec("regex", "a")),
    ],
)
def test_a_grammar_is_plain_text(given, spec):
    """Of whichever kind; the lay-out matters to JSON alone, so that equal grammars are found to be equal."""
    assert grammar_spec(StructuredOutput(**given), LIMIT) == spec


@pytest.mark.parametrize(
    "given", [{"regex": "a" * 1001}, {"choice": ("b" * 600, "c" * 600)}, {"json_schema": "x" * 5000}]
)
def test_what_is_too_long_is_refused_at_once(given):
    """Before anything walks through it; the error says how long it is and may be."""
    with pytest.raises(InvalidRequest, match=r"has 1,?\d+ characters|has 5,000 characters") as caught:
        check_size(StructuredOutput(**given), LIMIT)
    assert "expected at most 1,000; or open the engine with a larger StructuredOutputConfig.max_bytes" in str(
        caught.value
    )


def test_a_mapping_is_given_up_as_soon_as_it_is_too_large():
    """A schema without an end costs no more than one at the limit."""
    read = []

    class Endless(dict):
        def items(self):
            for number in range(10**9):
                read.append(number)
                yield f"key{number}", number

    schema = StructuredOutput(json_schema=Endless(a=1))
    check_size(schema, LIMIT)
    with pytest.raises(InvalidRequest, match="json_schema has more than 1,000 bytes"):
        grammar_spec(StructuredOutput(json_schema={"properties": Endless(a=1)}), LIMIT)
    assert len(read) < LIMIT


def test_bytes_are_counted():
    """A text of few characters may be long."""
    text = "\N{EURO SIGN}" * 500
    check_size(StructuredOutput(regex=text), LIMIT)
    with pytest.raises(InvalidRequest, match="regex has 1,500 bytes"):
        grammar_spec(StructuredOutput(regex=text), LIMIT)


@pytest.mark.parametrize("schema", [{"a": object()}, {"a": {1, 2}}])
def test_a_mapping_that_is_no_json_is_refused(schema):
    """The reason is Python's."""
    with pytest.raises(InvalidRequest, match="json_schema is no JSON: Object of type"):
        grammar_spec(StructuredOutput(json_schema=schema), LIMIT)


def test_a_mapping_without_an_end_is_refused():
    """It holds itself, or is too deep for anybody."""
    schema: dict = {}
    schema["self"] = schema
    with pytest.raises(InvalidRequest, match="json_schema is no JSON"):
        grammar_spec(StructuredOutput(json_schema=schema), LIMIT)


def test_a_text_that_cannot_be_encoded_is_refused():
    """Half a surrogate pair is no text."""
    with pytest.raises(InvalidRequest, match="regex is no Unicode text"):
        grammar_spec(StructuredOutput(regex="\ud800"), LIMIT)
