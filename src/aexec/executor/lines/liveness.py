"""When a worker counts as dead: three signs of it, and how long to wait for the others. Pure.

* Its lines break (HUP). First to come, for the kernel closes files early; yet a grandchild
  that holds a copy of a line hides it.
* Its process has ended (pidfd). Never hidden; late, once gigabytes had to be freed.
* Its exit status is known, from the fork server, or because the worker said so beforehand.

Answers that were sent before the death count, so the lines are read to their end.
"""

from __future__ import annotations

from typing import NamedTuple

__all__ = ("Signs", "patience")

_FOR_LINES = 0.05  # seconds for the lines to be read to their end
_FOR_STATUS = 0.1  # for the exit status of a process that has ended
_FOR_PROCESS = 0.3  # for a process whose lines are broken to end; then it is made to


class Signs(NamedTuple):
    """What is seen of the end of one worker.

    Attributes:
        lines: Its lines are broken, and read to their end.
        process: Its process has ended.
        status: How is known.
    """

    lines: bool = False
    process: bool = False
    status: bool = False


def patience(signs: Signs) -> float | None:
    """Seconds to wait for more before the death is told; None for a worker that lives."""
    if signs.status:
        return 0.0 if signs.lines else _FOR_LINES
    if signs.process:
        return _FOR_STATUS
    return _FOR_PROCESS if signs.lines else None
