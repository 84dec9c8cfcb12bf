"""From what a user asked for to what is compiled: plain text of a bounded size. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import cast

from aexec.engine.grammar.base import GrammarSpec
from aexec.errors import InvalidRequest
from aexec.messages.structured import StructuredOutput

__all__ = ("check_size", "grammar_spec")


def check_size(structured: StructuredOutput, max_bytes: int) -> None:
    """Refuse what is certainly too large, at no cost.

    Raises:
        InvalidRequest: Its text is longer than ``max_bytes``.
    """
    value = getattr(structured, structured.kind)
    size = sum(map(len, value)) if structured.kind == "choice" else len(value) if isinstance(value, str) else 0
    if size > max_bytes:
        raise _too_large(structured.kind, f"{size:,} characters", max_bytes)


def grammar_spec(structured: StructuredOutput, max_bytes: int) -> GrammarSpec:
    """The text of a grammar; walks through a schema that is a mapping, so it is for a thread.

    Raises:
        InvalidRequest: It is too large, or a mapping that is no JSON.
    """
    kind, value = structured.kind, getattr(structured, structured.kind)
    if kind == "json_schema" and isinstance(value, Mapping):
        text = _json_text(dict(cast("Mapping[str, object]", value)), max_bytes)
    else:
        text = json.dumps(value, ensure_ascii=False) if kind == "choice" else value
    try:
        size = len(text.encode())
    except UnicodeEncodeError as error:
        raise InvalidRequest(f"{kind} is no Unicode text ({error.reason})") from None
    if size > max_bytes:
        raise _too_large(kind, f"{size:,} bytes", max_bytes)
    return GrammarSpec(kind, text, structured.whitespace and kind == "json_schema")


def _json_text(schema: Mapping[str, object], max_bytes: int) -> str:
    """The schema as JSON, given up as soon as it is too large: in pieces, so that other threads have their turn."""
    try:
        return "".join(_bounded(json.JSONEncoder(ensure_ascii=False).iterencode(schema), max_bytes))
    except (TypeError, ValueError, RecursionError) as error:
        if isinstance(error, InvalidRequest):
            raise
        raise InvalidRequest(f"json_schema is no JSON: {error}") from None


def _bounded(pieces: Iterable[str], max_bytes: int) -> Iterable[str]:
    size = 0
    for piece in pieces:
        size += len(piece)
        if size > max_bytes:
            raise _too_large("json_schema", f"more than {max_bytes:,} bytes", max_bytes)
        yield piece


def _too_large(kind: str, size: str, max_bytes: int) -> InvalidRequest:
    return InvalidRequest(
        f"{kind} has {size}: expected at most {max_bytes:,}; or open the engine with a larger "
        "StructuredOutputConfig.max_bytes"
    )
