from __future__ import annotations

import os
import time

import pytest

from aexec.errors import ConfigError
from aexec.worker.kv import directory as module
from aexec.worker.kv.block_file import HEADER_BYTES
from aexec.worker.kv.directory import DirectoryStore, open_directory, sweep

BLOCK = 100
FILE = HEADER_BYTES + BLOCK
ONE, OTHER = bytes([1]) * 32, bytes([2]) * 32


def key(number: int) -> bytes:
    return bytes([number]) * 40


@pytest.fixture
def open_store(tmp_path):
    def make(fingerprint: bytes = ONE, *, rank: int = 0, world_size: int = 1, limit: int = 100 * FILE):
        return DirectoryStore(
            tmp_path, fingerprint, rank=rank, world_size=world_size, limit_bytes=limit, block_bytes=BLOCK
        )

    return make


def put(store, number, *, age=0.0):
    store.reserve(key(number))[:] = number
    store.commit(key(number))
    if age:
        os.utime(store._path(key(number)), (time.time() - age,) * 2)


def files(tmp_path):
    return sorted(path.name[:2] for path in tmp_path.rglob("*.kv"))


def test_blocks_outlive_their_store(open_store):
    """Another store of the same rank and model finds them, in order of their use."""
    first = open_store()
    for number in (1, 2, 3):
        put(first, number, age=10.0 - number)
    first.touch([key(1), key(9)])
    first.close()
    second = open_store()
    assert list(second.keys()) == [key(2), key(3), key(1)]
    assert set(second.fetch(key(2)).tolist()) == {2}
    assert "3 blocks of 100 bytes" in repr(second)


def test_other_weights_other_ranks_and_other_layouts_find_nothing(open_store):
    """Each has a folder of its own."""
    put(open_store(world_size=2), 1)
    assert not open_store(OTHER, world_size=2).keys()
    assert not open_store(rank=1, world_size=2).keys()
    assert not open_store().keys()
    assert list(open_store(world_size=2).keys()) == [key(1)]


def test_all_that_lies_in_the_directory_counts(open_store, tmp_path):
    """Whoever reaches the limit deletes what was used least recently, of other models too, down to nine tenths."""
    old, new = open_store(OTHER, limit=10 * FILE), open_store(limit=10 * FILE)
    for number in range(5):
        put(old, number, age=100.0 - number)
    for number in range(10, 16):
        put(new, number, age=50.0 - number)
    assert files(tmp_path) == ["01", "02", "03", "04", "0a", "0b", "0c", "0d", "0e", "0f"]
    assert new.take_dropped() == set()
    for number in range(16, 22):
        put(new, number)
    assert len(files(tmp_path)) == 10
    assert new.take_dropped() == {key(10), key(11)}
    assert key(10) not in new.keys()  # noqa: SIM118 - it is no dict
    assert [path.name for path in tmp_path.iterdir()] == [ONE.hex()]  # an empty folder goes too


def test_a_block_without_all_of_its_parts_is_dropped(open_store):
    """What a sweep deletes of another rank of the same model is told as well."""
    first, second = open_store(world_size=2, limit=4 * FILE), open_store(rank=1, world_size=2, limit=4 * FILE)
    put(first, 1, age=50.0)
    put(second, 1, age=40.0)
    put(first, 2, age=30.0)
    put(second, 2)
    put(second, 3)
    assert key(1) in second.take_dropped()


def test_a_file_that_went_or_is_damaged_is_not_held(open_store):
    """The damaged one is deleted, and both can be stored again."""
    store = open_store()
    put(store, 1)
    put(store, 2)
    store._path(key(1)).unlink()
    store._path(key(2)).write_bytes(b"damaged")
    for number in (1, 2):
        with pytest.raises(KeyError):
            store.fetch(key(number))
    assert not store.keys()
    assert not store._path(key(2)).exists()
    put(store, 1)
    assert set(store.fetch(key(1)).tolist()) == {1}


def test_a_folder_that_another_process_deleted_is_made_again(open_store):
    """It was empty when that looked."""
    store = open_store()
    store._home.rmdir()
    put(store, 1)
    assert set(store.fetch(key(1)).tolist()) == {1}


def test_what_a_writer_left_behind_is_deleted_after_a_while(open_store):
    """A fresh temporary file may have a writer, an old one has none; foreign files are let be."""
    home = open_store()._home
    for name, age in (("a.1.tmp", 0.0), ("b.1.tmp", 2 * module._ABANDONED_SECONDS), ("notes.txt", 10**6)):
        (home / name).touch()
        os.utime(home / name, (time.time() - age,) * 2)
    store = open_store()
    assert sorted(path.name for path in home.iterdir()) == ["a.1.tmp", "notes.txt"]
    assert not store.keys()


def test_what_is_being_written_counts_too(open_store):
    """Writers that were killed, one after the other, do not fill the disk unnoticed."""
    home = open_store()._home
    for number in range(20):
        (home / f"{key(number).hex()}.kv.{number}.tmp").write_bytes(bytes(FILE))
    store = open_store(limit=10 * FILE)
    assert len(list(home.iterdir())) == 9
    put(store, 1)
    assert list(store.keys()) == [key(1)]


def test_a_sweep_passes_over_what_is_not_ours(tmp_path):
    """Only files of blocks count, and only in folders that are named as ours are."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "weights.kv").write_bytes(bytes(1000))
    assert sweep(tmp_path, 10) == (0, [])
    assert sweep(tmp_path / "none", 10) == (0, [])


def test_a_disk_that_is_full_says_so(open_store, monkeypatch):
    """The block is not held then."""
    store = open_store()

    def full(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module, "write_block", full)
    with pytest.raises(OSError, match="No space left"):
        put(store, 1)
    assert not store.keys()


def test_the_directory_is_made_for_its_user_alone(tmp_path):
    """With its parents."""
    made = open_directory(str(tmp_path / "a" / "b"), 10**6, BLOCK)
    assert made.stat().st_mode & 0o777 == 0o700


def test_a_directory_that_others_can_look_into_is_refused(tmp_path):
    """The error says what to do."""
    (tmp_path / "open").mkdir(mode=0o755)
    with pytest.raises(ConfigError, match=r"open to others \(mode 755, .*chmod 700"):
        open_directory(str(tmp_path / "open"), 10**6, BLOCK)


def test_a_directory_that_cannot_be_made_is_refused(tmp_path):
    """As where a file is in the way."""
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot be made"):
        open_directory(str(tmp_path / "file" / "kv"), 10**6, BLOCK)


def test_a_limit_below_one_block_is_refused(tmp_path):
    """The error names what a file takes."""
    with pytest.raises(ConfigError, match=f"Offload.bytes is 100: expected at least {FILE}"):
        open_directory(str(tmp_path), 100, BLOCK)
