"""What comes in, whatever kind of channel it is for: frames in, values out."""

from __future__ import annotations

import contextlib
import os
import struct
from collections.abc import Callable, Hashable, Sequence
from typing import Any

from aexec.errors import ChannelClosed, MessageNotDecoded
from aexec.transport.codec import DECODERS, decode
from aexec.transport.frames import BadFrame, Data, Frame, Head, Kind, parse, parse_plain, unpack_table
from aexec.transport.links import Receiver
from aexec.transport.mapping import Mappings
from aexec.transport.writer import Writer

__all__ = ("SEGMENT_SIZE", "Inbox")

SEGMENT_SIZE = struct.Struct("<Q")  # body of a SEGMENT frame; 0: the segment is gone

_tuple: Any = tuple
_new_frame: Callable[..., Frame] = _tuple.__new__  # what Frame() calls, without the call of Python's around it
GOODBYE, RELEASE, SEGMENT = Kind.GOODBYE, Kind.RELEASE, Kind.SEGMENT  # looked up once, and never hashed


class Inbox:
    """Takes frames, keeps book of what they say about memory, and gives out the rest.

    Args:
        name: Of the channel.
        writer: Whose memory the peer gives back.
        holder: The channel, as the writer knows it.
        on_release: See :class:`Mappings`.

    Attributes:
        mappings: What of the peer's memory is in use here.
        received: Frames so far.
        rest: Frames that came with the last one, and are taken next; None: there are none.
    """

    def __init__(self, name: str, writer: Writer, holder: Hashable, on_release: Callable[[], None]) -> None:
        self.name = name
        self.mappings = Mappings(on_release)
        self.received = 0
        self.rest: memoryview | None = None
        self._writer, self._holder = writer, holder

    def take(self, link: Receiver) -> Frame | None:
        """Receive a frame; None: there is none, or it was about memory.

        Raises:
            ChannelClosed: The peer is gone, said goodbye, or sent what is no frame.
        """
        fds: tuple[int, ...] = ()
        data: Data | None = self.rest
        if data is None:
            try:
                data, fds = link.receive()
            except BlockingIOError:
                return None
            except (BadFrame, OSError) as error:
                raise self._broken(error) from None
        plain = parse_plain(data)
        if plain is not None:
            self.received += 1
            kind, call, codec, body, self.rest = plain
            if kind is GOODBYE:
                raise self._goodbye()
            try:
                return _new_frame(Frame, (kind, call, DECODERS[codec](body, []), fds, None))
            except Exception as error:  # noqa: BLE001 - as in _decoded
                return self._undecoded(kind, call, fds, error)
        self.rest = None
        if not data:
            raise ChannelClosed(self.name, "the peer is gone")
        try:
            frame = self._open(data, fds)
        except BadFrame as error:
            raise self._garbled(error) from None
        if frame is not None and frame.kind is GOODBYE:
            raise self._goodbye()
        return frame

    def _broken(self, error: BadFrame | OSError) -> ChannelClosed:
        if isinstance(error, BadFrame):
            return self._garbled(error)
        return ChannelClosed(self.name, f"the peer is gone ({error.strerror or error})")

    def _garbled(self, error: BadFrame) -> ChannelClosed:
        return ChannelClosed(self.name, f"the peer sent what is no frame: {error}")

    def _goodbye(self) -> ChannelClosed:
        return ChannelClosed(self.name, "the peer said goodbye", orderly=True)

    def _open(self, data: Data, fds: tuple[int, ...]) -> Frame | None:
        """The frame; None: it was about memory.

        Raises:
            BadFrame: It is none of ours.
        """
        self.received += 1
        try:
            head = parse(data)
            if head.releases:
                self._writer.release(head.releases, self._holder)
            if head.kind is RELEASE or head.kind is SEGMENT:
                self._segment(head, fds)
                return None
            return self._frame(head, fds)
        except (BadFrame, OSError) as error:
            for fd in fds:
                with contextlib.suppress(OSError):
                    os.close(fd)
            raise error if isinstance(error, BadFrame) else BadFrame(str(error)) from error

    def _frame(self, head: Head, fds: tuple[int, ...]) -> Frame:
        if not head.num_buffers:
            if head.long_body:
                raise BadFrame("it has a long body and no buffers")
            buffers: list[Any] = []
        else:
            buffers = self._buffers(head)
        body = buffers.pop(0) if head.long_body else head.body
        return self._decoded(head.kind, head.call, head.codec, body, buffers, fds)

    def _decoded(self, kind: Kind, call: int, codec: int, body: Any, buffers: list[Any], fds: tuple[int, ...]) -> Frame:
        try:
            return Frame(kind, call, decode(codec, body, buffers), fds)
        except Exception as error:  # noqa: BLE001 - users' classes raise what they like; it is told to the caller
            return self._undecoded(kind, call, fds, error)

    def _undecoded(self, kind: Kind, call: int, fds: tuple[int, ...], error: Exception) -> Frame:
        what = f"{kind.name} of call {call}"
        return Frame(kind, call, None, fds, MessageNotDecoded(self.name, what, f"{type(error).__name__}: {error}"))

    def _buffers(self, head: Head) -> list[Any]:
        if head.bulk is not None:
            return self.mappings.buffers(head.lease, head.bulk, head.num_buffers)
        if head.trailer is None:
            raise BadFrame("its buffers are missing")
        trailer = head.trailer
        return [trailer[offset : offset + length] for offset, length in unpack_table(trailer, head.num_buffers)]

    def _segment(self, head: Head, fds: Sequence[int]) -> None:
        if head.kind is RELEASE:
            return
        if len(head.body) != SEGMENT_SIZE.size:
            raise BadFrame("it shows no segment")
        (size,) = SEGMENT_SIZE.unpack(head.body)
        if not size:
            self.mappings.detach(head.call)
        elif len(fds) == 1:
            self.mappings.attach(head.call, fds[0], size)
            os.close(fds[0])
        else:
            raise BadFrame(f"it shows a segment with {len(fds)} descriptors")
