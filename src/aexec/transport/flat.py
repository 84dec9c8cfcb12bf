"""A message as one string of bytes, for roads that carry nothing else and keep whole strings apart.

It is a frame as on a byte stream, all bulk in it. What is made of it here shares no memory with
the string: whoever lent that may have it back at once.
"""

from __future__ import annotations

from aexec.errors import MessageNotDecoded, MessageTooLarge
from aexec.transport.codec import Encoded, decode
from aexec.transport.frames import HEADER, INLINE, Frame, Head, Kind, align, pack, parse, unpack_table
from aexec.transport.outbox import trailer

__all__ = ("flat_size", "flatten", "restore")


def flat_size(encoded: Encoded) -> int:
    """Bytes that :func:`flatten` makes of it."""
    size = HEADER.size + len(encoded.body)
    return align(size) + encoded.num_bytes if encoded.lengths else size


def flatten(kind: Kind, call: int, encoded: Encoded, limit: int, what: str, setting: str) -> bytes:
    """Make one string of it.

    Args:
        kind: What it is for.
        call: The call that it belongs to.
        encoded: The value.
        limit: Bytes that it may have.
        what: What it is, for the error, as in ``the hidden states of step 7``.
        setting: Where ``limit`` comes from.

    Raises:
        MessageTooLarge: It has more.
    """
    size = flat_size(encoded)
    if size > limit:
        raise MessageTooLarge(what, size, limit, setting)
    lengths = encoded.lengths
    if not lengths:
        return pack(kind, call, encoded.codec, encoded.body)
    head = pack(kind, call, encoded.codec, encoded.body, num_buffers=len(lengths), long_body=encoded.long_body)
    return b"".join((head, *trailer(encoded)))


def restore(road: str, data: bytes | memoryview) -> Frame:
    """Make the message again; one whose value cannot be made has an ``error`` instead.

    Args:
        road: By which it came, for the error.
        data: The string.

    Raises:
        BadFrame: It is none of ours.
    """
    head = parse(bytearray(data) if len(data) > INLINE else data)  # arrays in it are the receiver's own to write to
    try:
        buffers = _buffers(head)
        body = buffers.pop(0) if head.long_body else head.body
        return Frame(head.kind, head.call, decode(head.codec, body, buffers))
    except Exception as error:  # noqa: BLE001 - users' classes raise what they like; it is told to the caller
        what = f"{head.kind.name} of call {head.call}"
        return Frame(head.kind, head.call, None, (), MessageNotDecoded(road, what, f"{type(error).__name__}: {error}"))


def _buffers(head: Head) -> list[memoryview]:
    if not head.num_buffers:
        return []
    assert head.trailer is not None
    return [head.trailer[start : start + length] for start, length in unpack_table(head.trailer, head.num_buffers)]
