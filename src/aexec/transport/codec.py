"""From values to bytes and back: the step's messages by msgspec, all else by pickle."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import msgspec

from aexec.messages.portable import not_portable
from aexec.messages.step import ExecuteModel
from aexec.transport.frames import INLINE, bulk_layout
from aexec.transport.pickling import dumps, loads
from aexec.transport.structs import STRUCT_DECODERS, STRUCT_ENCODERS, paired, surely_read

__all__ = ("DECODERS", "Encoded", "can_be_paired", "decode", "encode", "paired")

NONE, PICKLE, STRUCT = 0, 1, 16  # STRUCT + the number of its type


class Encoded(msgspec.Struct, eq=False):
    """A value, ready to be sent to any number of channels.

    Attributes:
        codec: What made it.
        body: What stands in the frame.
        buffers: What does not, with its place in the bulk: large buffers, and before them
            the body itself, in pieces, if it is long.
        long_body: It is.
        lengths: Of the buffers, in bytes.
        num_bytes: Of the bulk.
        what: The type of the value, for people.
    """

    codec: int
    body: bytes
    what: str
    long_body: bool = False
    num_bytes: int = 0
    lengths: Sequence[int] = ()
    buffers: Sequence[tuple[int, bytes | memoryview]] = ()

    def __repr__(self) -> str:
        return f"<Encoded {self.what}: {len(self.body)} bytes, {self.num_bytes} bytes of bulk>"


_NOTHING = Encoded(NONE, b"", "None")
_LAUNCH = STRUCT + STRUCT_ENCODERS[ExecuteModel][0]


def encode(value: Any) -> Encoded:
    """Encode a value. Large arrays are not copied yet: they have to stay as they are until it is sent.

    Raises:
        MessageNotPortable: It cannot travel; names the part that cannot.
    """
    if value is None:
        return _NOTHING
    kind = value.__class__
    what = kind.__name__
    hot = STRUCT_ENCODERS.get(kind)
    if hot is not None:
        number, pack = hot
        try:
            body, buffers = pack(value)
        except Exception:  # noqa: BLE001 - pickle takes more, and says better what it does not take
            hot = None
        else:
            if not buffers and len(body) <= INLINE:
                return Encoded(STRUCT + number, body, what)
            return _with_bulk(STRUCT + number, [body], buffers, what)
    return _pickled(value, what)


def can_be_paired(launch: ExecuteModel, encoded: Encoded) -> bool:
    """Whether :func:`paired` makes a ``PairedStep`` of it, one that the other end can surely read.

    What cannot be read has one answer, and the two halves of a step have to have one each.
    """
    return encoded.codec == _LAUNCH and surely_read(launch)


def _pickled(value: Any, what: str) -> Encoded:
    codec = PICKLE
    try:
        pieces, buffers = dumps(value)
    except Exception as error:
        raise not_portable(value, error, dumps) from error
    if not buffers and len(pieces) == 1 and len(pieces[0]) <= INLINE:
        return Encoded(codec, pieces[0], what)
    return _with_bulk(codec, pieces, buffers, what)


def _with_bulk(codec: int, pieces: Sequence[bytes], buffers: Sequence[memoryview], what: str) -> Encoded:
    size = sum(map(len, pieces))
    long_body = size > INLINE
    encoded = Encoded(codec, b"" if long_body else b"".join(pieces), what)
    encoded.long_body = long_body
    encoded.lengths = [size] * long_body + [buffer.nbytes for buffer in buffers]
    if encoded.lengths:
        offsets, encoded.num_bytes = bulk_layout(encoded.lengths)
        starts = accumulate(map(len, pieces if long_body else ()), initial=offsets[0])
        body = zip(starts, pieces if long_body else (), strict=False)
        encoded.buffers = [*body, *zip(offsets[long_body:], buffers, strict=True)]
    return encoded


class _Decoders(dict[int, Callable[[Any, list[Any]], Any]]):
    """What makes a value of body and buffers, by codec."""

    def __missing__(self, codec: int) -> Callable[[Any, list[Any]], Any]:
        raise ValueError(f"codec {codec} is unknown")


DECODERS = _Decoders({NONE: lambda body, buffers: None, PICKLE: loads})  # noqa: ARG005
DECODERS.update((STRUCT + number, decode) for number, decode in enumerate(STRUCT_DECODERS))


def decode(codec: int, body: Any, buffers: list[Any]) -> Any:
    """Make the value.

    Raises:
        Exception: Whatever its parts raise, and ``ValueError`` for a codec that is none.
    """
    return DECODERS[codec](body, buffers)
