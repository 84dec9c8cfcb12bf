"""Messages that came to nothing: counted always, logged now and then.

An ask never becomes a dead letter in silence, for its caller is given an error besides.
A tell has nobody to be told, so that the log is where its loss is seen.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Literal, get_args

from aexec.actor.logs import logger
from aexec.actor.statistics import DeadLetterCounts

__all__ = ("DeadLetterKind", "DeadLetters")

DeadLetterKind = Literal["closed", "expired", "cancelled", "full", "undeliverable", "no_reply"]

LOG_INTERVAL = 10.0


class DeadLetters:
    """Counts dead letters by kind; logs the first of a kind and then one line in a while.

    Args:
        system: Name of the system, for the log.

    Attributes:
        listener: Called for the first of a kind and then once in a while, with the kind, the
            actor, the type of the message and how many there were.
    """

    def __init__(self, system: str) -> None:
        self._system = system
        self._counts: dict[DeadLetterKind, int] = dict.fromkeys(get_args(DeadLetterKind), 0)
        self._logged: dict[DeadLetterKind, float] = {}
        self._told: dict[DeadLetterKind, float] = {}
        self.listener: Callable[[DeadLetterKind, str, str, int], object] | None = None

    def __repr__(self) -> str:
        counts = ", ".join(f"{count} {kind}" for kind, count in self._counts.items() if count)
        return f"<DeadLetters {self._system}: {counts or 'none'}>"

    def statistics(self) -> DeadLetterCounts:
        """The counts so far."""
        return DeadLetterCounts(**self._counts)

    def record(self, kind: DeadLetterKind, actor: str, message: str, *, silent: bool) -> None:
        """Count one.

        Args:
            kind: What became of it.
            actor: Whom it was for.
            message: The type of the message.
            silent: Nobody is given an error for it: log it.
        """
        self._counts[kind] += 1
        now = time.monotonic()
        if self.listener is not None and now - self._told.get(kind, -LOG_INTERVAL) >= LOG_INTERVAL:
            self._told[kind] = now
            self.listener(kind, actor, message, self._counts[kind])
        if silent and now - self._logged.get(kind, -LOG_INTERVAL) >= LOG_INTERVAL:
            self._logged[kind] = now
            logger(system=self._system, actor=actor).warning(
                "dead letter", kind=kind, message=message, so_far=self._counts[kind]
            )
