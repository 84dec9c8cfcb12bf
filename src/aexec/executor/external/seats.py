"""How a hub reaches the ranks of its replica, and how a rank reaches its hub: by lines, or within one process."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

from aexec.errors import ChannelFull
from aexec.executor.external.wire import PeerLine
from aexec.transport import Kind, Writer

__all__ = ("Hear", "LineSeat", "LineUp", "LocalSeat", "LocalUp", "Seat", "Up")

Hear = Callable[[Kind, int, Any], None]


class Seat(Protocol):
    """A rank of the replica, as its hub sees it.

    Attributes:
        rank: Of the replica.
        pid: Its process, as far as it is known; else 0.
    """

    rank: int
    pid: int

    @property
    def is_through(self) -> bool:
        """It makes no more calls."""
        ...

    @is_through.setter
    def is_through(self, value: bool, /) -> None: ...

    def tell(self, value: Any) -> None:
        """Send it a message of the ranks' own."""
        ...

    def beside(self, value: Any) -> None:
        """Send it one that does not wait behind outcomes."""
        ...


class LineSeat:
    """A rank in another process."""

    def __init__(self, rank: int, line: PeerLine, pid: int) -> None:
        self.rank, self.line, self.pid = rank, line, pid

    def __repr__(self) -> str:
        return f"<LineSeat {self.rank}: {self.line!r}>"

    @property
    def is_through(self) -> bool:
        """Its line's."""
        return self.line.is_through

    @is_through.setter
    def is_through(self, value: bool) -> None:
        self.line.is_through = value

    def tell(self, value: Any) -> None:
        """By its line for calls; one that reads nothing loses it, for it must not go on without this."""
        try:
            self.line.tell(value)
        except ChannelFull:
            self.line.close()

    def beside(self, value: Any) -> None:
        """By its quiet line; one that reads nothing is not told."""
        with contextlib.suppress(ChannelFull):
            self.line.beside(value)


class LocalSeat:
    """The hub's own rank: it hears on a later turn of the loop, so that nobody is called back from within a call."""

    def __init__(self, rank: int, pid: int, hear: Hear) -> None:
        self.rank, self.pid, self.is_through = rank, pid, False
        self._hear = hear
        self._waiting: deque[tuple[Kind, int, Any]] = deque()
        self._loop = asyncio.get_running_loop()

    def __repr__(self) -> str:
        return f"<LocalSeat {self.rank}: {len(self._waiting)} on their way>"

    def tell(self, value: Any) -> None:
        """Soon."""
        self.send(Kind.EVENT, 0, value)

    def beside(self, value: Any) -> None:
        """Soon."""
        self.send(Kind.EVENT, 0, value)

    def send(self, kind: Kind, call: int, value: Any) -> None:
        """An outcome, or word of a call."""
        if not self._waiting:
            self._loop.call_soon(self._deliver)
        self._waiting.append((kind, call, value))

    def _deliver(self) -> None:
        try:
            for _ in range(len(self._waiting)):
                self._hear(*self._waiting.popleft())
        finally:
            if self._waiting:  # whoever heard the last one has failed: the others are told all the same
                self._loop.call_soon(self._deliver)


class Up(Protocol):
    """A rank's way to its hub."""

    def tell(self, value: Any) -> None:
        """Send it a message of the ranks' own."""
        ...

    def beside(self, value: Any) -> None:
        """Send it one that does not wait behind outcomes."""
        ...

    def send(self, kind: Kind, call: int, value: Any) -> None:
        """Send it an outcome, or word of a call.

        Raises:
            MessageNotPortable: It cannot travel.
        """
        ...


class LineUp:
    """The hub is another process."""

    def __init__(self, line: PeerLine, writer: Writer) -> None:
        self.line, self._writer = line, writer

    def __repr__(self) -> str:
        return f"<LineUp: {self.line!r}>"

    def tell(self, value: Any) -> None:
        """By the line for calls."""
        self.line.tell(value)

    def beside(self, value: Any) -> None:
        """By the quiet line."""
        self.line.beside(value)

    def send(self, kind: Kind, call: int, value: Any) -> None:
        """By the line for calls."""
        self.line.send(kind, call, self._writer.encode(value))


class LocalUp:
    """The hub is in this process."""

    def __init__(self, hear: Hear) -> None:
        self._hear = hear

    def tell(self, value: Any) -> None:
        """At once."""
        self._hear(Kind.EVENT, 0, value)

    def beside(self, value: Any) -> None:
        """At once."""
        self._hear(Kind.EVENT, 0, value)

    def send(self, kind: Kind, call: int, value: Any) -> None:
        """At once."""
        self._hear(kind, call, value)
