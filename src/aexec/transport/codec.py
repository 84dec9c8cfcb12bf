"""From values to bytes and back: the step's messages by msgspec, all else by pickle."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from aexec.messages.portable import not_portable
from aexec.transport.frames import INLINE, bulk_layout
from aexec.transport.pickling import dumps, loads
from aexec.transport.structs import decode_struct, encode_struct

__all__ = ("Encoded", "decode", "encode")

NONE, PICKLE, STRUCT = 0, 1, 16  # STRUCT + the number of its type


class Encoded:
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

    __slots__ = ("body", "buffers", "codec", "lengths", "long_body", "num_bytes", "what")

    def __init__(self, codec: int, body: bytes, what: str) -> None:
        self.codec, self.body, self.what = codec, body, what
        self.long_body = False
        self.num_bytes = 0
        self.lengths: Sequence[int] = ()
        self.buffers: Sequence[tuple[int, bytes | memoryview]] = ()

    def __repr__(self) -> str:
        return f"<Encoded {self.what}: {len(self.body)} bytes, {self.num_bytes} bytes of bulk>"


_NOTHING = Encoded(NONE, b"", "None")


def encode(value: Any) -> Encoded:
    """Encode a value. Large arrays are not copied yet: they have to stay as they are until it is sent.

    Raises:
        MessageNotPortable: It cannot travel; names the part that cannot.
    """
    if value is None:
        return _NOTHING
    what = type(value).__name__
    struct = encode_struct(value)
    if struct is not None:
        number, body, buffers = struct
        codec, pieces = STRUCT + number, [body]
    else:
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


def decode(codec: int, body: Any, buffers: list[Any]) -> Any:
    """Make the value.

    Raises:
        Exception: Whatever its parts raise, and ``ValueError`` for a codec that is none.
    """
    if codec == NONE:
        return None
    if codec == PICKLE:
        return loads(body, buffers)
    if codec < STRUCT:
        raise ValueError(f"codec {codec} is unknown")
    return decode_struct(codec - STRUCT, body, buffers)
