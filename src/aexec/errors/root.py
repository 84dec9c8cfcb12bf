"""The root of all errors, and how one gets a note."""

from __future__ import annotations

from typing import Any

__all__ = ("AexecError", "note")


class AexecError(Exception):
    """The root: ``except AexecError`` catches whatever aexec raises on purpose."""


def note(error: BaseException, text: str) -> Any:
    """Attach a line to an error, once, and return the error, so that it can be raised."""
    if text not in getattr(error, "__notes__", ()):
        error.add_note(text)
    return error
