"""Answers on their way to the driver: each call has one, whatever becomes of its value."""

from __future__ import annotations

from typing import Any, Protocol

from aexec.errors import ChannelClosed
from aexec.transport import Kind
from aexec.worker.remote import capture, departing

__all__ = ("Answers",)


class Line(Protocol):
    """What answers are sent on."""

    def send(self, kind: Kind, call: int, value: Any = None, /) -> None:
        """Send a frame; raises ``ChannelClosed``, or what is wrong with the value."""
        ...


class Answers:
    """Sends the answers of one rank on one line.

    Args:
        line: The line.
        rank: Whose answers they are.
    """

    def __init__(self, line: Line, rank: int) -> None:
        self._line, self.rank = line, rank

    def reply(self, call: int, method: str, value: Any) -> None:
        """Answer with a value; one that cannot travel is its caller's error (G51).

        Raises:
            ChannelClosed: The driver is gone.
        """
        try:
            self._line.send(Kind.REPLY, call, value)
        except ChannelClosed:
            raise
        except Exception as error:  # noqa: BLE001 - user's values pickle as their code likes
            self.fail(call, method, error)

    def fail(self, call: int, method: str, error: Exception) -> None:
        """Answer with what ``method`` raised.

        Raises:
            ChannelClosed: The driver is gone.
        """
        try:
            self._line.send(Kind.FAILURE, call, departing(error, rank=self.rank, method=method))
        except ChannelClosed:
            raise
        except Exception as worse:  # noqa: BLE001 - the error itself does not fit
            self._line.send(Kind.FAILURE, call, capture(worse, rank=self.rank, method=method))
