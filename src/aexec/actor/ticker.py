"""A message that comes again and again."""

from __future__ import annotations

from typing import Any

from aexec.actor.deadlines import Timer
from aexec.actor.desk import Desk
from aexec.actor.envelope import Envelope
from aexec.messages.base import Message

__all__ = ("Ticker",)


class Ticker:
    """Sends an actor one message at a regular pace; made by ``Context.every``.

    Its pace does not drift: the time of a message is reckoned from that of the one before.

    Attributes:
        seconds: Between two messages.
    """

    __slots__ = ("_actor", "_inbox", "_last", "_message", "_timer", "seconds")

    def __init__(self, inbox: Desk, seconds: float, message: Message[Any]) -> None:
        self._inbox, self._message, self.seconds = inbox, message, seconds
        self._actor = inbox.actor  # a restart ends it with its actor
        self._last: Envelope | None = None
        self._timer: Timer | None = None
        self._sleep(inbox.core.runtime.now() + seconds)

    def __repr__(self) -> str:
        what = f"{type(self._message).__name__} to {self._inbox.name}"
        return f"<Ticker {what}: {'over' if self._timer is None else f'every {self.seconds:g} s'}>"

    def cancel(self) -> None:
        """Call it off; a message that is in the mailbox already is handled."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _sleep(self, until: float) -> None:
        self._timer = self._inbox.core.deadlines.call_at(until, self._ring)

    def _ring(self) -> None:
        timer, self._timer = self._timer, None
        if self._inbox.exit is not None or self._inbox.actor is not self._actor or timer is None:
            return
        self._last = self._inbox.tick(self._message, self._last)
        self._sleep(max(timer.when, self._inbox.core.runtime.now() - self.seconds) + self.seconds)
