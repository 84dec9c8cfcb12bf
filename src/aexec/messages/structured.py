"""What the text of a request has to look like."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from aexec.errors import InvalidRequest

__all__ = ("StructuredOutput",)

_KINDS = ("json_schema", "regex", "choice", "grammar")
_SHOWN = 60  # characters of a value that an error repeats


class StructuredOutput(msgspec.Struct, frozen=True, kw_only=True):
    """The form that a request's output is held to: exactly one of the first four.

    While the request runs, only tokens that continue such a text may be sampled. The request
    ends (``stop``) with the model's end token where the text may end, and by itself where
    nothing more can follow, whatever ``min_tokens`` and ``ignore_eos`` say. ``max_tokens``
    cuts a text off like any other.

    Attributes:
        json_schema: A JSON schema, as a mapping or as JSON text: the output is JSON that it validates.
        regex: A regular expression that the whole output matches.
        choice: The output is one of these texts.
        grammar: A context-free grammar: in Lark's notation for ``llguidance``, which reads
            GBNF too; in EBNF (GBNF) for ``xgrammar``.
        backend: ``llguidance`` or ``xgrammar``; None: the engine's.
        whitespace: JSON may be laid out in any way. By default it stands on one line as
            ``json.dumps`` writes it: small models like to go on with blanks for ever.

    Raises:
        InvalidRequest: None or several of the four are given, or one is of another type.
    """

    json_schema: Mapping[str, Any] | str | None = None
    regex: str | None = None
    choice: tuple[str, ...] | None = None
    grammar: str | None = None
    backend: str | None = None
    whitespace: bool = False

    def __post_init__(self) -> None:
        """Refuse what cannot be meant."""
        given = [kind for kind in _KINDS if getattr(self, kind) is not None]
        if len(given) != 1:
            raise InvalidRequest(
                f"StructuredOutput was given {' and '.join(given) or 'nothing'}: expected exactly one of {', '.join(_KINDS)}"
            )
        self._check_type(given[0])
        if self.backend is not None and not isinstance(self.backend, str):
            raise InvalidRequest(f"backend is {self.backend!r}: expected the name of one, or None")

    @property
    def kind(self) -> str:
        """Which of the four it is."""
        return next(kind for kind in _KINDS if getattr(self, kind) is not None)

    def _check_type(self, kind: str) -> None:
        value = getattr(self, kind)
        if kind == "choice":
            if isinstance(value, str) or not value or not all(isinstance(text, str) and text for text in value):
                raise InvalidRequest(f"choice is {short(value)}: expected one or more texts, none of them empty")
        elif not isinstance(value, (str, Mapping) if kind == "json_schema" else str):
            expected = "a mapping or JSON text" if kind == "json_schema" else "a text"
            raise InvalidRequest(f"{kind} is {short(value)}: expected {expected}")


def short(value: object) -> str:
    """A value as an error repeats it, which may be anything that a request brought.

    >>> short("a" * 100)[-8:]
    'aaaaa...'
    """
    try:
        text = repr(value)
    except ValueError:  # an integer of thousands of digits
        text = f"<{type(value).__name__} without a repr>"
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}..."
