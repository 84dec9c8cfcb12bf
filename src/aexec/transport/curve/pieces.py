"""A frame on its way between nodes: in pieces, each a message of ZMQ's. Pure.

ZMQ encrypts and sends a message as one thing, and has no heart-beat in between; what waits for a
slow peer it counts in messages. So none may be long: a long frame is many of them, ::

    length of the frame, 8 bytes little-endian | its beginning
    more of it
    ...

and a message without any content is no piece: the other end has hung up. A message of two parts,
the second of them empty, is a whole frame that passes the others: it may come between pieces. Before the first frame
a follower says hello with one message, and the leader answers it with one.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Final

import numpy as np

from aexec.transport.frames import INLINE, BadFrame, Data
from aexec.transport.links import MAX_STREAMED, Parts

__all__ = ("ANSWER", "HANG_UP", "PIECE", "Assembly", "cut")

PIECE: Final = 512 << 10  # bytes at most
HANG_UP: Final = b""
ANSWER: Final = b"a"  # before the answer to a hello, which may be empty
_SMALL: Final = 32 << 10  # bytes; shorter parts are put together

_LENGTH = struct.Struct("<Q")


def cut(parts: Parts, piece: int = PIECE) -> Iterator[bytes | memoryview]:
    """The pieces of a frame; long ones are views of its parts, and nothing is copied before it is asked for."""
    gathered: list[bytes | memoryview] = [_LENGTH.pack(sum(map(len, parts)))]
    size = _LENGTH.size
    for part in filter(len, parts):  # an empty piece would say something else
        if len(part) < _SMALL and size + len(part) <= piece:
            gathered.append(part)
            size += len(part)
            continue
        if size + len(part) <= piece:
            gathered.append(part)
            yield b"".join(gathered)
        else:
            if size:
                yield b"".join(gathered)
            whole = memoryview(part)
            for start in range(0, len(whole), piece):
                yield whole[start : start + piece]
        gathered, size = [], 0
    if size:
        yield b"".join(gathered)


class Assembly:
    """Puts the frames of one peer together again."""

    def __init__(self) -> None:
        self._frame = memoryview(b"")
        self._filled = 0

    def __repr__(self) -> str:
        return f"<Assembly: {self._filled}/{len(self._frame)} bytes of a frame>"

    def add(self, piece: memoryview) -> Data | None:
        """The frame, if this was the last piece of it; its memory is the receiver's own.

        Raises:
            BadFrame: It is no piece of one.
        """
        if not self._frame:
            if len(piece) < _LENGTH.size:
                raise BadFrame(f"{len(piece)} bytes, where the length of a frame should be")
            (length,) = _LENGTH.unpack_from(piece)
            piece = piece[_LENGTH.size :]
            if length == len(piece) > 0:
                return bytes(piece) if length <= INLINE else memoryview(bytearray(piece))
            self._begin(length)
        end = self._filled + len(piece)
        if end > len(self._frame):
            raise BadFrame(f"it has {len(self._frame)} bytes, and {end} came")
        self._frame[self._filled : end] = piece
        self._filled = end
        if end < len(self._frame):
            return None
        frame, self._frame, self._filled = self._frame, memoryview(b""), 0
        return frame

    def _begin(self, length: int) -> None:
        if not 0 < length < MAX_STREAMED:
            raise BadFrame(f"it claims to have {length} bytes")
        try:
            self._frame = np.empty(length, np.uint8).data  # no bytearray: it would be filled with zeros, at once
        except MemoryError:
            raise BadFrame(f"it claims to have {length} bytes, and there is no room for them") from None
