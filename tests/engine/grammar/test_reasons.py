"""What a user reads when the library refuses a grammar: its reason, and nothing of its inside."""

from __future__ import annotations

import json

import numpy as np
import pytest

from aexec.engine.grammar.base import GrammarError, GrammarSpec, Vocabulary
from aexec.engine.grammar.llguidance_backend import LLGuidanceBackend


@pytest.mark.parametrize("spec", [GrammarSpec("json_schema", '{"$ref": "#"}'), GrammarSpec("grammar", "start: start")])
def test_a_grammar_that_nothing_satisfies_is_refused_in_words(spec):
    """The library's own name for it tells nobody what is wrong."""
    with pytest.raises(GrammarError) as caught:
        LLGuidanceBackend(Vocabulary(512, (256,))).prepare(spec)
    assert str(caught.value) == "nothing satisfies it"


def test_a_reason_ends_before_what_is_meant_for_the_library_s_makers():
    """A lexer that grows too large says so, and no more."""
    backend = LLGuidanceBackend(Vocabulary(512, (256,)))
    grammar = backend.load(backend.prepare(GrammarSpec("regex", "(a|b|ab)*" * 2 + "((x{1,1000}){1,1000}){1,1000}")))
    grammar.accept([ord("x")] * 200)
    with pytest.raises(GrammarError, match="too many expressions") as caught:
        grammar.fill(np.zeros(16, dtype=np.int32))
    assert "<" not in str(caught.value)


@pytest.mark.parametrize("limit", ["schema too large", "symbols too big"])
def test_a_grammar_beyond_the_library_s_limits_is_refused_with_its_size_and_what_to_do(limit):
    """The library's own words name neither."""
    if limit == "schema too large":
        text = json.dumps({"properties": {f"p{place}": {"type": "integer"} for place in range(30_000)}})
        spec = GrammarSpec("json_schema", text)
    else:
        spec = GrammarSpec("grammar", "start: " + " ".join(f'"{place}" [A]' for place in range(23_000)) + "\nA: /a/")
    said = rf"it is too large for llguidance, .*; it has {len(spec.text):,}: ask for less"
    with pytest.raises(GrammarError, match=said) as caught:
        LLGuidanceBackend(Vocabulary(512, (256,))).prepare(spec)
    assert "backtrace" not in str(caught.value)
    assert "\n" not in str(caught.value)
