"""A restart of one or more actors: down the youngest first, up again the eldest first."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from aexec.actor.deadlines import Deadlines, Timer
from aexec.actor.lifecycle import Exit

__all__ = ("Member", "Round")


class Member(Protocol):
    """Who takes part: ``ward.Ward``."""

    name: str

    def wake(self) -> None:
        """Look again whether it is your turn."""
        ...


class Round:
    """Whose turn it is; each member acts in a task of its own, and any may leave at any time.

    Args:
        members: In the order they were spawned.
        failed: The one that failed.
        exit_: What it failed of.
        deadlines: Wakes the members when the back-off is over.
        now: The clock of ``deadlines``.
    """

    def __init__(
        self,
        members: Sequence[Member],
        failed: Member,
        exit_: Exit,
        deadlines: Deadlines,
        now: Callable[[], float],
    ) -> None:
        self._failed, self._exit = failed, exit_
        self._deadlines, self._now = deadlines, now
        self._up_there = list(members)
        self._to_come = list(members)
        self._ready_at = now()
        self._timer: Timer | None = None

    def __repr__(self) -> str:
        return f"<Round of {self._failed.name}: {len(self._up_there)} to go down, {len(self._to_come)} to come up>"

    def exit_of(self, member: Member) -> Exit:
        """Why a member's incarnation ends."""
        if member is self._failed:
            return self._exit
        return Exit("failed", f"restarted with its sibling {self._failed.name}: {self._exit.reason}", self._exit.error)

    def hold_until(self, when: float) -> None:
        """Let nobody come up before ``when``, in monotonic seconds."""
        self._ready_at = when
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._deadlines.call_at(when, self._wake)

    def may_go_down(self, member: Member) -> bool:
        """True when all that are younger are down."""
        return self._up_there[-1] is member

    def is_down(self, member: Member) -> None:
        """Take note that a member's incarnation has ended."""
        self._up_there.remove(member)
        self._wake()

    def may_come_up(self, member: Member) -> bool:
        """True when all are down, the back-off is over, and all that are older are up."""
        return not self._up_there and self._to_come[0] is member and self._now() >= self._ready_at

    def leave(self, member: Member) -> None:
        """Take note that a member is up again, or ends for good."""
        if member in self._up_there:
            self._up_there.remove(member)
        self._to_come.remove(member)
        if not self._to_come and self._timer is not None:
            self._timer.cancel()
        self._wake()

    def _wake(self) -> None:
        for member in self._to_come:
            member.wake()
