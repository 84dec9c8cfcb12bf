"""The index of what is kept, without ranks."""

from __future__ import annotations

import pytest

from aexec.config import CacheConfig, Offload
from aexec.engine.connector.attach import make_connector
from aexec.engine.connector.offload import OffloadConnector
from aexec.errors import ConfigError
from aexec.messages.batch import KVConnectorOutput
from aexec.messages.kv import KVHoldings

NOTHING = KVHoldings(keys=[], capacity=4)


def name(letter: str) -> bytes:
    return letter.encode() * 32


def names(letters: str) -> list[bytes]:
    return [name(letter) for letter in letters]


def blocks(letters: str, first: int = 1) -> list[tuple[int, bytes]]:
    return list(enumerate(names(letters), first))


@pytest.fixture
def connector() -> OffloadConnector:
    made = OffloadConnector(Offload(), b"sess")
    made.attached(0, [NOTHING])
    return made


def test_what_is_given_away_is_found_from_then_on(connector):
    """Up to the first block that is not kept."""
    transfer = connector.plan(blocks("abe"), [])
    assert transfer.store_block_ids == [1, 2, 3]
    assert [key[:32] for key in transfer.store_keys] == names("abe")
    assert [connector.match(names(text)) for text in ("abcd", "b", "c", "")] == [2, 1, 0, 0]


def test_what_is_kept_is_not_stored_again(connector):
    """Nothing to move is no message at all."""
    connector.plan(blocks("ab"), [])
    assert connector.plan(blocks("ab"), []) is None
    assert connector.plan([], []) is None
    assert connector.plan(blocks("bc"), []).store_block_ids == [2]


def test_a_load_names_what_was_stored(connector):
    """The very key, stamp and all."""
    stored = connector.plan(blocks("ab"), [])
    loaded = connector.plan([], [(9, name("b"))])
    assert (loaded.load_block_ids, loaded.load_keys) == ([9], [stored.store_keys[1]])


def test_each_plan_has_a_stamp_of_its_own(connector):
    """So that the parts of a block are of one forward pass on all ranks."""
    first = connector.plan(blocks("ab"), [])
    second = connector.plan(blocks("c"), [])
    assert len({key[32:] for key in (*first.store_keys, *second.store_keys)}) == 2
    assert {key[32:36] for key in first.store_keys} == {b"sess"}


def test_the_least_recently_used_are_the_first_to_be_forgotten(connector):
    """By the capacity of the ranks, and in their order: a load is a use."""
    connector.plan(blocks("abcd"), [])
    connector.plan([], [(9, name("a"))])
    connector.plan(blocks("e"), [])
    assert [connector.match([each]) for each in names("abcde")] == [1, 0, 1, 1, 1]


def test_a_step_stores_no_more_than_leaves_room_for_what_it_loads(connector):
    """The last ones are taken: what was given away first was used least recently."""
    connector.plan(blocks("ab"), [])
    transfer = connector.plan(blocks("cdef"), [(9, name("a")), (10, name("b"))])
    assert transfer.store_block_ids == [3, 4]
    assert connector.match(names("abef")) == 4
    assert connector.plan([], []) is None


def test_a_key_that_a_rank_has_dropped_is_not_found(connector):
    """But one that was stored anew since then is."""
    stored = connector.plan(blocks("ab"), [])
    assert connector.take_report(KVConnectorOutput(dropped=frozenset(stored.store_keys[:1])))
    assert [connector.match([each]) for each in names("ab")] == [0, 1]
    connector.plan(blocks("a"), [])
    assert connector.take_report(KVConnectorOutput(dropped=frozenset(stored.store_keys[:1])))
    assert connector.match(names("ab")) == 2


def test_only_what_all_ranks_hold_is_found():
    """With the same stamp: a part of another forward pass is no part of the block."""
    connector = OffloadConnector(Offload(), b"sess")
    one, two = b"12345678", b"87654321"
    first = KVHoldings(keys=[name("a") + one, name("b") + one, name("c") + one], capacity=9)
    second = KVHoldings(keys=[name("c") + one, name("a") + two, name("b") + one], capacity=9)
    connector.attached(0, [first, second])
    assert [connector.match([each]) for each in names("abc")] == [0, 1, 1]
    assert connector.statistics().capacity == 9


