"""How much memory there is, how much was used, and what a KV cache may take of it."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import resource
import sys
from pathlib import Path

__all__ = (
    "cache_budget",
    "free_host_bytes",
    "give_back_host_memory",
    "peak_host_bytes",
    "recommended_threads",
    "resident_host_bytes",
)

GIB = 2**30
_CPU_SHARE, _CPU_CAP = 0.25, 4 * GIB
_CUDA_SHARE = 0.90


def free_host_bytes(meminfo: Path = Path("/proc/meminfo"), cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes that this process may still take: what the machine and its control group leave.

    Falls back to half of the physical memory where there is no ``/proc/meminfo``.
    """
    free = _available(meminfo)
    limit, used = _number(cgroup / "memory.max"), _number(cgroup / "memory.current")
    return free if limit is None or used is None else max(0, min(free, limit - used))


def peak_host_bytes() -> int:
    """Peak resident memory of this process so far."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def resident_host_bytes(statm: Path = Path("/proc/self/statm")) -> int:
    """Resident memory of this process now; its peak where there is no ``/proc``."""
    try:
        return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return peak_host_bytes()


def give_back_host_memory() -> None:
    """Collect garbage, and have the C library return free pages; only glibc keeps any and knows how."""
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def cache_budget(free_bytes: int, *, is_cuda: bool) -> int:
    """Bytes that a KV cache takes when the user names no budget.

    On CUDA nine tenths of what is free. On a CPU a quarter of it and never more than
    4 GiB: that memory is shared with everything else on the machine, and 4 GiB already
    hold more tokens than a CPU decodes in a sitting (90,000 of SmolLM2 in float32).
    """
    return int(free_bytes * _CUDA_SHARE) if is_cuda else min(int(free_bytes * _CPU_SHARE), _CPU_CAP)


def recommended_threads(local_workers: int = 1) -> int:
    """Compute threads for each of the workers on this machine; more only makes them wait."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // max(1, local_workers))


def _available(meminfo: Path) -> int:
    try:
        lines = meminfo.read_text().splitlines()
    except OSError:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    fields = dict(line.split(":", 1) for line in lines if ":" in line)
    return int(fields["MemAvailable"].split()[0]) * 1024


def _number(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None
