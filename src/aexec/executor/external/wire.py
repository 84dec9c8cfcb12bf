"""A pair of lines between two processes: one for calls and their outcomes, and a quiet one beside it.

The quiet one carries little, so that the kernels at its two ends notice a cut link by
themselves, within seconds: an event loop that a trainer blocks for minutes is no death. Where
both ends are on one node there is no link to cut; a process that ends hangs up anyway.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from functools import partial
from typing import Any, Final

from aexec.errors import ChannelClosed, ChannelFull
from aexec.transport import ChannelStatistics, Encoded, Frame, Kind, LoopChannel, Writer
from aexec.transport.tcp import notice_within

__all__ = ("PeerLine",)

_FOLLOWS: Final = 0.1  # seconds that the line for calls may live longer than the quiet one


class PeerLine:
    """One end of it.

    Args:
        rank: Of the other end, counted over all replicas.
        work: Socket of the line for calls; owned from here on.
        control: Socket of the quiet one; likewise.
        writer: This process's.
        on_frame: Told of each frame of either.
        on_gone: Told once why they have ended, unless this end has ended them.
        heartbeat: Seconds after which a cut link is known.

    Attributes:
        rank: As given.
        is_through: The other end has said, or was told, that it is through: its end is no death.
    """

    def __init__(
        self,
        rank: int,
        work: socket.socket,
        control: socket.socket,
        writer: Writer,
        on_frame: Callable[[PeerLine, Frame], None],
        on_gone: Callable[[PeerLine, str], None],
        heartbeat: float,
    ) -> None:
        self.rank, self.is_through = rank, False
        self._on_gone = on_gone
        self._is_open = True
        notice_within(control, heartbeat)
        hear = partial(on_frame, self)
        name = f"rank {rank}"
        self.work = LoopChannel(work, writer, hear, self._gone, name=f"{name} calls")
        self.control = LoopChannel(control, writer, hear, self._control_gone, name=f"{name} beside")
        self._verdict: asyncio.TimerHandle | None = None

    def __repr__(self) -> str:
        state = "through" if self.is_through else "open" if self._is_open else "closed"
        return f"<PeerLine to rank {self.rank}: {state}, {self.work.num_queued} queued>"

    @property
    def is_open(self) -> bool:
        """Neither end has ended it."""
        return self._is_open

    @property
    def has_heard(self) -> bool:
        """Something has come by it."""
        return self.work.statistics().received > 0

    def open(self) -> None:
        """Begin to hear, on the running loop."""
        self.work.open()
        if self._is_open:
            self.control.open()

    def tell(self, value: Any) -> None:
        """Send a message of the ranks' own, in order with the calls.

        Raises:
            ChannelFull: The other end has long read nothing.
        """
        if self._is_open:
            self.work.send(Kind.EVENT, 0, value)

    def beside(self, value: Any) -> None:
        """Send one on the quiet line.

        Raises:
            ChannelFull: As in :meth:`tell`.
            MessageNotPortable: It cannot travel.
        """
        if self._is_open:
            self.control.send(Kind.EVENT, 0, value)

    def send(self, kind: Kind, call: int, encoded: Encoded) -> None:
        """Send an outcome, or word of a call.

        Raises:
            ChannelFull: As in :meth:`tell`.
            ArenaFull: It does not fit into the memory that is shared on a node.
        """
        if self._is_open:
            self.work.send_encoded(kind, call, encoded)

    async def flushed(self, timeout: float) -> None:
        """Wait until all that was said is with the kernel, as far as that goes within so many seconds."""
        for channel in (self.work, self.control):
            try:
                await channel.flushed(timeout)
            except (TimeoutError, ChannelClosed, ChannelFull):
                return

    def close(self) -> None:
        """End it. Twice is once."""
        self._is_open = False
        if self._verdict is not None:
            self._verdict.cancel()
        self.work.close()
        self.control.close()

    def statistics(self) -> tuple[ChannelStatistics, ChannelStatistics]:
        """What went through the two."""
        return self.work.statistics(), self.control.statistics()

    def _control_gone(self, error: ChannelClosed) -> None:
        """The other one follows, after its last frames; unless the link is cut."""
        if self._is_open and not error.orderly:
            self._verdict = asyncio.get_running_loop().call_later(_FOLLOWS, self._gone, error)

    def _gone(self, error: ChannelClosed) -> None:
        if self._is_open:
            self.close()
            self._on_gone(self, error.reason)
