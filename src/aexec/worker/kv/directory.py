"""Blocks in a directory, a file for each: they outlive the process, and others may use them too.

::

    <directory>/<fingerprint>/rank-00000-of-00002/<key>.kv

Another model, other weights, another dtype or layout has another fingerprint, and finds
nothing of this one. The limit is that of the whole directory, whoever fills it: when it is
reached, the files that were used least recently go, down to nine tenths. Each process looks
again after a tenth of its own, so that several may be over the limit by as many tenths. Who
shares a directory sees a file go at any time, and takes it as not held.
"""

from __future__ import annotations

import contextlib
import os
import stat
import time
from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from aexec.errors import ConfigError
from aexec.model.kv_access import Row
from aexec.worker.kv.block_file import (
    FINGERPRINT_BYTES,
    HEADER_BYTES,
    KEY_BYTES,
    SUFFIX,
    TEMPORARY,
    read_block,
    write_block,
)
from aexec.worker.kv.store import StoreStatistics

__all__ = ("DirectoryStore", "open_directory", "sweep")

_KEPT_SHARE = 0.9  # of the limit, after a sweep
_ABANDONED_SECONDS = 600.0  # a temporary file of that age has no writer any longer


class _File(NamedTuple):
    """A file of any rank, in order of its last use."""

    used: float
    size: int
    path: str


