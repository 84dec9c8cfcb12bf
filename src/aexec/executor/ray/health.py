"""How a worker ended, from all who know a part of it: Ray, the kernel of this machine, and the worker's log.

Ray knows that an actor has died, and in which way as far as it had a hand in that; it never
knows a signal, and an exit code only of ends that are announced to it. The kernel knows both,
on this machine, of any process (``PIDFD_GET_INFO``, Linux 6.15 and later).
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import signal
import socket
import struct
from typing import NamedTuple

__all__ = ("Ending", "exit_status", "log_tail", "open_pidfd", "peer_pidfd", "ray_says")

_GET_INFO = (3 << 30) | (64 << 16) | (0xFF << 8) | 11  # linux/pidfd.h: PIDFD_GET_INFO, for the first 64 bytes
_EXIT = 1 << 3  # PIDFD_INFO_EXIT
_EXIT_CODE_AT = 60
_SO_PEERPIDFD = 77  # Linux 6.5 and later
_TAIL_BYTES = 1 << 16
_TAIL_LINES = 50
_RAY_MARKS = (":job_id:", ":actor_name:", ":task_name:")  # lines that Ray's log monitor reads


class Ending(NamedTuple):
    """How a process ended.

    Attributes:
        code: Its exit code; None when a signal ended it, or when nobody knows.
        signal: Name of the signal that ended it.
        cause: What Ray says of it; empty: no more than that it has ended.
    """

    code: int | None = None
    signal: str | None = None
    cause: str = ""

    @property
    def is_silent(self) -> bool:
        """Neither a code nor a signal is known."""
        return self.code is None and self.signal is None

    def known_as(self, other: Ending) -> Ending:
        """This one, where it is silent completed by what ``other`` says."""
        code, by = (other.code, other.signal) if self.is_silent else (self.code, self.signal)
        return Ending(code, by, self.cause or other.cause)


#: What Ray writes, and what that means; the first that is found counts.
_CAUSES = (
    (r"placement group was removed", "its placement group was removed"),
    (r"(?i)killed by (?:the )?`?ray\.kill|via `?ray\.kill|intentional_system_exit.*ray\.kill", "ray.kill was called on it"),
    (r"(?i)node (?:has )?(?:died|was dead|is dead|failure)|its node has died|node_died", "its node has died"),
    (r"(?i)killed due to (?:the )?node running low on memory|OutOfMemory", "Ray ended it, for its node ran out of memory"),
    (r"(?i)preempt", "its node was preempted"),
    (r"(?i)drained|draining", "its node was drained"),
    (r"(?i)owner has died|owner died|job (?:has )?finished", "the driver that Ray knew as its owner has ended"),
    (r"(?i)actor .{0,80}unavailable", "Ray can no longer reach its node"),
    (r"exit_actor|user request", "it ended itself"),
    (r"receives a SIGTERM", "it was sent SIGTERM"),
)  # fmt: skip


def ray_says(error: BaseException) -> Ending:
    """What an error of Ray's tells of the end of an actor. Pure."""
    text = str(error)
    found = re.search(r"exit code (-?\d+)", text)
    cause = next((meaning for pattern, meaning in _CAUSES if re.search(pattern, text)), "")
    return Ending(int(found[1]) if found else None, None, cause)


def open_pidfd(pid: int) -> int:
    """A descriptor that means this process for ever; -1 if there is none."""
    try:
        return os.pidfd_open(pid)
    except (AttributeError, OSError):
        return -1


def peer_pidfd(sock: socket.socket) -> int:
    """A descriptor of the process at the other end of a Unix socket, whatever its number is in its own namespace."""
    with contextlib.suppress(OSError):
        return sock.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD)
    with contextlib.suppress(OSError):
        credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        return open_pidfd(struct.unpack("3i", credentials)[0])
    return -1


def exit_status(pidfd: int) -> Ending:
    """How a process ended, whoever's child it was; nothing is known where the kernel is too old to tell."""
    info = bytearray(64)
    struct.pack_into("Q", info, 0, _EXIT)
    try:
        fcntl.ioctl(pidfd, _GET_INFO, info)
    except (OSError, ValueError):
        return Ending()
    if not struct.unpack_from("Q", info)[0] & _EXIT:
        return Ending()
    code = os.waitstatus_to_exitcode(struct.unpack_from("i", info, _EXIT_CODE_AT)[0])
    return Ending(code) if code >= 0 else Ending(None, _signal_name(-code))


def log_tail(path: str, start: int = 0) -> str:
    """The last lines of a worker's log file.

    Args:
        path: Of the file; it is on this machine.
        start: Where this worker's part begins, bytes.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return ""
    try:  # one read of the end of a local file: a loop may do it
        size = os.fstat(descriptor).st_size
        lines = os.pread(descriptor, _TAIL_BYTES, max(start, size - _TAIL_BYTES)).decode(errors="replace").splitlines()
    finally:
        os.close(descriptor)
    return "\n".join([line for line in lines if not line.startswith(_RAY_MARKS)][-_TAIL_LINES:])


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return f"signal {number}"
