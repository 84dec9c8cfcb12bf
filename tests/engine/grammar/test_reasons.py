"""What a user reads when the library refuses a grammar: its reason, and nothing of its inside."""

from __future__ import annotations

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
