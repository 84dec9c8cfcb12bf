"""The layout of what travels: one frame is one datagram, or one length-prefixed piece of a stream.

::

    header      32 bytes, see HEADER
    descriptor  24 bytes, if Flag.BULK: where in the sender's arena the bulk lies
    releases    8 bytes each: leases that this end gives back to the other
    body        what the codec made of the value, up to INLINE bytes of it
    bulk        if Flag.TRAILER, from the next multiple of ALIGNMENT: in the frame itself

Bulk is one stretch of memory: a table with the length of each buffer (8 bytes each), then
the buffers, each from a multiple of ``ALIGNMENT``. A body that is too long for the frame is
its first buffer (``Flag.LONG_BODY``). All numbers are little-endian.

A frame that is nothing but header and body may have another one behind it (``Flag.MORE``):
what is sent in one breath costs the peer one system call, and wakes it once.

Nothing here does anything but compute: no socket, no memory, no clock.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

from aexec.errors import MessageNotDecoded

__all__ = (
    "ALIGNMENT",
    "INLINE",
    "MAX_FRAME",
    "MAX_RELEASES",
    "BadFrame",
    "Bulk",
    "Data",
    "Flag",
    "Frame",
    "Head",
    "Kind",
    "align",
    "bulk_layout",
    "join",
    "pack",
    "pack_table",
    "parse",
    "parse_plain",
    "unpack_table",
)

MAGIC, VERSION = 0xAE1C, 1
ALIGNMENT = 64  # bytes: a cache line, and what any dtype asks for
INLINE = 16 << 10  # bytes; longer bodies and buffers go out of band
MAX_RELEASES = 1024  # in one frame
MAX_FRAME = 1 << 16  # bytes of a datagram

HEADER = struct.Struct("<HBBBBHIIqQ")  # magic version kind codec flags releases body_bytes buffers call lease
DESCRIPTOR = struct.Struct("<IIQQ")  # segment, reserved, offset, length


Data = bytes | bytearray | memoryview


class BadFrame(ValueError):
    """The bytes are no frame of ours."""


class Kind(enum.IntEnum):
    """What a frame is for. The last three are the transport's own: a channel gives them to nobody."""

    LAUNCH = 1
    MESSAGE = 2
    REPLY = 3
    FAILURE = 4
    EVENT = 5
    RELEASE = 7  # 6 is free
    SEGMENT = 8
    GOODBYE = 9


class Flag(enum.IntFlag):
    """How the rest of a frame is laid out."""

    BULK = 1
    LONG_BODY = 2
    TRAILER = 4
    MORE = 8


_KINDS = {int(kind): kind for kind in Kind}
_BULK, _LONG_BODY, _TRAILER, _MORE = (int(flag) for flag in Flag)

# A header without flags and releases, read by words: magic version kind | codec, flags, releases | ...
_PLAIN = struct.Struct("<IIIIqQ")
_FIRST = MAGIC | VERSION << 16
_PLAIN_KINDS = {_FIRST | kind << 24: kind for kind in Kind if kind not in (Kind.RELEASE, Kind.SEGMENT)}
_MOST_CODECS = 0xFF  # a greater word has flags or releases
_FLAGS_AT = 5  # bytes into the header
_MORE_BYTE = bytes((_MORE,))
_HEADER_SIZE, _unpack_plain, _pack_plain = HEADER.size, _PLAIN.unpack_from, _PLAIN.pack  # looked up once


class Frame(NamedTuple):
    """What came through a channel.

    Attributes:
        kind: What it is for.
        call: The call that it belongs to; 0: none.
        value: What was sent, and the receiver's own: what it writes to an array, nobody
            else sees. Buffers of more than 16 KB lie in the sender's memory, which is not
            used again as long as anything of them lives.
        fds: Descriptors that came along; whoever gets the frame owns them.
        error: Why the value could not be decoded here (it is None then). The channel lives
            on, and the call wants an answer nevertheless.
    """

    kind: Kind
    call: int
    value: Any = None
    fds: tuple[int, ...] = ()
    error: MessageNotDecoded | None = None


class Bulk(NamedTuple):
    """Where bulk lies.

    Attributes:
        segment: Of the sender's arena.
        offset: Bytes into it.
        length: Bytes.
    """

    segment: int
    offset: int
    length: int


class Head(NamedTuple):
    """A frame, taken apart.

    Attributes:
        kind: What it is for.
        call: Its call.
        codec: What made the body.
        body: The body, unless it is the first buffer of the bulk.
        long_body: It is.
        num_buffers: Buffers of the bulk, the body included.
        lease: To be given back when nothing of the bulk is in use any longer.
        bulk: Where the bulk lies.
        trailer: The bulk itself.
        releases: Leases that are given back.
    """

    kind: Kind
    call: int
    codec: int
    body: memoryview
    long_body: bool = False
    num_buffers: int = 0
    lease: int = 0
    bulk: Bulk | None = None
    trailer: memoryview | None = None
    releases: tuple[int, ...] = ()


