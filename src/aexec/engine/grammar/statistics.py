"""Grammars in numbers."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ("GrammarStatistics",)


class GrammarStatistics(NamedTuple):
    """Grammars in numbers, which count from the start.

    Attributes:
        num_compiled: Grammars that were compiled.
        num_refused: Grammars that were not, for whatever reason.
        num_cached: Compiled grammars that are kept now.
        num_hits: Requests whose grammar was kept.
        compile_seconds: Seconds of compilation, and of waiting for a compiler.
        num_masks: Bitmasks that were filled.
        num_rows: Rows of them.
        mask_seconds: Seconds from asking for a bitmask to having it.
        num_compilers: Processes that compile, or wait to.
        num_late: Threads that work on rows nobody waits for any longer.
    """

    num_compiled: int = 0
    num_refused: int = 0
    num_cached: int = 0
    num_hits: int = 0
    compile_seconds: float = 0.0
    num_masks: int = 0
    num_rows: int = 0
    mask_seconds: float = 0.0
    num_compilers: int = 0
    num_late: int = 0
