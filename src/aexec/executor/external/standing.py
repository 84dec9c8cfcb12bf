"""Where a rank stands: it has the hub of its replica, or a line to it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import anyio

from aexec.errors import ChannelFull, WorkerDied
from aexec.executor.external.hub import Hub
from aexec.executor.external.joining import Joining
from aexec.executor.external.once import Once
from aexec.executor.external.seats import Hear, LineUp, LocalSeat, LocalUp, Up
from aexec.executor.external.ways import Store, Ways
from aexec.executor.external.wire import PeerLine
from aexec.messages.peers import Cards, Departing, Farewell, Lost, Seated
from aexec.parallel.layout import RankLayout
from aexec.transport import Frame, Kind, Writer

__all__ = ("Standing",)


class Standing:
    """A rank's way to the others.

    Args:
        rank: This process, counted over all replicas.
        layout: Of all replicas.
        store: How the ranks find each other.
        check: Calls are compared.
        host: This node's address, for ranks of other nodes; None: there are none.
        heartbeat: Seconds after which a cut link is known.
        hear: Told of what comes from the hub.
        lost: Told when the line to the hub has ended, and no goodbye was said.
        full: Told how many frames wait for a hub that reads nothing.

    Attributes:
        hub: Of this process; None: it is another's, or there is none yet.
        farewell: The hub has said goodbye, or is gone.
    """

    def __init__(
        self,
        rank: int,
        layout: RankLayout,
        store: Store,
        *,
        check: bool,
        host: str | None,
        heartbeat: float,
        hear: Hear,
        lost: Callable[[Lost], None],
        full: Callable[[int], None],
    ) -> None:
        self._rank, self._layout, self._check = rank, layout, check
        self._first = rank - rank % layout.replica_size
        self._hear, self._lost, self._full = hear, lost, full
        self._writer = Writer(setting="")
        self._ways = Ways(
            rank, store, self._writer, host=host, heartbeat=heartbeat, on_frame=self._frame, on_gone=self._gone
        )
        self.hub: Hub | None = None
        self.farewell = anyio.Event()
        self.hub_pid = 0
        self._line: PeerLine | None = None
        self._up: Up | None = None

    def __repr__(self) -> str:
        return f"<Standing of rank {self._rank}: {self.hub or self._line or 'alone'}>"

    @property
    def missing(self) -> list[int]:
        """Ranks that have not come yet, counted over all replicas, as far as that is known here."""
        return [self._first] if self.hub is None else self.hub.missing_cards

    async def attempt(self, cards: Once[list[Any]], own: Cards, timeout: float) -> list[Any]:
        """Get to the others, and show this rank's ``own`` card; the ``cards`` of all, where they come."""
        if self._rank == self._first:
            seat = LocalSeat(0, os.getpid(), self._hear)
            self.hub = Hub(self._rank, self._layout, seat, self._writer, check=self._check)
            self._up = LocalUp(partial(self.hub.hear, seat))
        joining = Joining(self._rank, self._layout, self._ways, self.hub, self._joined)
        return await joining.cards(cards, lambda: self.say(own), timeout)

    def say(self, value: Any) -> None:
        """To the hub, in order with the calls."""
        if self._up is not None:
            try:
                self._up.tell(value)
            except ChannelFull as full:
                self._full(full.queued)

    def send(self, kind: Kind, call: int, value: Any) -> None:
        """To the hub: word of a call, or an outcome.

        Raises:
            MessageNotPortable: It cannot travel.
            ArenaFull: It does not fit into the memory that is shared on a node.
        """
        if self._up is not None:
            try:
                self._up.send(kind, call, value)
            except ChannelFull as full:
                self._full(full.queued)

    def beside(self, value: Any) -> None:
        """To the hub, past what waits.

        Raises:
            MessageNotPortable: It cannot travel.
        """
        if self._up is not None:
            with contextlib.suppress(ChannelFull):  # nobody answers there: whoever asks has a limit
                self._up.beside(value)

    async def until_known(self) -> None:
        """Wait until the hub knows that this rank is through; a hub, until all are."""
        if self.hub is not None:
            await self.hub.until_all_are_through()
        elif self._line is not None and self._line.is_open:
            await self.farewell.wait()

    async def flushed(self, timeout: float) -> None:
        """Wait until all that was said is with the kernel; so long for each line at most."""
        for line in self._lines():
            await line.flushed(timeout)

    def bid_farewell(self) -> None:
        """The hub has said goodbye: its line may end."""
        if self._line is not None:
            self._line.is_through = True
        self.farewell.set()

    def hang_up(self, departing: Departing) -> None:
        """Say goodbye to whoever is there and does not know it, and let go of all lines."""
        self._ways.close()
        lines = self._lines()
        if self.hub is not None:
            self.hub.leave(departing)
        elif self._line is not None and not self._line.is_through:
            self.say(departing)
        for line in lines:
            line.close()
        self.hub = self._line = self._up = None

    def close(self) -> None:
        """Give the shared memory back; takes a while if it is large."""
        self._writer.close()

    def _joined(self, line: PeerLine, pid: int) -> None:
        self._line, self.hub_pid = line, pid
        self._up = LineUp(line, self._writer)

    def _lines(self) -> Sequence[PeerLine]:
        if self.hub is not None:
            return self.hub.lines()
        return [] if self._line is None else [self._line]

    def _frame(self, line: PeerLine, frame: Frame) -> None:
        if self.hub is not None:
            self.hub.frame(line, frame)
        elif isinstance(frame.value, Seated):
            return
        elif frame.error is None:
            self._hear(frame.kind, frame.call, frame.value)
        elif frame.call:  # an outcome that cannot be made here
            self._hear(Kind.FAILURE, frame.call, frame.error)

    def _gone(self, line: PeerLine, why: str) -> None:
        if self.hub is not None:
            self.hub.gone(line, why)
            return
        self.farewell.set()
        if not line.has_heard:  # it was never taken: that meeting is over
            self._hear(Kind.EVENT, 0, Farewell())
        elif not line.is_through:
            cause = f"its line to rank {self._rank} has ended ({why})"
            self._lost(Lost(self._first, WorkerDied(self._first, self.hub_pid, cause=cause)))
