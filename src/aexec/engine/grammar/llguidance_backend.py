"""Grammars by the ``llguidance`` library: JSON schema, regular expressions, Lark and GBNF.

The library is lazy, so that most grammars compile in a millisecond, and has limits of its own
for the work of each mask. It lets other threads run while it works.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from importlib import import_module
from typing import Any

import numpy as np

from aexec.engine.grammar.base import Bitmask, GrammarError, GrammarSpec, Vocabulary

__all__ = ("LLGuidanceBackend", "LLGuidanceGrammar")

llguidance: Any = import_module("llguidance")  # which need not be there when types are checked

_NUM_BYTES = 256
_MOST_STATES = 100_000  # of a lexer, at 1 to 2 kB each
_MOST_REASON = 400  # characters of the library's reason that a user is told
_INSIDE = re.compile(r"\n<(?:state|non-verbose|backtrace)")  # where a reason ends, and the library's inside begins
_TOO_LARGE = re.compile(r"too (?:large|big)|symbols\.len\(\) <")  # in the library's words; a panic is the last
_NOTHING_FITS = "NoExtensionBias"  # the library's name for it
_Matcher = Any  # the library's types are stubs without a marker for all of it


class LLGuidanceBackend:
    """The library for one vocabulary; making it takes some 0.2 s for 50,000 tokens."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        ends = list(vocabulary.end_token_ids) or [vocabulary.size]  # it must have one: one that no row has room for
        size = max(vocabulary.size, max(ends) + 1)
        source: Any = vocabulary.tokenizer_json
        if source is None:
            source = _Bytes(size, ends)
        self._tokenizer: Any = llguidance.LLTokenizer(source, n_vocab=size, eos_token=ends)
        self._limits: Any = llguidance.LLParserLimits(max_lexer_states=_MOST_STATES, verbose_errors=False)

    def __repr__(self) -> str:
        """As in ``<LLGuidanceBackend: 49152 tokens>``."""
        return f"<LLGuidanceBackend: {self._vocabulary.size} tokens>"

    def prepare(self, spec: GrammarSpec) -> str:
        """Compile it and make its first mask, which is where a lazy library finds out; returns its own notation.

        Raises:
            GrammarError: It does not compile, or it is too complex.
        """
        prepared = _notation(spec)
        row = np.zeros(self._vocabulary.num_words, dtype=np.int32)
        try:
            grammar = self.load(prepared)
            grammar.fill(row)
        except GrammarError as error:
            raise _with_size(error, spec) from None
        if not row.any() and self._vocabulary.end_token_ids:
            raise GrammarError("no text of this vocabulary satisfies it")
        return prepared

    def load(self, prepared: str) -> LLGuidanceGrammar:
        """Compile it here.

        Raises:
            GrammarError: It does not compile.
        """
        matcher = llguidance.LLMatcher(self._tokenizer, prepared, log_level=0, limits=self._limits)
        _raise_error(matcher)
        return LLGuidanceGrammar(matcher, self._tokenizer.vocab_size)


class LLGuidanceGrammar:
    """One text on its way through a grammar.

    Args:
        origin: The library's matcher at the beginning; never moved.
        vocab_size: Of the library's tokenizer, which may have an end token more than the model.
    """

    def __init__(self, origin: _Matcher, vocab_size: int) -> None:
        self._origin, self._vocab_size = origin, vocab_size
        self._matcher: _Matcher = origin.deep_copy()

    def __repr__(self) -> str:
        """As in ``<LLGuidanceGrammar: NotStopped>``."""
        return f"<LLGuidanceGrammar: {self._matcher.stop_reason()}>"

    @property
    def is_terminated(self) -> bool:
        """Nothing can follow."""
        return bool(self._matcher.is_stopped()) and not self._matcher.is_error()

    def fill(self, row: Bitmask) -> None:
        """Write the next tokens.

        Raises:
            GrammarError: It is too complex from here on.
        """
        own = row if len(row) == -(-self._vocab_size // 32) else np.zeros(len(row) + 1, dtype=np.int32)
        self._matcher.unsafe_compute_mask_ptr(own.ctypes.data, own.nbytes)
        _raise_error(self._matcher)
        if own is not row:
            row[:] = own[: len(row)]

    def accept(self, token_ids: Sequence[int]) -> int:
        """Go on; returns how many of the tokens may come."""
        return int(self._matcher.try_consume_tokens(list(token_ids)))

    def rollback(self, num_tokens: int) -> None:
        """Go back.

        Raises:
            GrammarError: The library could not.
        """
        if num_tokens and not self._matcher.rollback(num_tokens):
            _raise_error(self._matcher)

    def fork(self) -> LLGuidanceGrammar:
        """Another one at the beginning."""
        return LLGuidanceGrammar(self._origin, self._vocab_size)


class _Bytes:
    """A vocabulary of bytes as the library reads one."""

    bos_token_id = None
    is_tokenizer_wrapper = True

    def __init__(self, size: int, ends: Sequence[int]) -> None:
        self.eos_token_id = ends[0]
        self.tokens = [bytes((each,)) for each in range(min(size, _NUM_BYTES))] + [b""] * (size - _NUM_BYTES)
        for end in ends:
            self.tokens[end] = b"<end>"
        self.special_token_ids = list(ends)

    def __call__(self, text: bytes | str) -> list[int]:
        """Its tokens."""
        return list(text.encode() if isinstance(text, str) else text)


def _notation(spec: GrammarSpec) -> str:
    """The grammar as the library writes it down."""
    if spec.kind == "json_schema":
        return _schema_notation(spec)
    try:
        if spec.kind == "regex":
            return str(llguidance.LLMatcher.grammar_from_regex(spec.text))
        if spec.kind == "choice":
            choices = (json.dumps(text, ensure_ascii=False) for text in json.loads(spec.text))
            return str(llguidance.LLMatcher.grammar_from_lark(f"start: {' | '.join(choices)}"))
        return str(llguidance.grammar_from("grammar", spec.text))
    except ValueError as error:
        raise GrammarError(str(error)) from None


def _schema_notation(spec: GrammarSpec) -> str:
    try:
        schema = json.loads(spec.text)
    except (ValueError, RecursionError) as error:
        raise GrammarError(f"it is no JSON: {error}") from None
    if not isinstance(schema, dict):
        raise GrammarError(f"it is a JSON {type(schema).__name__}: expected an object")
    layout: dict[str, Any] = {"whitespace_flexible": spec.whitespace}
    if not spec.whitespace:
        layout |= {"item_separator": ", ", "key_separator": ": "}
    return str(llguidance.LLMatcher.grammar_from_json_schema(spec.text, defaults=layout))


def _with_size(error: GrammarError, spec: GrammarSpec) -> GrammarError:
    """Where a limit of the library's own is passed: how large the grammar is, and what to do."""
    if _TOO_LARGE.search(str(error)) is None:
        return error
    return GrammarError(
        f"it is too large for llguidance, which compiles some hundred thousand characters at most, depending on what "
        f"they say; it has {len(spec.text):,}: ask for less at once, in several requests (the library says: {error})"
    )


def _raise_error(matcher: _Matcher) -> None:
    if matcher.is_error():
        reason = _INSIDE.split(str(matcher.get_error()))[0].strip()
        reason = "nothing satisfies it" if reason == _NOTHING_FITS else reason
        raise GrammarError(reason if len(reason) <= _MOST_REASON else f"{reason[: _MOST_REASON - 3]}...")
