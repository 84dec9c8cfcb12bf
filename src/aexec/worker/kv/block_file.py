"""A file that holds one KV block: a header that says whose, a checksum, the bytes. Never a pickle.

It is written under another name and renamed, so that a reader finds all of it or nothing;
what a crash of the machine leaves half written is found out by the checksum.

Layout, little endian: ``8s`` magic, ``32s`` fingerprint, ``40s`` key, ``Q`` bytes of the
block, ``I`` checksum, padding to 128 bytes, the block. The checksum is CRC-32 of the header
up to it and of the block.
"""

from __future__ import annotations

import contextlib
import os
import struct
import zlib
from pathlib import Path

import numpy as np

from aexec.model.kv_access import Row

__all__ = ("FINGERPRINT_BYTES", "HEADER_BYTES", "KEY_BYTES", "SUFFIX", "TEMPORARY", "read_block", "write_block")

FINGERPRINT_BYTES, KEY_BYTES = 32, 40
HEADER_BYTES = 128
SUFFIX, TEMPORARY = ".kv", ".tmp"
_MAGIC = b"aexeckv1"
_HEAD = struct.Struct(f"<8s{FINGERPRINT_BYTES}s{KEY_BYTES}sQ")
_SUM = struct.Struct("<I")


def write_block(path: Path, fingerprint: bytes, key: bytes, row: Row) -> int:
    """Write a file, whole or not at all.

    Args:
        path: Its name.
        fingerprint: Of what computed the block.
        key: Of the block.
        row: The block.

    Returns:
        The file's bytes.

    Raises:
        OSError: It could not be written; nothing is left of it.
    """
    head = _HEAD.pack(_MAGIC, fingerprint, key, row.nbytes)
    header = (head + _SUM.pack(_checksum(head, row))).ljust(HEADER_BYTES, b"\0")
    temporary = path.with_name(f"{path.name}.{os.getpid()}{TEMPORARY}")
    try:
        file = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            _write_all(file, header, row)
        finally:
            os.close(file)
        temporary.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
    return HEADER_BYTES + row.nbytes


def read_block(path: Path, fingerprint: bytes, key: bytes, row: Row) -> None:
    """Read a file into ``row``, of which it has to be the very size.

    Raises:
        OSError: It is not there, or cannot be read.
        ValueError: It is damaged, or is the file of something else.
    """
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        size = os.fstat(file).st_size
        if size != HEADER_BYTES + row.nbytes:
            raise ValueError(f"{path.name} has {size:,} bytes: expected {HEADER_BYTES + row.nbytes:,}")
        header = bytearray(HEADER_BYTES)
        if os.readv(file, [header, row.data]) != size:
            raise ValueError(f"{path.name} changed while it was read")
    finally:
        os.close(file)
    head = bytes(header[: _HEAD.size])
    if head != _HEAD.pack(_MAGIC, fingerprint, key, row.nbytes):
        raise ValueError(f"{path.name} is the file of another block, model or version")
    if _SUM.unpack_from(header, _HEAD.size)[0] != _checksum(head, row):
        raise ValueError(f"{path.name} is damaged: its checksum is wrong")


def _checksum(head: bytes, row: Row) -> int:
    return zlib.crc32(row.data, zlib.crc32(head))


def _write_all(file: int, header: bytes, row: Row) -> None:
    done = os.writev(file, [header, row.data])
    rest = (
        np.concatenate([np.frombuffer(header, np.uint8), row])[done:] if done < HEADER_BYTES + row.nbytes else row[:0]
    )
    while rest.nbytes:
        rest = rest[os.write(file, rest.data) :]
