"""A line to another node, for whoever talks through it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from aexec.errors import ChannelClosed, ChannelFull, ProtocolError
from aexec.transport.codec import Encoded, encode
from aexec.transport.curve.end import CurveEnd
from aexec.transport.frames import Frame, Kind, pack
from aexec.transport.loop import LoopChannel
from aexec.transport.statistics import ChannelStatistics
from aexec.transport.writer import Writer

__all__ = ("NodeLink", "broadcast")


class NodeLink:
    """A line to another node whose peer has been authenticated, and heard by both sides.

    Args:
        end: Its end here.
        writer: Encodes what is sent.
        name: Of the peer, for people.
        closed: Awaited for all of it to be gone.
    """

    def __init__(self, end: CurveEnd, writer: Writer, name: str, closed: Callable[[], Awaitable[None]]) -> None:
        self.end, self.name = end, name
        self._writer, self._closed = writer, closed
        self._channel: LoopChannel | None = None

    def __repr__(self) -> str:
        state = "not opened" if self._channel is None else repr(self._channel)
        return f"<NodeLink to {self.name} at {self.address}: {state}>"

    @property
    def address(self) -> str:
        """Where the peer is."""
        return self.end.address

    @property
    def is_open(self) -> bool:
        """Frames come and go; False before :meth:`open` and after the end."""
        return self._channel is not None and self._channel.is_open

    @property
    def channel(self) -> LoopChannel:
        """What its frames go through.

        Raises:
            ProtocolError: It has not been opened.
        """
        if self._channel is None:
            raise ProtocolError(f"the line to {self.name} was used before it was opened")
        return self._channel

    @property
    def writer(self) -> Writer:
        """What encodes its messages."""
        return self._writer

    def open(self, on_frame: Callable[[Frame], None], on_gone: Callable[[ChannelClosed], None]) -> None:
        """Hear its frames from now on, in order, those too that have come already; on the running loop.

        Args:
            on_frame: Told of each.
            on_gone: Told once that no more will come, after the last; not after :meth:`close`.
        """
        if self._channel is not None:
            raise ProtocolError(f"the line to {self.name} was opened twice")
        self._channel = LoopChannel(self.end, self._writer, on_frame, on_gone, name=self.name)
        self._channel.open()

    def send(self, kind: Kind, call: int, value: Any = None, *, urgent: bool = False) -> None:
        """Send a frame; never blocks. It has to be opened first.

        An ``urgent`` one passes all that waits, unless it is large: it is for what has to be heard
        while a large message is under way.

        Arrays of more than 4 MB have to stay as they are until there was an answer, or until
        the line is ``flushed()``; all else may be changed at once.

        Raises:
            ChannelClosed: Nothing can be sent any longer.
            ChannelFull: Too many frames wait for the peer, or too many bytes.
            MessageNotPortable: The value cannot travel; the line lives on.
            ArenaFull: The value is larger than a message may be; the line lives on.
        """
        encoded = encode(value)
        if not urgent or encoded.lengths:
            self.channel.send_encoded(kind, call, encoded)
        elif not self.channel.is_open:
            raise ChannelClosed(self.name, "it is closed")
        elif not self.end.send_urgent(pack(kind, call, encoded.codec, encoded.body)):
            raise ChannelFull(self.name, self.channel.num_queued)

    def send_encoded(self, kind: Kind, call: int, encoded: Encoded) -> None:
        """Send what ``Writer.encode`` gave; see :meth:`send`."""
        self.channel.send_encoded(kind, call, encoded)

    def limit_to(self, limit: int) -> None:
        """Send no message from now on that has more bytes."""
        self._writer.limit_to(limit)

    async def flushed(self, timeout: float) -> None:
        """Wait until all that was sent is with ZMQ.

        Raises:
            TimeoutError: It was not, within ``timeout`` seconds.
            ChannelClosed: The line is closed.
        """
        await self.channel.flushed(timeout)

    def statistics(self) -> ChannelStatistics:
        """What went through it."""
        return ChannelStatistics(0, 0, 0, 0, 0) if self._channel is None else self._channel.statistics()

    def close(self) -> None:
        """Say goodbye and close; twice is once."""
        if self._channel is not None:
            self._channel.close()
        else:
            self.end.close(None)

    async def closed(self) -> None:
        """Wait until nothing is left of a line that is closed: a second or two at most."""
        await self._closed()


def broadcast(links: Sequence[NodeLink], kind: Kind, call: int, value: Any = None) -> None:
    """Send one value to several nodes, encoded once; those whose line is closed are left out.

    Raises:
        MessageNotPortable: It cannot travel.
        ChannelFull: One of the lines takes no more. In all cases nothing was sent to anybody.
        ArenaFull: It is larger than a message may be.
    """
    if links:
        links[0].writer.send([link.channel for link in links], kind, call, value)
