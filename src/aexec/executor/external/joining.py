"""How a rank gets to the others: by attempts, until all are there or one gives up.

An attempt fails for all when the start of one rank is cancelled, for its lines are gone then:
everybody begins again, as that rank may.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from aexec.executor.external.hub import Hub
from aexec.executor.external.once import Once
from aexec.executor.external.ways import Ways
from aexec.executor.external.wire import PeerLine
from aexec.messages.peers import Seated
from aexec.parallel.layout import RankLayout

__all__ = ("Joining",)


class Joining:
    """One attempt.

    Args:
        rank: This process, counted over all replicas.
        layout: Of all replicas.
        ways: Makes lines.
        hub: This process's, if it has one.
        on_line: Told of the line to the hub, and of the hub's process, if it is another's; before anything is heard.
    """

    def __init__(
        self,
        rank: int,
        layout: RankLayout,
        ways: Ways,
        hub: Hub | None,
        on_line: Callable[[PeerLine, int], None],
    ) -> None:
        self._rank, self._layout, self._ways, self._hub, self._on_line = rank, layout, ways, hub, on_line
        self._first = rank - rank % layout.replica_size

    async def cards(self, cards: Once[list[Any]], say: Callable[[], None], timeout: float) -> list[Any]:
        """Get lines, say this rank's card, and wait for those of all.

        Args:
            cards: Where they come.
            say: Says this rank's.
            timeout: Seconds, at most.
        """

        async def get_lines() -> None:
            await self._get_lines(timeout)
            say()

        def done(task: asyncio.Task[None]) -> None:
            if not task.cancelled() and (error := task.exception()) is not None:
                cards.fail(error)

        lines = asyncio.create_task(get_lines())
        lines.add_done_callback(done)
        try:
            return await cards.get()
        finally:
            lines.cancel()
            await asyncio.wait([lines])
            self._ways.close()

    async def _get_lines(self, timeout: float) -> None:
        if self._hub is None:
            line, pid = await self._ways.go(self._first, timeout)
            self._on_line(line, pid)
            line.open()
        elif self._layout.size > 1:
            await self._let_come(self._hub, timeout)

    async def _let_come(self, hub: Hub, timeout: float) -> None:
        size = self._layout.replica_size
        ranks = range(self._first + 1, self._first + size)
        hubs = range(size, self._layout.size, size) if self._first == 0 else range(0)
        meeting = await self._ways.announce([*ranks, *hubs], timeout) if ranks or hubs else None
        if self._first != 0:
            above, _ = await self._ways.go(0, timeout)
            hub.hang_below(above)
            above.open()
        if meeting is None:
            return

        async def seat(rank: int) -> None:
            line, pid = await self._ways.come(meeting, rank)
            if rank in hubs:
                hub.seat_hub(line)
            else:
                hub.seat(line, pid)
            line.open()
            line.tell(Seated())

        await asyncio.gather(*(seat(rank) for rank in (*ranks, *hubs)))
