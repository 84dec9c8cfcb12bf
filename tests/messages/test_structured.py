from __future__ import annotations

import pytest

from aexec import InvalidRequest, SamplingParams, StructuredOutput


@pytest.mark.parametrize("kind", ["json_schema", "regex", "choice", "grammar"])
def test_exactly_one_form_is_asked_for(kind):
    """Each of the four alone, and it says which it is."""
    value = {"json_schema": {"type": "object"}, "choice": ("a", "b")}.get(kind, "a")
    assert StructuredOutput(**{kind: value}).kind == kind


@pytest.mark.parametrize("given", [{}, {"regex": "a", "grammar": "start: /a/"}])
def test_none_and_several_are_refused(given):
    """The error says what was given and what is expected."""
    with pytest.raises(InvalidRequest, match="expected exactly one of json_schema, regex, choice, grammar"):
        StructuredOutput(**given)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"regex": 3}, "regex is 3: expected a text"),
        ({"json_schema": [1]}, r"json_schema is \[1\]: expected a mapping or JSON text"),
        ({"choice": "yes"}, "choice is 'yes': expected one or more texts"),
        ({"choice": ()}, r"choice is \(\): expected one or more texts"),
        ({"choice": ("a", "")}, "none of them empty"),
        ({"choice": ("a" * 100, 1)}, r"choice is \('a{55,57}\.\.\.: expected"),
        ({"regex": "a", "backend": 1}, "backend is 1: expected the name of one"),
    ],
)
def test_what_cannot_be_meant_is_refused(given, message):
    """The error names the value and what was expected."""
    with pytest.raises(InvalidRequest, match=message):
        StructuredOutput(**given)


def test_sampling_params_take_nothing_else():
    """A schema that was not wrapped is refused with what to write."""
    with pytest.raises(InvalidRequest, match=r"structured is .*: expected StructuredOutput"):
        SamplingParams(structured={"type": "object"})
