from __future__ import annotations

import os

import numpy as np
import pytest

from aexec.worker.kv import block_file
from aexec.worker.kv.block_file import HEADER_BYTES, read_block, write_block

FINGERPRINT, KEY = bytes(32), bytes(range(40))
BLOCK = np.arange(200, dtype=np.uint8)


@pytest.fixture
def path(tmp_path):
    found = tmp_path / "block.kv"
    assert write_block(found, FINGERPRINT, KEY, BLOCK) == HEADER_BYTES + 200
    return found


def read(path, *, fingerprint=FINGERPRINT, key=KEY, size=200):
    row = np.zeros(size, dtype=np.uint8)
    read_block(path, fingerprint, key, row)
    return row


def test_a_block_comes_back_as_it_was(path):
    """And its file is for its user alone, with no other one left beside it."""
    assert (read(path) == BLOCK).all()
    assert path.stat().st_mode & 0o777 == 0o600
    assert list(path.parent.iterdir()) == [path]


def test_a_file_is_whole_or_not_there(path, monkeypatch):
    """A write that fails half way leaves the old file, and nothing else."""

    def full(file, buffers):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(block_file.os, "writev", full)
    with pytest.raises(OSError, match="No space left"):
        write_block(path, FINGERPRINT, KEY, BLOCK[::-1].copy())
    assert (read(path) == BLOCK).all()
    assert list(path.parent.iterdir()) == [path]


def test_a_write_in_pieces_is_a_whole_write(path, monkeypatch):
    """The system may take fewer bytes than it was given."""
    monkeypatch.setattr(block_file.os, "writev", lambda file, buffers: os.write(file, b"".join(buffers)[:150]))
    write_block(path, FINGERPRINT, KEY, BLOCK)
    assert (read(path) == BLOCK).all()


@pytest.mark.parametrize("place", [0, 9, 45, 81, 88, HEADER_BYTES, HEADER_BYTES + 199])
def test_one_wrong_byte_is_found_out(path, place):
    """Wherever it is: magic, fingerprint, key, size, checksum, block."""
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"damaged|another block"):
        read(path)


@pytest.mark.parametrize("size", [0, 10, HEADER_BYTES, HEADER_BYTES + 199, HEADER_BYTES + 201])
def test_a_file_of_another_size_is_found_out(path, size):
    """Cut off, empty, or too long."""
    path.write_bytes((path.read_bytes() + b"x")[:size])
    with pytest.raises(ValueError, match=f"has {size} bytes: expected {HEADER_BYTES + 200}"):
        read(path)


def test_the_file_of_something_else_is_found_out(path):
    """Of another model, and of another block."""
    with pytest.raises(ValueError, match="another block, model or version"):
        read(path, fingerprint=bytes([1]) * 32)
    with pytest.raises(ValueError, match="another block, model or version"):
        read(path, key=bytes(40))


def test_a_file_that_is_not_there_is_an_os_error(tmp_path):
    """As with any file."""
    with pytest.raises(FileNotFoundError):
        read(tmp_path / "none.kv")
