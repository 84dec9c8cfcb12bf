"""What all ranks have to ask for alike, as a few bytes; and as words. Pure.

Two processes get the same bytes for what is equal, whatever the order of its dicts and sets,
and wherever its parts lie. Of tensors only dtype and shape count, for their content may be on a
device; of other objects their class and their public attributes; of functions where they are
defined; of arguments of more than a megabyte of bytes or text their length, and both ends, so
that the loop is not held up. What names a call within one process does not count.
"""

from __future__ import annotations

import functools
import hashlib
import reprlib
import types
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any, Final

import msgspec
import numpy as np
import numpy.typing as npt

from aexec.messages.base import Message
from aexec.messages.control import CallMethod
from aexec.messages.step import ExecuteModel, SampleTokens

__all__ = ("DIGEST_SIZE", "describe", "digest", "step_of")

DIGEST_SIZE: Final = 16  # bytes
_LONGEST_HASHED: Final = 1 << 20  # bytes of an array; of longer ones only dtype and shape count
_LONGEST_WHOLE: Final = 1 << 20  # bytes, or characters, of an argument; of longer ones its length and ends count
_END: Final = 1 << 16
_DEEPEST: Final = 24  # levels of a value that is not of plain types; what is deeper counts by its type
_kind: Callable[[Any], Any] = type
_NOT_PLAIN = (TypeError, OverflowError, RecursionError, ValueError)


def digest(message: Message[Any], ranks: Sequence[int] = (), *, arguments: bool = True) -> bytes:
    """The same for messages that ask for the same, in any process.

    Args:
        message: What is asked for.
        ranks: Who will answer.
        arguments: They count; False: each rank may have its own, as when each loads its own tensors.
    """
    facts = [type(message).__name__, list(ranks), *_facts(message, arguments=arguments)]
    try:
        data = _encode(facts)
    except _NOT_PLAIN:  # keys that are no strings, whole numbers of more than 64 bits, cycles
        data = _encode(_plain(facts, 0))
    return hashlib.blake2b(data, digest_size=DIGEST_SIZE).digest()


def describe(message: Message[Any]) -> str:
    """What it asks for, for people; short.

    >>> describe(CallMethod(call=7, method="add", args=(1, 2)))
    'add(1, 2)'
    """
    if isinstance(message, ExecuteModel):
        tokens = "" if message.num_tokens is None else f", {message.num_tokens} tokens"
        return f"ExecuteModel(step {message.step}{tokens})"
    if isinstance(message, SampleTokens):
        return f"SampleTokens(step {message.step})"
    if isinstance(message, CallMethod):
        shown = [_REPR.repr(value) for value in message.args]
        shown += [f"{name}={_REPR.repr(value)}" for name, value in message.kwargs.items()]
        return _shortened(f"{_method(message)}({', '.join(shown)})")
    return type(message).__name__


def step_of(message: Message[Any]) -> int | None:
    """The step that it is about."""
    return message.step if isinstance(message, (ExecuteModel, SampleTokens)) else None


def _facts(message: Message[Any], *, arguments: bool) -> list[Any]:
    if isinstance(message, CallMethod):
        said = [[*map(_brief, message.args)], {name: _brief(value) for name, value in message.kwargs.items()}]
        return [message.method, message.reply_rank, *(said if arguments else ())]
    if isinstance(message, ExecuteModel):
        return [message.step, message.num_tokens, *([message.payload] if arguments else [])]
    if isinstance(message, SampleTokens):
        grammar = message.grammar
        return [message.step, *([grammar.request_ids, grammar.bitmask] if grammar is not None and arguments else [])]
    return []


def _brief(value: Any) -> Any:
    if isinstance(value, bytes | bytearray | str) and len(value) > _LONGEST_WHOLE:
        return ["long", len(value), value[:_END], value[-_END:]]
    return value


def _method(message: CallMethod) -> str:
    method = message.method
    return method if isinstance(method, str) else getattr(method, "__qualname__", type(method).__name__)


# Values that msgspec does not know, in terms of those that it does.


def _known(value: Any) -> Any:
    for kinds, said in _SAID:
        if isinstance(value, kinds):
            return said(value)
    if hasattr(value, "dtype") and hasattr(value, "shape"):  # a tensor, of whatever library
        return ["tensor", str(value.dtype), list(value.shape)]
    return _object(value)


def _array(value: npt.NDArray[Any]) -> list[Any]:
    facts: list[Any] = ["array", value.dtype.str, list(value.shape)]
    if value.nbytes <= _LONGEST_HASHED and not value.dtype.hasobject:
        content = np.ascontiguousarray(value).reshape(-1).view(np.uint8)
        facts.append(hashlib.blake2b(content.data, digest_size=DIGEST_SIZE).digest())
    return facts


