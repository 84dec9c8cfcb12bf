"""What the machine has, by its own account."""

from __future__ import annotations

from pathlib import Path

from aexec.model.memory import free_host_bytes, peak_host_bytes, recommended_threads


def proc(tmp_path: Path, available_kib: int) -> Path:
    path = tmp_path / "meminfo"
    path.write_text(f"MemTotal: 999999 kB\nMemFree: 1 kB\nMemAvailable:   {available_kib} kB\n")
    return path


def test_free_memory_is_what_the_kernel_calls_available(tmp_path) -> None:
    """MemAvailable: page cache can be had back."""
    assert free_host_bytes(proc(tmp_path, 2048), tmp_path) == 2048 * 1024


def test_a_control_group_can_leave_less(tmp_path) -> None:
    """In a container the limit counts, less what is used; never below zero."""
    (tmp_path / "memory.max").write_text("1000000\n")
    (tmp_path / "memory.current").write_text("400000\n")
    assert free_host_bytes(proc(tmp_path, 2048), tmp_path) == 600000
    (tmp_path / "memory.current").write_text("1400000\n")
    assert free_host_bytes(proc(tmp_path, 2048), tmp_path) == 0


def test_an_unlimited_control_group_limits_nothing(tmp_path) -> None:
    """``max`` is no number."""
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("400000\n")
    assert free_host_bytes(proc(tmp_path, 2048), tmp_path) == 2048 * 1024


def test_without_proc_half_of_the_memory_counts_as_free(tmp_path) -> None:
    """A guess that errs to the safe side."""
    assert free_host_bytes(tmp_path / "none", tmp_path) > 0


def test_peak_memory_is_in_bytes() -> None:
    """This very process takes between 10 MB and a terabyte."""
    assert 10**7 < peak_host_bytes() < 10**12


def test_workers_share_the_cores() -> None:
    """Threads times workers is at most the cores, and each worker has one."""
    assert recommended_threads(10**6) == 1
    assert recommended_threads(1) >= recommended_threads(2) >= 1
