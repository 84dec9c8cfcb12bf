"""What goes out, whatever kind of channel it is for: values in, frames out."""

from __future__ import annotations

from typing import NamedTuple

from aexec.transport.codec import Encoded
from aexec.transport.frames import ALIGNMENT, MAX_RELEASES, Kind, pack, pack_table
from aexec.transport.inbox import SEGMENT_SIZE
from aexec.transport.links import Parts
from aexec.transport.mapping import Mappings
from aexec.transport.writer import Placed, Writer

__all__ = ("Outbox", "SegmentFrame", "trailer")


class SegmentFrame(NamedTuple):
    """Tells the peer of a segment.

    Attributes:
        parts: The frame.
        fd: The segment, to be closed when it is sent; None: it tells that a segment is gone.
    """

    parts: Parts
    fd: int | None


class Outbox:
    """Makes the frames of one channel.

    Args:
        writer: Whose memory bulk lies in.
        mappings: What of the peer's memory is in use here.
    """

    def __init__(self, writer: Writer, mappings: Mappings) -> None:
        self.sent = 0
        self._writer, self._mappings = writer, mappings
        self._known: set[int] = set()
        self._epoch = 0

    def frame(self, kind: Kind, call: int, encoded: Encoded, placed: Placed | None) -> Parts:
        """A frame, with the leases that are to be given back."""
        self.sent += 1
        releases = self.releases() if self._mappings.released else ()
        if placed is not None:
            number, bulk = placed.lease.number, placed.bulk
        else:
            number, bulk = 0, None
        head = pack(
            kind,
            call,
            encoded.codec,
            encoded.body,
            num_buffers=len(encoded.lengths),
            long_body=encoded.long_body,
            lease=number,
            bulk=bulk,
            releases=releases,
        )
        return [head, *trailer(encoded)] if encoded.lengths and bulk is None else (head,)

    def segments(self) -> list[SegmentFrame]:
        """Frames that have to go before one whose bulk may lie in a segment that is new."""
        arena = self._writer.arena
        if arena.epoch == self._epoch:
            return []
        self._epoch = arena.epoch
        new, gone = arena.news(self._known)
        self._known.difference_update(gone)
        self._known.update(segment.number for segment in new)
        frames = [_segment_frame(number, 0, None) for number in gone]
        return frames + [_segment_frame(segment.number, segment.size, segment.fd) for segment in new]

    def release_frame(self) -> Parts:
        """A frame that only gives leases back."""
        self.sent += 1
        return (pack(Kind.RELEASE, 0, releases=self.releases()),)

    def releases(self) -> list[int]:
        """Take what is to be given back; whoever asks has to send it."""
        released, taken = self._mappings.released, list[int]()
        while released and len(taken) < MAX_RELEASES:
            taken.append(released.popleft())
        return taken


def _segment_frame(number: int, size: int, fd: int | None) -> SegmentFrame:
    return SegmentFrame((pack(Kind.SEGMENT, number, 0, SEGMENT_SIZE.pack(size)),), fd)


def trailer(encoded: Encoded) -> list[bytes | memoryview]:
    """The bulk in pieces, for a line without shared memory."""
    table = pack_table(encoded.lengths)
    parts: list[bytes | memoryview] = [table]
    end = len(table)
    for offset, buffer in encoded.buffers:
        if offset > end:
            parts.append(_PADDING[: offset - end])
        parts.append(buffer)
        end = offset + len(buffer)
    return parts


_PADDING = bytes(ALIGNMENT)
