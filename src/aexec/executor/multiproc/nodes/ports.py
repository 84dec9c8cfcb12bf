"""Whose a port is that cannot be had, as far as the system lets this user see it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

__all__ = ("owner_of_port",)

_LISTEN = "0A"  # state in /proc/net/tcp; see proc(5)


def owner_of_port(port: int, proc: Path = Path("/proc")) -> str:
    """The process that listens on a TCP port, as in ``pid 4711 (python)``; empty: nobody that can be seen.

    Reads all of ``/proc``, so it is for the moment in which something has failed anyway.
    """
    wanted = {f"socket:[{inode}]" for inode in _listening(port, proc)}
    if wanted:
        for process in proc.glob("[0-9]*"):
            if _holds(process, wanted):
                return f"pid {process.name} ({_name_of(process)})"
    return ""


def _listening(port: int, proc: Path) -> Iterator[str]:
    for table in ("net/tcp", "net/tcp6"):
        with contextlib.suppress(OSError):
            for line in (proc / table).read_text(encoding="utf-8").splitlines()[1:]:
                fields = line.split()
                if fields[3] == _LISTEN and int(fields[1].rpartition(":")[2], 16) == port:
                    yield fields[9]


def _holds(process: Path, sockets: set[str]) -> bool:
    with contextlib.suppress(OSError):  # it has ended, or is somebody else's
        for descriptor in (process / "fd").iterdir():
            with contextlib.suppress(OSError):
                if os.readlink(descriptor) in sockets:  # noqa: PTH115 - no file is meant
                    return True
    return False


def _name_of(process: Path) -> str:
    try:
        return (process / "comm").read_text(encoding="utf-8").strip()
    except OSError:
        return "?"
