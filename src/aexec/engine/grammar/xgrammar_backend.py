"""Grammars by the ``xgrammar`` library: JSON schema, regular expressions, EBNF.

The library compiles eagerly, which may take seconds, and what it compiled can travel: so it is
compiled in the process for it, and read here. It needs torch.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib import import_module
from typing import Any

import numpy as np

from aexec.engine.grammar.base import Bitmask, GrammarError, GrammarSpec, Vocabulary

__all__ = ("XGrammarBackend", "XGrammarGrammar")

xgrammar: Any = import_module("xgrammar")  # which need not be there when types are checked

_NUM_BYTES = 256


class XGrammarBackend:
    """The library for one vocabulary."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._tokens: Any = _tokenizer_info(vocabulary)

    def __repr__(self) -> str:
        """As in ``<XGrammarBackend: 49152 tokens>``."""
        return f"<XGrammarBackend: {self._vocabulary.size} tokens>"

    def prepare(self, spec: GrammarSpec) -> str:
        """Compile it, and make its first mask; returns the library's JSON of it.

        Raises:
            GrammarError: It does not compile.
        """
        compiler: Any = xgrammar.GrammarCompiler(self._tokens, max_threads=1, cache_enabled=False)
        try:
            compiled = _compile(compiler, spec)
        except Exception as error:  # noqa: BLE001 - it raises RuntimeError, ValueError, and kinds of its own
            raise GrammarError(str(error).strip() or type(error).__name__) from None
        row = np.zeros(self._vocabulary.num_words, dtype=np.int32)
        XGrammarGrammar(compiled, self._vocabulary).fill(row)
        return str(compiled.serialize_json())

    def load(self, prepared: str) -> XGrammarGrammar:
        """Read it.

        Raises:
            GrammarError: It was prepared for another vocabulary.
        """
        try:
            compiled: Any = xgrammar.CompiledGrammar.deserialize_json(prepared, self._tokens)
        except RuntimeError as error:
            raise GrammarError(str(error)) from None
        return XGrammarGrammar(compiled, self._vocabulary)


class XGrammarGrammar:
    """One text on its way through a grammar.

    Args:
        compiled: The library's compiled grammar.
        vocabulary: Its tokens.
    """

    def __init__(self, compiled: Any, vocabulary: Vocabulary) -> None:
        self._compiled, self._vocabulary = compiled, vocabulary
        self._matcher: Any = xgrammar.GrammarMatcher(compiled)
        self._is_whole = False

    def __repr__(self) -> str:
        """As in ``<XGrammarGrammar: going on>``."""
        return f"<XGrammarGrammar: {'whole' if self.is_terminated else 'going on'}>"

    @property
    def is_terminated(self) -> bool:
        """Nothing can follow but an end token, or one has come."""
        return self._is_whole or bool(self._matcher.is_terminated())

    def fill(self, row: Bitmask) -> None:
        """Write the next tokens; all of them where the library says that it needs no mask."""
        row[:] = -1
        self._matcher.fill_next_token_bitmask(row[None, :], 0)

    def accept(self, token_ids: Sequence[int]) -> int:
        """Go on; returns how many of the tokens may come."""
        for place, token_id in enumerate(token_ids):
            if self._matcher.is_terminated() or not self._matcher.accept_token(token_id):
                return place
        self._is_whole = self._has_no_more()
        return len(token_ids)

    def rollback(self, num_tokens: int) -> None:
        """Go back."""
        if num_tokens:
            self._matcher.rollback(num_tokens)
            self._is_whole = False

    def fork(self) -> XGrammarGrammar:
        """Another one at the beginning."""
        return XGrammarGrammar(self._compiled, self._vocabulary)

    def _has_no_more(self) -> bool:
        if self._matcher.is_terminated() or not self._matcher.is_completed():
            return False
        row = np.zeros(self._vocabulary.num_words, dtype=np.int32)
        self.fill(row)
        for end in self._vocabulary.end_token_ids:
            row[end // 32] &= ~np.int32(1 << (end % 32) if end % 32 < 31 else -(2**31))
        return not row.any()


def _compile(compiler: Any, spec: GrammarSpec) -> Any:
    if spec.kind == "json_schema":
        return compiler.compile_json_schema(
            spec.text,
            any_whitespace=spec.whitespace,
            separators=None if spec.whitespace else (", ", ": "),
            strict_mode=False,
        )
    if spec.kind == "regex":
        return compiler.compile_regex(spec.text)
    if spec.kind == "choice":
        choices = (json.dumps(text, ensure_ascii=False) for text in json.loads(spec.text))
        return compiler.compile_grammar(f"root ::= {' | '.join(choices)}")
    return compiler.compile_grammar(spec.text)


def _tokenizer_info(vocabulary: Vocabulary) -> Any:
    ends = list(vocabulary.end_token_ids)
    if vocabulary.tokenizer_json is None:
        tokens: list[Any] = [bytes((each,)) for each in range(min(vocabulary.size, _NUM_BYTES))]
        tokens += [b""] * (vocabulary.size - len(tokens))
        return xgrammar.TokenizerInfo(tokens, xgrammar.VocabType.RAW, vocab_size=vocabulary.size, stop_token_ids=ends)
    from tokenizers import Tokenizer

    source = Tokenizer.from_str(vocabulary.tokenizer_json)
    special = {each for each, added in source.get_added_tokens_decoder().items() if added.special}
    tokens = [""] * vocabulary.size
    for text, token_id in source.get_vocab(with_added_tokens=True).items():
        if token_id < vocabulary.size and token_id not in special:
            tokens[token_id] = text
    kind = _vocabulary_kind(json.loads(vocabulary.tokenizer_json).get("decoder") or {})
    return xgrammar.TokenizerInfo(tokens, kind, vocab_size=vocabulary.size, stop_token_ids=ends)


def _vocabulary_kind(decoder: dict[str, Any]) -> Any:
    """How the tokens are written, by what turns them into text again."""
    kinds = {decoder.get("type"), *(each.get("type") for each in decoder.get("decoders", ()))}
    if "ByteLevel" in kinds:
        return xgrammar.VocabType.BYTE_LEVEL
    return xgrammar.VocabType.BYTE_FALLBACK if "ByteFallback" in kinds else xgrammar.VocabType.RAW