def align(size: int, to: int = ALIGNMENT) -> int:
    """The next multiple."""
    return -(-size // to) * to


def bulk_layout(lengths: Sequence[int]) -> tuple[list[int], int]:
    """Where each buffer begins within the bulk, and how long the bulk is."""
    offsets: list[int] = []
    end = 8 * len(lengths)
    for length in lengths:
        offsets.append(align(end))
        end = offsets[-1] + length
    return offsets, end


def pack_table(lengths: Sequence[int]) -> bytes:
    """The head of the bulk."""
    return struct.pack(f"<{len(lengths)}Q", *lengths)


def unpack_table(bulk: Any, num_buffers: int) -> list[tuple[int, int]]:
    """Offset and length of each buffer.

    Raises:
        BadFrame: They do not lie within the bulk.
    """
    view = memoryview(bulk)
    if 8 * num_buffers > view.nbytes:
        raise BadFrame(f"{num_buffers} buffers are announced in {view.nbytes} bytes")
    lengths = struct.unpack_from(f"<{num_buffers}Q", view)
    offsets, end = bulk_layout(lengths)
    if end > view.nbytes:
        raise BadFrame(f"its buffers take {end} bytes, and there are {view.nbytes}")
    return list(zip(offsets, lengths, strict=True))


def pack(
    kind: int,
    call: int,
    codec: int = 0,
    body: bytes = b"",
    *,
    num_buffers: int = 0,
    long_body: bool = False,
    lease: int = 0,
    bulk: Bulk | None = None,
    releases: Sequence[int] = (),
) -> bytes:
    """A frame, without its trailer: one that has buffers and no ``bulk`` is padded for it."""
    if not num_buffers and not releases and not long_body:  # as most
        return _pack_plain(_FIRST | kind << 24, codec, len(body), 0, call, lease) + body
    flags = (_BULK if bulk else _TRAILER) if num_buffers else 0
    if long_body:
        flags |= _LONG_BODY
    head = HEADER.pack(MAGIC, VERSION, kind, codec, flags, len(releases), len(body), num_buffers, call, lease)
    if not num_buffers and not releases:
        return head + body
    if bulk:
        head += DESCRIPTOR.pack(bulk.segment, 0, bulk.offset, bulk.length)
    if releases:
        head += struct.pack(f"<{len(releases)}Q", *releases)
    frame = head + body
    return frame.ljust(align(len(frame)), b"\0") if flags & _TRAILER else frame


def join(first: bytes, second: bytes) -> bytes:
    """Two frames as one datagram; the first is nothing but header and body, and stands alone so far."""
    return first[:_FLAGS_AT] + _MORE_BYTE + first[_FLAGS_AT + 1 :] + second


def parse_plain(data: Data) -> tuple[Kind, int, int, Data, memoryview | None] | None:
    """Kind, call, codec and body of a frame that has nothing else, as most; None: see :func:`parse`.

    Last comes what is behind it: another frame, if any.
    """
    size = len(data) - _HEADER_SIZE
    if size < 0:
        return None
    word, codec, length, num_buffers, call, _ = _unpack_plain(data)
    kind = _PLAIN_KINDS.get(word)
    if kind is None or num_buffers:
        return None
    if codec <= _MOST_CODECS and length == size:
        return kind, call, codec, data[_HEADER_SIZE:], None
    if codec >> 8 != _MORE or length >= size:
        return None
    whole, end = memoryview(data), _HEADER_SIZE + length
    return kind, call, codec & _MOST_CODECS, whole[_HEADER_SIZE:end], whole[end:]


def parse(data: Data) -> Head:
    """Take a frame apart.

    Raises:
        BadFrame: It is none; says what is wrong with it.
    """
    if len(data) < HEADER.size:
        raise BadFrame(f"{len(data)} bytes, where a header alone has {HEADER.size}")
    magic, version, number, codec, flags, num_releases, length, num_buffers, call, lease = HEADER.unpack_from(data)
    kind = _KINDS.get(number)
    if magic != MAGIC or version != VERSION or kind is None:
        raise BadFrame(
            f"it begins with {bytes(data[:4]).hex(' ')}, "
            f"and a frame of this version with {struct.pack('<HB', MAGIC, VERSION).hex(' ')} and a kind"
        )
    rest = memoryview(data)[HEADER.size :]
    if not flags and not num_releases and length == len(rest):
        return Head(kind, call, codec, rest)
    return _parse_rest(Head(kind, call, codec, rest, False, num_buffers, lease), flags, num_releases, length, data)


def _parse_rest(head: Head, flags: int, num_releases: int, length: int, data: Any) -> Head:
    if flags & _MORE:
        raise BadFrame("it announces a frame behind it, and there is none, or it is one that has none")
    start = HEADER.size + (DESCRIPTOR.size if flags & _BULK else 0)
    body = start + 8 * num_releases
    end = body + length
    trailer = align(end) if flags & _TRAILER else end
    whole = memoryview(data)
    if trailer > len(whole) or (not flags & _TRAILER and end != len(whole)):
        raise BadFrame(f"{len(whole)} bytes, where its header promises {trailer}")
    return head._replace(
        body=whole[body:end],
        long_body=bool(flags & _LONG_BODY),
        bulk=_bulk(data) if flags & _BULK else None,
        trailer=whole[trailer:] if flags & _TRAILER else None,
        releases=struct.unpack_from(f"<{num_releases}Q", data, start),
    )


def _bulk(data: Any) -> Bulk:
    segment, _, offset, length = DESCRIPTOR.unpack_from(data, HEADER.size)
    return Bulk(segment, offset, length)