def _named(value: type | Callable[..., Any]) -> list[Any]:
    facts: list[Any] = ["named", value.__module__, value.__qualname__]
    code = getattr(value, "__code__", None)
    if isinstance(code, types.CodeType) and "<" in value.__qualname__:  # of several lambdas all have one name
        facts += [code.co_code, list(code.co_names), [c for c in code.co_consts if isinstance(c, (int, str, float))]]
    return facts


def _object(value: Any) -> list[Any]:
    kind = _kind(value)
    facts = ["object", *_where(kind)]
    if hasattr(kind, "__iter__") and hasattr(kind, "__len__"):
        return [*facts, list(value)]
    public = {name: part for name, part in getattr(value, "__dict__", {}).items() if not name.startswith("_")}
    return [*facts, public] if public else [*facts, str(value)] if _says_all(value) else facts


def _where(kind: type[Any]) -> list[str]:
    return [kind.__module__, kind.__qualname__]


def _says_all(value: object) -> bool:
    """True for values of the standard library whose text is what they are, as paths and fractions."""
    return type(value).__module__.partition(".")[0] in {"pathlib", "fractions", "ipaddress", "zoneinfo", "re"}


_Said = tuple[tuple[type[Any], ...], Callable[[Any], Any]]
_SAID: tuple[_Said, ...] = (
    ((np.ndarray,), _array),
    ((np.generic,), lambda value: ["number", value.dtype.str, repr(value)]),
    ((type, types.FunctionType, types.BuiltinFunctionType), _named),
    ((functools.partial,), lambda value: ["partial", value.func, value.args, value.keywords]),
    ((types.MethodType,), lambda value: ["method", value.__func__, value.__self__]),
    ((complex, range, slice), lambda value: [type(value).__name__, repr(value)]),
    ((Mapping,), lambda value: ["mapping", dict(value)]),
)
"""Types, and what is said of a value of theirs; the first that fits."""

_encode = msgspec.msgpack.Encoder(order="deterministic", enc_hook=_known).encode


def _plain(value: Any, depth: int) -> Any:
    """``value`` in terms of lists, texts and numbers of 64 bits, sorted where order is nobody's choice."""
    kind = _kind(value)
    if value is None or issubclass(kind, bool | float | str | bytes | bytearray):
        return value
    if issubclass(kind, int):
        return value if -(1 << 63) <= value < 1 << 63 else ["int", hex(value)]
    return ["deep", *_where(kind)] if depth >= _DEEPEST else _plain_whole(value, kind, depth + 1)


def _plain_whole(value: Any, kind: Any, depth: int) -> Any:
    """What has parts."""
    if issubclass(kind, Mapping):
        return ["dict", sorted(_encode([_plain(key, depth), _plain(part, depth)]) for key, part in value.items())]
    if issubclass(kind, AbstractSet):
        return ["set", sorted(_encode(_plain(part, depth)) for part in value)]
    if issubclass(kind, list | tuple):
        return [_plain(part, depth) for part in value]
    fields = getattr(kind, "__struct_fields__", None) or getattr(kind, "__dataclass_fields__", None)
    if fields:
        return ["fields", *(_plain(getattr(value, name, None), depth) for name in fields)]
    return _plain(_known(value), depth)


class _Repr(reprlib.Repr):
    """Short, and without a look at what tensors hold."""

    def __init__(self) -> None:
        super().__init__()
        self.maxstring = self.maxother = 60
        self.maxlevel = 3

    def repr_bytes(self, x: bytes | bytearray, level: int) -> str:  # noqa: ARG002 - it is reprlib's
        """Of many, how they begin, and how many they are; the whole text would hold up the loop."""
        return repr(x) if len(x) <= self.maxother else f"<{len(x)} bytes {bytes(x[:8])!r}...>"

    repr_bytearray = repr_bytes

    def repr_instance(self, x: Any, level: int) -> str:
        """Arrays and tensors by shape; objects whose text is an address by their class."""
        kind = _kind(x)
        if hasattr(x, "dtype") and hasattr(x, "shape") and not isinstance(x, type):
            return f"<{kind.__name__} {x.dtype} {list(x.shape)}>"
        if isinstance(x, (type, types.FunctionType)):
            return x.__qualname__
        says_nothing = kind.__repr__ in _ADDRESSES
        return f"<{kind.__name__}>" if says_nothing else super().repr_instance(x, level)


_ADDRESSES: tuple[Any, ...] = (object.__repr__,)
_REPR = _Repr()
_LONGEST = 240  # characters


def _shortened(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."
