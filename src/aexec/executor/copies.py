"""One failure, many callers: each gets an error of its own, for notes and tracebacks are written onto it."""

from __future__ import annotations

import copy
from typing import TypeVar

__all__ = ("own_copy",)

E = TypeVar("E", bound=BaseException)


def own_copy(error: E, *notes: str, keep_notes: bool = True) -> E:
    """``error`` for one more caller.

    Args:
        error: What has happened.
        notes: Lines to add.
        keep_notes: With the notes that it has.
    """
    own = copy.copy(error)
    own.__notes__ = [*(getattr(error, "__notes__", ()) if keep_notes else ()), *notes]
    own.__traceback__ = own.__cause__ = own.__context__ = None
    return own
