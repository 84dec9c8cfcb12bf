"""What a grammar is, what a library must offer, and the vocabulary that both speak about."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

__all__ = ("Bitmask", "Grammar", "GrammarBackend", "GrammarError", "GrammarSpec", "GrammarTooSlow", "Vocabulary")

Bitmask = NDArray[np.int32]


class GrammarError(ValueError):
    """A grammar that does not compile, or cannot go on; the text is the reason."""


class GrammarTooSlow(GrammarError):
    """A grammar that did not compile within its time."""


class GrammarSpec(NamedTuple):
    """What is to be compiled, as plain text; it also is the key of a compiled grammar.

    Attributes:
        kind: ``json_schema``, ``regex``, ``choice`` or ``grammar``.
        text: The schema as JSON text, the expression, the choices as a JSON list, or the grammar.
        whitespace: Of JSON: any lay-out, not only one line.
    """

    kind: str
    text: str
    whitespace: bool = False


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Token ids, and what they spell.

    Attributes:
        size: Width of the logits; ids are below it.
        end_token_ids: The model's end tokens, which may come where the text may end; may be empty.
        tokenizer_json: The text of a ``tokenizer.json``; None: ids 0 to 255 are the bytes of
            UTF-8, and whatever is above has no text.
    """

    size: int
    end_token_ids: tuple[int, ...]
    tokenizer_json: str | None = None

    @property
    def num_words(self) -> int:
        """Words of int32 of one row of a bitmask."""
        return -(-self.size // 32)


class Grammar(Protocol):
    """A compiled grammar, and how far one text has come in it. One thread at a time."""

    def fill(self, row: Bitmask) -> None:
        """Write which tokens may come next: bit ``t % 32`` of word ``t // 32`` allows token ``t``.

        Args:
            row: ``[num_words]``, contiguous.

        Raises:
            GrammarError: The library gave up on it, as when it is too complex from here on.
        """
        ...

    def accept(self, token_ids: Sequence[int]) -> int:
        """Go on by these tokens; returns how many may come, the first that may not ending it."""
        ...

    def rollback(self, num_tokens: int) -> None:
        """Take back the last tokens that were accepted."""
        ...

    @property
    def is_terminated(self) -> bool:
        """True once the text is whole and nothing can follow but an end token."""
        ...

    def fork(self) -> Grammar:
        """Another one of the same grammar, at its beginning."""
        ...


class GrammarBackend(Protocol):
    """One library, for one vocabulary. Its methods block; it is made where it is used."""

    def prepare(self, spec: GrammarSpec) -> str:
        """Do whatever may take long, or for ever; runs in the process for it.

        Returns:
            What :meth:`load` takes.

        Raises:
            GrammarError: It does not compile; the text is the library's reason.
        """
        ...

    def load(self, prepared: str) -> Grammar:
        """The grammar, at its beginning; runs in the engine's process, on a thread.

        Raises:
            GrammarError: What was prepared cannot be used here.
        """
        ...
