"""What the operating system says of a process of this machine."""

from __future__ import annotations

import os

__all__ = ("process_state",)

_STATES = {"T": "stopped", "t": "stopped", "Z": "dead", "X": "dead"}


def process_state(pid: int) -> str:
    """``running``, ``stopped`` (by a signal) or ``dead``; empty where the system does not tell."""
    try:
        file = os.open(f"/proc/{pid}/stat", os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return "dead" if os.path.exists("/proc/self/stat") else ""  # noqa: PTH110 - microseconds, on the loop
    except OSError:
        return ""
    try:
        text = os.read(file, 4096).decode(errors="replace")
    except OSError:
        return "dead"  # it ended between the two
    finally:
        os.close(file)
    return _STATES.get(text.rpartition(")")[2].split()[0], "running")