class DirectoryStore:
    """The blocks of one rank in a directory.

    Args:
        directory: Of all ranks, models and processes; see :func:`open_directory`.
        fingerprint: Of what computes this rank's blocks.
        rank: This rank.
        world_size: Ranks that fill the directory together.
        limit_bytes: What all files of the directory may take.
        block_bytes: Bytes of a block on this rank.
    """

    def __init__(
        self, directory: Path, fingerprint: bytes, *, rank: int, world_size: int, limit_bytes: int, block_bytes: int
    ) -> None:
        self._directory, self._fingerprint = directory, fingerprint
        self._home = directory / fingerprint.hex() / f"rank-{rank:05}-of-{world_size:05}"
        self._make_home()
        self._world_size, self._limit_bytes, self._block_bytes = world_size, limit_bytes, block_bytes
        self._row = np.empty(block_bytes, dtype=np.uint8)
        self._dropped: set[bytes] = set()
        own = sorted(_block_files(self._home))
        self._keys = OrderedDict((key, None) for file in own if (key := _key_of(file.path)) is not None)
        self._room = 0  # bytes to write until the directory is looked through again
        self._sweep()

    def __repr__(self) -> str:
        return f"<DirectoryStore {self._home}: {len(self._keys)} blocks of {self._block_bytes:,} bytes>"

    def keys(self) -> Collection[bytes]:
        """Keys of all blocks that it holds, as far as is known, least recently used first."""
        return self._keys.keys()

    @property
    def capacity(self) -> int:
        """What a sweep leaves, if nobody else fills the directory."""
        return max(1, int(self._limit_bytes * _KEPT_SHARE) // self._world_size // (HEADER_BYTES + self._block_bytes))

    def touch(self, keys: Iterable[bytes]) -> None:
        """These are used now: others go first, whichever process looks for room."""
        for key in keys:
            with contextlib.suppress(OSError, KeyError):
                self._keys.move_to_end(key)
                os.utime(self._path(key))

    def reserve(self, key: bytes) -> Row:  # noqa: ARG002 - one room serves all
        """Room in memory."""
        return self._row

    def commit(self, key: bytes) -> None:
        """Write the block.

        Raises:
            OSError: It cannot be written.
        """
        size = HEADER_BYTES + self._block_bytes
        if self._room < size:
            self._sweep()
        try:
            write_block(self._path(key), self._fingerprint, key, self._row)
        except FileNotFoundError:  # another process found the folder empty, and deleted it
            self._make_home()
            write_block(self._path(key), self._fingerprint, key, self._row)
        self._room -= size
        self._keys[key] = None
        self._dropped.discard(key)

    def fetch(self, key: bytes) -> Row:
        """Read a block.

        Raises:
            KeyError: There is no file of it, or it is damaged: it is deleted then.
        """
        path = self._path(key)
        try:
            read_block(path, self._fingerprint, key, self._row)
        except (OSError, ValueError) as error:
            self._keys.pop(key, None)
            if isinstance(error, ValueError):
                with contextlib.suppress(OSError):
                    path.unlink()
            raise KeyError(str(error)) from error
        return self._row

    def take_dropped(self) -> set[bytes]:
        """Keys whose files were deleted since the last call."""
        dropped, self._dropped = self._dropped, set()
        return dropped

    def statistics(self) -> StoreStatistics:
        """The store in numbers, of this rank alone."""
        count = len(self._keys)
        return StoreStatistics(count, count * (HEADER_BYTES + self._block_bytes), self._limit_bytes)

    def close(self) -> None:
        """The files stay."""
        self._keys.clear()

    def _make_home(self) -> None:
        self._home.mkdir(mode=0o700, parents=True, exist_ok=True)

    def _path(self, key: bytes) -> Path:
        return self._home / f"{key.hex()}{SUFFIX}"

    def _sweep(self) -> None:
        """Make room, and see how much there is: a rank looks again once it has taken its share of a tenth."""
        left, deleted = sweep(self._directory, self._limit_bytes)
        own = self._home.parent.name
        for path in deleted:
            key = _key_of(path)
            if key is not None and f"/{own}/" in path:  # of any rank: a block without all of its parts is of no use
                self._keys.pop(key, None)
                self._dropped.add(key)
        size = HEADER_BYTES + self._block_bytes
        most = self._limit_bytes - int(self._limit_bytes * _KEPT_SHARE)  # others may fill it at the same time
        self._room = max(min(self._limit_bytes - left, most) // self._world_size, size)


def open_directory(path: str, limit_bytes: int, block_bytes: int) -> Path:
    """Make the directory if it is not there, for this user alone.

    Raises:
        ConfigError: It cannot be made or written to, others can look into it, or it may not hold a block.
    """
    directory = Path(path).expanduser().absolute()
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        facts = directory.stat()
    except OSError as error:
        raise ConfigError(f"Offload.directory {directory} cannot be made: {error.strerror or error}") from error
    if facts.st_uid != os.geteuid() or stat.S_IMODE(facts.st_mode) & 0o077:
        raise ConfigError(
            f"Offload.directory {directory} is open to others (mode {stat.S_IMODE(facts.st_mode):o}, owner "
            f"{facts.st_uid}), and KV blocks tell what was asked: expected one of your own; chmod 700 {directory}"
        )
    if not os.access(directory, os.W_OK | os.X_OK):
        raise ConfigError(f"Offload.directory {directory} cannot be written to: choose another one")
    if limit_bytes < HEADER_BYTES + block_bytes:
        raise ConfigError(
            f"Offload.bytes is {limit_bytes:,}: expected at least {HEADER_BYTES + block_bytes:,}, "
            "which is the file of one KV block"
        )
    return directory


def sweep(directory: Path, limit_bytes: int) -> tuple[int, list[str]]:
    """Delete the files that were used least recently, if all together are over the limit.

    Returns:
        Bytes of what is left, and the files that were deleted.
    """
    files = sorted(_files(directory))
    total, kept = sum(file.size for file in files), int(limit_bytes * _KEPT_SHARE)
    deleted: list[str] = []
    if total <= kept:
        return total, deleted
    for file in files:
        if total <= kept:
            break
        with contextlib.suppress(OSError):
            os.unlink(file.path)  # noqa: PTH108 - thousands of them
            deleted.append(file.path)
        total -= file.size
    for home in {os.path.dirname(path) for path in deleted}:  # noqa: PTH120 - the same
        with contextlib.suppress(OSError):  # it is not empty
            Path(home).rmdir()
            Path(home).parent.rmdir()
    return total, deleted


def _files(directory: Path) -> Iterator[_File]:
    """All block files of the directory, of any model and rank."""
    for model in _folders(directory):
        if len(model.name) == 2 * FINGERPRINT_BYTES:
            for rank in _folders(Path(model.path)):
                yield from _block_files(Path(rank.path))


def _block_files(home: Path) -> Iterator[_File]:
    """Those of one rank, and those that are being written; what has no writer any longer is deleted."""
    now = time.time()
    for entry in _entries(home):
        with contextlib.suppress(OSError):  # it went meanwhile
            facts = entry.stat(follow_symlinks=False)
            if entry.name.endswith(TEMPORARY) and now - facts.st_mtime > _ABANDONED_SECONDS:
                os.unlink(entry.path)  # noqa: PTH108 - thousands of them
            elif entry.name.endswith((SUFFIX, TEMPORARY)):
                yield _File(facts.st_mtime, facts.st_size, entry.path)


def _folders(directory: Path) -> Iterator[os.DirEntry[str]]:
    return (entry for entry in _entries(directory) if entry.is_dir(follow_symlinks=False))


def _entries(directory: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(directory) as entries:
            return list(entries)
    except OSError:
        return []


def _key_of(path: str) -> bytes | None:
    """The key in a file's name; None: it is no block's file."""
    text = path.rpartition("/")[2].removesuffix(SUFFIX)
    try:
        key = bytes.fromhex(text)
    except ValueError:
        return None
    return key if len(key) == KEY_BYTES else None
