"""Shared memory without a name: reserved when it is made, sealed, and gone with its last user."""

from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ("Allocate", "Segment", "memory_file")

Allocate = Callable[[int], int]
"""From a size to the descriptor of so much memory, all of it reserved; raises ``OSError``."""

# Source: linux/fcntl.h. Nobody may change the size, map it for shared writing from now on,
# or take these promises back.
_ADD_SEALS = 1033
_SEALS = 0x0001 | 0x0002 | 0x0004 | 0x0010


def memory_file(size: int) -> int:
    """An anonymous memory file: too little memory is an error here, never a bus error later.

    Raises:
        OSError: There is not as much, or there are no memory files on this system.
    """
    if not hasattr(os, "memfd_create"):
        raise OSError("this system has no memory files")
    descriptor = os.memfd_create("aexec", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.posix_fallocate(descriptor, 0, size)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


class Segment:
    """A stretch of memory that this process writes and others read.

    Args:
        size: Bytes.
        allocate: Where they come from.

    Attributes:
        fd: For those who read.
        bytes: The memory, uint8 ``[size]``.
    """

    def __init__(self, size: int, allocate: Allocate = memory_file) -> None:
        self.size = size
        self.fd = allocate(size)
        try:
            memory = mmap.mmap(self.fd, size)
            fcntl.fcntl(self.fd, _ADD_SEALS, _SEALS)
        except OSError:
            os.close(self.fd)
            raise
        self.bytes: npt.NDArray[Any] = np.frombuffer(memory, np.uint8)

    def __repr__(self) -> str:
        return f"<Segment fd {self.fd}: {self.size} bytes>"

    def close(self) -> None:
        """Let go of it; its memory is given back when the last reader has let go of it too."""
        os.close(self.fd)
        self.bytes = np.empty(0, np.uint8)