def test_nothing_is_found_or_stored_while_it_is_detached(connector):
    """And whoever attaches the ranks is told; what was under way is of an older epoch by then."""
    told = []
    connector.on_detached = lambda: told.append(connector.epoch)
    connector.plan(blocks("ab"), [])
    connector.detach(afresh=True)
    assert (told, connector.afresh) == ([1], True)
    assert connector.match(names("ab")) == 0
    assert connector.plan(blocks("ab"), []) is None
    connector.attached(0, [NOTHING])
    assert connector.plan(blocks("ab"), []) is None
    connector.attached(1, [NOTHING])
    assert connector.afresh is False
    assert connector.plan(blocks("ab"), []).epoch == 1


def test_a_load_that_was_overtaken_fails_on_the_ranks(connector):
    """It has a key that nobody holds, and is computed then."""
    assert connector.plan([], [(9, name("z"))]).load_keys == [b""]


def test_ranks_that_refuse_are_not_what_they_were(connector):
    """While it is attached: a refusal that comes later is an old one."""
    refusal = KVConnectorOutput(stats={"refusals": 1.0})
    assert not connector.take_report(refusal)
    connector.detach()
    assert connector.take_report(refusal)


def test_a_flush_keeps_what_is_not_kept_in_steps(connector):
    """At most what fits, the last used of it."""
    connector.attached(0, [KVHoldings(keys=[], capacity=100)])
    connector.plan([(1, bytes([1]) * 32)], [])
    transfers = connector.flush([(block, bytes([block]) * 32) for block in range(1, 151)])
    assert [len(transfer.store_keys) for transfer in transfers] == [64, 36]
    assert transfers[-1].store_block_ids[-1] == 150
    assert transfers[0].store_block_ids[0] == 51
    connector.detach()
    assert connector.flush(blocks("a")) == []


def test_only_a_directory_is_worth_a_flush(tmp_path):
    """Memory goes with its workers."""
    assert OffloadConnector(Offload(), b"sess").flush_timeout == 0
    assert OffloadConnector(Offload(directory=tmp_path), b"sess").flush_timeout == 30


def test_figures_add_up(connector):
    """Of all reports; and it prints its state."""
    stored = connector.plan(blocks("ab"), [])
    connector.take_report(KVConnectorOutput(stats={"stored_blocks": 2.0, "store_seconds": 0.5}))
    connector.take_report(KVConnectorOutput(stats={"stored_blocks": 1.0, "failed_loads": 1.0}))
    connector.match(names("ab"))
    found = connector.statistics()
    assert (found.is_attached, found.num_blocks, found.num_matched_blocks) == (True, len(stored.store_keys), 2)
    assert (found.stored_blocks, found.failed_loads, found.store_seconds) == (3, 1, 0.5)
    assert repr(connector) == "<OffloadConnector: 2/4 blocks, epoch 0>"
    connector.detach()
    assert repr(connector) == "<OffloadConnector: detached, epoch 1>"


def test_settings_name_the_connector():
    """None makes none, a name that leads nowhere is refused, and so is a connector without prefix caching."""

    class Nowhere:
        scheduler_side, worker_side = "aexec.nowhere:Nothing", "aexec.nowhere:Nothing"

    assert make_connector(CacheConfig()) is None
    assert isinstance(make_connector(CacheConfig(connector=Offload())), OffloadConnector)
    with pytest.raises(ConfigError, match=r"scheduler_side is 'aexec.nowhere:Nothing'"):
        make_connector(CacheConfig(connector=Nowhere()))
    with pytest.raises(ConfigError, match=r"connector \(kv_connector= of an engine\) is .*prefix_caching is off"):
        CacheConfig(connector=Offload(), prefix_caching=False)
    with pytest.raises(ConfigError, match=r"Offload.bytes is 0: expected at least 1"):
        Offload(bytes=0)
