"""A request's grammar: it follows the request's tokens, whatever becomes of them in between."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np

from aexec.engine.grammar.base import Bitmask, Grammar, GrammarError, Vocabulary

__all__ = ("RequestGrammar", "end_bits")


class RequestGrammar:
    """How far one request has come in its grammar.

    Nothing of it is in the workers, so a preemption or a new group of workers changes nothing
    here: before each mask it is brought to where the request's tokens are.

    A mask is made on a thread, and one that nobody waits for any longer may still be under way
    when the next is asked for: they take turns, and the loop never waits for its turn.

    Args:
        grammar: At its beginning; it is not shared.
        ends: Bits of the end tokens if they may not come (``ignore_eos``); None: they may.
    """

    __slots__ = ("_ends", "_grammar", "_num_followed", "_turn")

    def __init__(self, grammar: Grammar, ends: Bitmask | None = None) -> None:
        self._grammar, self._ends = grammar, ends
        self._num_followed = 0
        self._turn = threading.Lock()

    def __repr__(self) -> str:
        """As in ``<RequestGrammar: after 12 tokens>``."""
        return f"<RequestGrammar: after {self._num_followed} tokens>"

    def advance(self, token_ids: Sequence[int]) -> bool:
        """Come to where ``token_ids`` lead, which are all of the output, from wherever it is; never waits.

        Returns:
            True once nothing can follow but an end token; False too while a mask is being made,
            which then is brought to this place with the next.

        Raises:
            GrammarError: One of them may not come.
        """
        if not self._turn.acquire(blocking=False):
            return False
        try:
            self._follow(token_ids)
            return self._grammar.is_terminated
        finally:
            self._turn.release()

    def fill(self, token_ids: Sequence[int], row: Bitmask) -> None:
        """Write which tokens may come after ``token_ids``, which are all of the output; for a thread.

        Raises:
            GrammarError: One of them may not come, or the library gave up.
        """
        with self._turn:
            self._follow(token_ids)
            self._grammar.fill(row)
        if self._ends is not None:
            going_on = row & ~self._ends
            if going_on.any():
                row[:] = going_on

    def _follow(self, token_ids: Sequence[int]) -> None:
        if self._num_followed > len(token_ids):
            self._grammar.rollback(self._num_followed - len(token_ids))
            self._num_followed = len(token_ids)
        new = token_ids[self._num_followed :]
        if not new:
            return
        accepted = self._grammar.accept(new)
        self._num_followed += accepted
        if accepted < len(new):
            raise GrammarError(f"token {new[accepted]} came at position {self._num_followed} of the output and may not")


def end_bits(vocabulary: Vocabulary) -> Bitmask:
    """The end tokens of a vocabulary as a row of a bitmask."""
    words = np.zeros(vocabulary.num_words, dtype=np.uint32)
    for token_id in vocabulary.end_token_ids:
        words[token_id // 32] |= np.uint32(1 << token_id % 32)
    return words.view(np.int32)
