"""Whether a value can travel between processes, and what of it cannot.

Pickle decides: it is what generic payloads travel by, it takes all that msgspec takes,
and what it gives back is of the same types. Arrays go out of band, as on the way.
"""

from __future__ import annotations

import dataclasses
import pickle
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar, cast

import msgspec

from aexec.errors import MessageNotPortable

__all__ = ("copy_of", "not_portable")

T = TypeVar("T")

DEPTH = 8  # steps into a value, to find what of it cannot travel


def copy_of(value: T) -> T:
    """The value as it arrives in another process: an equal copy.

    Args:
        value: A message or a reply.

    Raises:
        MessageNotPortable: It cannot travel; names the field.
    """
    try:
        return _through(value)
    except Exception as error:
        raise not_portable(value, error, _through) from error


def not_portable(value: Any, error: Exception, through: Callable[[Any], object]) -> MessageNotPortable:
    """The error for a value that cannot travel; names what of it cannot.

    Args:
        value: The value.
        error: What came of trying.
        through: How it was tried; its parts are tried in the same way.
    """
    where, part, cause = _find(value, error, through)
    why = f"{type(cause).__name__}: {cause}"
    return MessageNotPortable(type(value).__name__, where.removeprefix("."), type(part).__name__, why)


def _through(value: T) -> T:
    buffers: list[pickle.PickleBuffer] = []
    frame = pickle.dumps(value, protocol=5, buffer_callback=buffers.append)
    copies = [bytearray(buffer.raw()) for buffer in buffers]
    copied: T = pickle.loads(frame, buffers=copies)  # noqa: S301 - our own bytes, of a moment ago
    return copied


def _find(value: Any, error: Exception, through: Callable[[Any], object]) -> tuple[str, Any, Exception]:
    """The innermost part that cannot travel: the way to it, itself, and why."""
    where = ""
    for _ in range(DEPTH):
        for step, part in _parts(value):
            try:
                through(part)
            except Exception as inner:  # noqa: BLE001 - it is what is looked for
                where, value, error = where + step, part, inner
                break
        else:
            break
    return where, value, error


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, msgspec.Struct):
        yield from ((f".{name}", getattr(value, name)) for name in value.__struct_fields__)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        yield from ((f".{each.name}", getattr(value, each.name)) for each in dataclasses.fields(value))
    elif isinstance(value, Mapping):
        for key, part in value.items():  # pyright: ignore[reportUnknownVariableType] - whatever it maps
            yield f"[{key!r}]", part
    elif isinstance(value, list | tuple | set | frozenset):
        yield from ((f"[{index}]", part) for index, part in enumerate(cast("list[Any]", value)))
