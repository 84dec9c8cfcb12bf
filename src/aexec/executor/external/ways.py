"""How lines between ranks come to be: a hub lets its ranks come, and tells by the store where.

What is in the store may be that of an earlier start, whose meeting is over: then nobody listens
there, and whoever wanted to come looks again.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Sequence
from typing import Final, Protocol

import msgspec
import tenacity

from aexec.errors import MeetingFailed
from aexec.executor.external.store import PAUSE, off_loop
from aexec.executor.external.wire import PeerLine
from aexec.transport import Frame, Writer
from aexec.transport.dialing import MeetingPlace, dial
from aexec.transport.meeting import Meeting, new_secret, peer_pid

__all__ = ("Store", "Ways")

_ONE_TRY: Final = 5.0  # seconds for one visit to a place that may be an old one
_PAUSE = PAUSE + tenacity.wait_random(0, 0.02)  # seconds before the next


class Store(Protocol):
    """How a hub tells where it lets ranks come; see :mod:`aexec.executor.external.store`.

    Attributes:
        problem: Why it could not be reached so far, for people; else empty.
    """

    problem: str

    async def tell(self, key: str, value: bytes, timeout: float) -> None:
        """Give a value to all ranks; one that was there before is replaced."""
        ...

    async def learn(self, key: str, timeout: float) -> bytes:
        """The value that is there, or comes to be."""
        ...

    def close(self) -> None:
        """Let go of it; it can be used again."""
        ...


class Ways:
    """Makes the lines of one rank.

    Args:
        rank: This process, counted over all replicas.
        store: How ranks find each other.
        writer: This process's.
        host: This node's address, for ranks of other nodes; None: there are none.
        heartbeat: Seconds after which a cut link is known.
        on_frame: Told of each frame of the lines.
        on_gone: Told why a line has ended.
    """

    def __init__(
        self,
        rank: int,
        store: Store,
        writer: Writer,
        *,
        host: str | None,
        heartbeat: float,
        on_frame: Callable[[PeerLine, Frame], None],
        on_gone: Callable[[PeerLine, str], None],
    ) -> None:
        self._rank, self._store, self._writer = rank, store, writer
        self._host, self._heartbeat = host, heartbeat
        self._on_frame, self._on_gone = on_frame, on_gone
        self._meeting: Meeting | None = None

    def __repr__(self) -> str:
        return f"<Ways of rank {self._rank}: {self._meeting or 'no meeting'}>"

    async def announce(self, ranks: Sequence[int], timeout: float) -> Meeting:
        """Let ``ranks`` come, and say where."""
        meeting = self._meeting = Meeting(new_secret(), host=self._host, expect=ranks)
        meeting.open()
        place = meeting.place(here=True)
        record = msgspec.msgpack.encode((place.secret, place.local, place.remote))
        await self._store.tell(_key(self._rank), record, timeout)
        return meeting

    async def come(self, meeting: Meeting, rank: int) -> tuple[PeerLine, int]:
        """Wait for a rank; its line, and its process as far as it can be known."""
        work, control = await meeting.lines(rank)
        return self._line(rank, work, control), _pid_of(work)

    async def go(self, hub: int, timeout: float) -> tuple[PeerLine, int]:
        """Get to a hub, wherever it is by then.

        Raises:
            TimeoutError: It could not be found.
        """
        deadline = time.monotonic() + timeout
        refused = tenacity.retry_if_exception_type(MeetingFailed)
        return await tenacity.AsyncRetrying(retry=refused, wait=_PAUSE)(self._visit, hub, deadline)

    def close(self) -> None:
        """Nobody can come any longer. Twice is once."""
        if self._meeting is not None:
            self._meeting.close()
            self._meeting = None

    async def _visit(self, hub: int, deadline: float) -> tuple[PeerLine, int]:
        record = await self._store.learn(_key(hub), max(deadline - time.monotonic(), 1e-3))
        place = MeetingPlace(*msgspec.msgpack.decode(record, type=tuple[bytes, str, tuple[str, int] | None]))
        work, control = await off_loop(lambda: self._dial(place), "dial", unwanted=_close_both)
        return self._line(hub, work, control), _pid_of(work)

    def _dial(self, place: MeetingPlace) -> tuple[socket.socket, socket.socket]:
        work = dial(place, self._rank, "work", _ONE_TRY)
        try:
            return work, dial(place, self._rank, "control", _ONE_TRY)
        except BaseException:
            work.close()
            raise

    def _line(self, rank: int, work: socket.socket, control: socket.socket) -> PeerLine:
        return PeerLine(rank, work, control, self._writer, self._on_frame, self._on_gone, self._heartbeat)


def _key(hub: int) -> str:
    return f"meeting-{hub}"


def _pid_of(sock: socket.socket) -> int:
    return peer_pid(sock) if sock.family == socket.AF_UNIX else 0


def _close_both(pair: tuple[socket.socket, socket.socket]) -> None:
    for sock in pair:
        sock.close()
