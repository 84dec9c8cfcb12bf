"""Who has a plain call: the thread that would run it, or the one that was told to take it back."""

from __future__ import annotations

import threading

__all__ = ("Claim", "Claims")


class Claim:
    """A call that runs.

    Attributes:
        call: Its id.
        abandoned: Nobody waits for it any longer; see ``aexec.worker.cancelled``.
    """

    __slots__ = ("abandoned", "call")

    def __init__(self, call: int, *, abandoned: bool) -> None:
        self.call = call
        self.abandoned = abandoned


class Claims:
    """The calls of one rank, which come in the order of their ids; safe from any thread.

    A call is taken back on another line than it comes on, and so perhaps before it is here.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._last = 0
        self._revoked: set[int] = set()
        self._running: Claim | None = None
        self._is_over = False

    def __repr__(self) -> str:
        return f"<Claims: up to call {self._last}, {len(self._revoked)} taken back before they came>"

    def take(self, call: int) -> Claim | None:
        """Begin a call; None: it was taken back, and must not run."""
        with self._lock:
            self._last = max(self._last, call)
            taken_back = call in self._revoked
            if self._revoked:
                self._revoked = {other for other in self._revoked if other > call}
            self._running = None if taken_back else Claim(call, abandoned=self._is_over)
            return self._running

    def end(self) -> None:
        """The call that was begun is through."""
        with self._lock:
            self._running = None

    def revoke(self, call: int) -> bool:
        """Take a call back; True: it will never run. One that runs can only be told."""
        with self._lock:
            if call > self._last:
                self._revoked.add(call)
                return True
            if self._running is not None and self._running.call == call:
                self._running.abandoned = True
            return False

    def abandon(self) -> None:
        """The worker is shut down: nobody waits for the call that runs, nor for one that is just about to."""
        with self._lock:
            self._is_over = True
            if self._running is not None:
                self._running.abandoned = True
