from __future__ import annotations

import numpy as np
import pytest

from aexec.errors import ConfigError, OutOfMemory
from aexec.worker.kv.store import MemoryStore


def put(store: MemoryStore, key: bytes, value: int) -> None:
    store.reserve(key)[:] = value
    store.commit(key)


def test_a_block_comes_back_as_it_was():
    """Bytes in, the same bytes out; another key has others."""
    store = MemoryStore(32, 8)
    put(store, b"a", 1)
    put(store, b"b", 2)
    assert store.fetch(b"a").tolist() == [1] * 8
    assert store.fetch(b"b").tolist() == [2] * 8


def test_what_was_used_least_recently_makes_room():
    """A touch is a use, a fetch alone is none, and what goes is told once."""
    store = MemoryStore(24, 8)
    for value, key in enumerate((b"a", b"b", b"c")):
        put(store, key, value)
    store.touch([b"a", b"unknown"])
    store.fetch(b"b")
    put(store, b"d", 3)
    assert list(store.keys()) == [b"c", b"a", b"d"]
    assert (store.take_dropped(), store.take_dropped()) == ({b"b"}, set())
    with pytest.raises(KeyError):
        store.fetch(b"b")


def test_it_takes_no_more_bytes_than_it_may():
    """The limit is in bytes, and rounds down to blocks."""
    store = MemoryStore(31, 8)
    for value in range(10):
        put(store, bytes([value]), value)
    assert store.capacity == 3
    assert store.statistics() == (3, 24, 31)
    assert repr(store) == "<MemoryStore: 3/3 blocks of 8 bytes>"


def test_room_that_was_never_filled_is_no_block():
    """Whoever reserves and fails to fill has stored nothing, and lost no room."""
    store = MemoryStore(16, 8)
    put(store, b"a", 1)
    store.reserve(b"b")
    put(store, b"c", 3)
    put(store, b"d", 4)
    assert set(store.keys()) == {b"c", b"d"}
    assert store.take_dropped() == {b"a"}


def test_a_key_that_is_stored_again_keeps_its_one_place():
    """The new bytes are the block."""
    store = MemoryStore(16, 8)
    put(store, b"a", 1)
    put(store, b"b", 2)
    put(store, b"a", 3)
    assert np.unique(store.fetch(b"a")).tolist() == [3]
    assert list(store.keys()) == [b"b", b"a"]
    assert store.take_dropped() == set()


def test_a_closed_store_holds_nothing():
    """Its memory is given back."""
    store = MemoryStore(16, 8)
    put(store, b"a", 1)
    store.close()
    assert not store.keys()


def test_memory_that_the_system_does_not_give_is_refused():
    """The error names the setting."""
    with pytest.raises(OutOfMemory, match=r"the host memory of Offload.bytes"):
        MemoryStore(2**60, 2**30)


def test_a_limit_below_one_block_is_refused():
    """The error names what is left to the rank and what a block takes."""
    with pytest.raises(ConfigError, match=r"leaves 7 bytes to this rank: expected at least 8"):
        MemoryStore(7, 8)
