from __future__ import annotations

import errno
import fcntl
import mmap
import os
from pathlib import Path

import pytest

from aexec.errors import ArenaFull
from aexec.transport.arena import Arena
from aexec.transport.segments import Segment, memory_file

MIB = 1 << 20


@pytest.fixture
def arena():
    arena = Arena(32 * MIB, "ExecutorConfig.something")
    yield arena
    arena.close()


def test_a_block_is_free_when_its_last_holder_has_given_it_back(arena):
    """Holders are counted, and a number that somebody does not hold means nothing."""
    lease = arena.lease(1000, ["left", "right"], "a thing")
    arena.release([lease.number, 77], "left")
    arena.release([lease.number], "left")
    assert arena.statistics().leases == 1
    arena.release([lease.number], "right")
    assert arena.statistics()[2:4] == (0, 0)
    assert arena.lease(1000, ["left"], "a thing").block == lease.block


def test_a_reader_that_is_gone_holds_nothing(arena):
    """Its leases end; those of others do not."""
    for _ in range(3):
        arena.lease(1000, ["dead", "alive"], "a thing")
    arena.lease(1000, ["dead"], "a thing")
    arena.forget("dead")
    assert [lease.holders for lease in arena.held()] == [("alive",)] * 3


def test_a_full_arena_says_who_fills_it(arena):
    """Need, room, limit, setting, and the oldest of those that are in use."""
    arena.lease(20 * MIB, ["rank 1 work"], "ExecuteModel")
    with pytest.raises(ArenaFull) as caught:
        arena.lease(20 * MIB, ["rank 1 work"], "ExecuteModel")
    error = caught.value
    assert (error.need, error.free, error.limit) == (20 * MIB, 12 * MIB, 32 * MIB)
    for words in ("20.0 MiB", "12.0 MiB of 32.0", "ExecutorConfig.something", "ExecuteModel", "held by rank 1 work"):
        assert words in str(error)


@pytest.mark.parametrize("setting", ["ExecutorConfig.something", ""])
def test_what_can_be_raised_is_named_and_what_cannot_is_not(setting):
    """The remedy of an error is one that there is."""
    arena = Arena(MIB, setting)
    arena.lease(MIB // 2, ["rank 1 work"], "ExecuteModel")
    with pytest.raises(ArenaFull) as held:
        arena.lease(MIB, ["rank 1 work"], "ExecuteModel")
    for error, otherwise in ((held.value, "copy what you keep"), (arena.too_large(2 * MIB), "send less at once")):
        assert str(error).endswith(f"{otherwise}, or raise {setting}" if setting else otherwise)
        assert f"({setting})" not in str(error) or setting
    arena.close()


def test_idle_segments_make_room_for_other_sizes(arena):
    """A limit is about what is in use: what was used once is given up for what is asked now."""
    for size in (3, 17, 30, 18, 31, 2):
        lease = arena.lease(size * MIB, ["one"], "a thing")
        arena.bytes_of(lease.block, size * MIB)[-1] = 1
        arena.release([lease.number], "one")
        assert arena.statistics().reserved <= arena.limit


@pytest.mark.parametrize("limit", [1, mmap.PAGESIZE, mmap.PAGESIZE * 5 + 1])
def test_a_small_limit_is_a_limit(limit):
    """Memory comes in pages, and no more of them than the limit holds."""
    arena = Arena(limit, "limit")
    for _ in range(limit // mmap.PAGESIZE):
        arena.lease(1, ["one"], "a thing")
    with pytest.raises(ArenaFull):
        arena.lease(1, ["one"], "a thing")
    assert arena.statistics().reserved <= limit
    arena.close()


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EFBIG, errno.ENOMEM, errno.EMFILE])
def test_memory_that_the_system_does_not_give_is_an_error_and_no_bus_error(number):
    """G16: it is reserved when it is taken; the error has the system's reason, need, room and setting."""

    def refuse(size: int) -> int:
        raise OSError(number, os.strerror(number))

    arena = Arena(64 * MIB, "ExecutorConfig.something", allocate=refuse)
    with pytest.raises(ArenaFull, match=os.strerror(number)) as caught:
        arena.lease(5 * MIB, ["one"], "a thing")
    assert "5.0 MiB" in str(caught.value)
    assert "ExecutorConfig.something" in str(caught.value)
    assert arena.statistics()[1:] == (0, 0, 0, 0)


def test_a_reader_can_change_neither_the_memory_nor_its_size():
    """It may map it for itself alone; the owner writes on."""
    segment = Segment(2 * mmap.PAGESIZE)
    with pytest.raises(PermissionError):
        os.ftruncate(segment.fd, mmap.PAGESIZE)
    with pytest.raises(PermissionError):
        mmap.mmap(segment.fd, mmap.PAGESIZE)
    with pytest.raises(PermissionError):
        os.pwrite(segment.fd, b"x", 0)
    private = mmap.mmap(segment.fd, mmap.PAGESIZE, flags=mmap.MAP_PRIVATE)
    segment.bytes[0] = 7
    assert private[0] == 7
    private[0] = 8
    assert segment.bytes[0] == 7
    private.close()
    segment.close()


def test_memory_has_no_name_and_is_not_inherited():
    """Nothing to find in /dev/shm, and nothing that a child could keep alive."""
    descriptor = memory_file(mmap.PAGESIZE)
    assert "memfd:aexec" in str(Path(f"/proc/self/fd/{descriptor}").readlink())
    assert fcntl.fcntl(descriptor, fcntl.F_GETFD) & fcntl.FD_CLOEXEC
    os.close(descriptor)
    assert not list(Path("/dev/shm").glob("*aexec*"))


def test_memory_that_cannot_be_reserved_leaves_no_descriptor(monkeypatch):
    """It is closed again."""

    def refuse(*_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    before = len(list(Path("/proc/self/fd").iterdir()))
    monkeypatch.setattr(os, "posix_fallocate", refuse)
    with pytest.raises(OSError, match="No space"):
        memory_file(1 << 20)
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_it_can_be_read(arena):
    """By people."""
    arena.lease(1, ["one"], "a thing")
    assert repr(arena) == f"<Arena: 1 leases, {mmap.PAGESIZE} of 33554432 bytes used, 16777216 reserved>"
