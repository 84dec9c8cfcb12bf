"""One rank's connector over a dummy cache, whose ledger knows what each block should hold."""

from __future__ import annotations

import numpy as np
import pytest

from aexec.config import CacheConfig, ModelConfig, Offload
from aexec.errors import ModelNotReady
from aexec.messages.batch import KVTransfer
from aexec.model.dummy.runner import DummyRunner
from aexec.worker.kv.offload import RankOffload

BLOCK_BYTES = 4 * 8
A, B, C = (bytes([letter]) * 40 for letter in b"abc")


def dummy(model="dummy", num_blocks=8):
    runner = DummyRunner(ModelConfig(model=model), CacheConfig(num_blocks=num_blocks, block_size=4))
    runner.load_model()
    runner.initialize_cache(runner.determine_available_memory())
    return runner


class Rank:
    """A connector, its runner, and shorthand."""

    def __init__(self, config=None, runner=None):
        self.runner = runner or dummy()
        self.connector = RankOffload(config or Offload(bytes=100 * BLOCK_BYTES), 0, 1, self.runner.kv_access)
        self.step = 0

    def attach(self, epoch=0):
        return self.connector.attach(epoch, [self.connector.identity()])

    def fill(self, block, value):
        self.runner.kv_access.write([block], [np.full(BLOCK_BYTES, value, dtype=np.uint8)])

    def holds(self, block):
        row = np.empty(BLOCK_BYTES, dtype=np.uint8)
        self.runner.kv_access.read([block], [row])
        return set(row.tolist())

    def move(self, stores=(), loads=(), epoch=0):
        self.step += 1
        transfer = KVTransfer(
            epoch=epoch,
            store_block_ids=[block for block, _ in stores],
            store_keys=[key for _, key in stores],
            load_block_ids=[block for block, _ in loads],
            load_keys=[key for _, key in loads],
        )
        self.connector.move(self.step, transfer)
        return self.connector.take_report(self.step)


@pytest.fixture(params=["memory", "directory"])
def config(request, tmp_path):
    return Offload(bytes=100 * 200, directory=tmp_path if request.param == "directory" else None)


def test_a_block_comes_back_into_any_other(config):
    """Stores come before loads, so that both may be of one step; figures say so."""
    rank = Rank(config)
    rank.attach()
    rank.fill(1, 11)
    report = rank.move(stores=[(1, A)], loads=[(5, A)])
    assert rank.holds(5) == {11}
    assert not report.invalid_block_ids
    assert not report.dropped
    assert (report.stats["stored_blocks"], report.stats["loaded_blocks"]) == (1, 1)
    assert report.stats["store_seconds"] > 0


def test_a_block_that_is_not_held_is_invalid(config):
    """The others are loaded, and from then on nothing is stored until the rank is attached anew."""
    rank = Rank(config)
    rank.attach()
    rank.fill(1, 11)
    report = rank.move(stores=[(1, A)], loads=[(5, B), (6, A)])
    assert (report.invalid_block_ids, report.dropped) == ({5}, {B})
    assert rank.holds(6) == {11}
    assert rank.move(stores=[(1, C)]).dropped == {C}
    assert A in rank.attach(1).keys
    assert not rank.move(stores=[(1, C)], epoch=1).dropped


def test_nothing_is_moved_before_it_is_attached(config):
    """Loads are invalid, stores are dropped."""
    report = Rank(config).move(stores=[(1, A)], loads=[(2, B)])
    assert (report.invalid_block_ids, report.dropped, report.stats["refusals"]) == ({2}, {A}, 1)


def test_another_epoch_is_refused(config):
    """What was planned before the rank was attached anew may rely on what is void."""
    rank = Rank(config)
    rank.attach(3)
    assert rank.move(stores=[(1, A)], epoch=2).dropped == {A}
    assert rank.move(stores=[(1, A)], epoch=4).dropped == {A}
    assert not rank.move(stores=[(1, A)], epoch=3).dropped


def test_a_forward_pass_that_failed_leaves_doubt(config):
    """Blocks may hold anything: none is stored until the next attachment."""
    rank = Rank(config)
    rank.attach()
    rank.connector.doubt()
    assert rank.move(stores=[(1, A)]).dropped == {A}


def test_new_weights_detach_the_rank(config):
    """Whoever put them in: the same transfer is refused, and after an attachment nothing of the old is found."""
    rank = Rank(config)
    rank.attach()
    rank.move(stores=[(1, A)])
    rank.runner.operations.update_weights({"seed": 5})
    report = rank.move(stores=[(2, B)], loads=[(3, A)])
    assert (report.invalid_block_ids, report.dropped) == ({3}, {B})
    assert rank.attach(1).keys == []


def test_the_old_weights_find_their_blocks_again_in_a_directory(tmp_path):
    """It is what computed them that counts, not when."""
    rank = Rank(Offload(bytes=10**6, directory=tmp_path))
    rank.attach()
    rank.fill(1, 11)
    rank.move(stores=[(1, A)])
    rank.runner.operations.update_weights({"seed": 5})
    rank.attach(1)
    rank.runner.operations.update_weights({"seed": 0})
    assert rank.attach(2).keys == [A]
    assert not rank.move(loads=[(2, A)], epoch=2).invalid_block_ids
    assert rank.holds(2) == {11}


def test_sleep_detaches_the_rank(config):
    """There is no cache to move blocks of; what is kept is there when it wakes."""
    rank = Rank(config)
    rank.attach()
    rank.fill(1, 11)
    rank.move(stores=[(1, A)])
    rank.runner.operations.sleep(1)
    assert rank.move(loads=[(2, A)]).invalid_block_ids == {2}
    with pytest.raises(ModelNotReady, match="wake it up"):
        rank.connector.identity()
    rank.runner.operations.wake_up()
    assert rank.attach(1).keys == [A]
    assert not rank.move(loads=[(2, A)], epoch=1).invalid_block_ids


def test_a_rank_is_attached_as_what_it_is():
    """Weights that came between the question and the attachment make it fail."""
    rank = Rank()
    said = rank.connector.identity()
    rank.runner.operations.update_weights({"seed": 5})
    with pytest.raises(ModelNotReady, match="the weights have changed meanwhile"):
        rank.connector.attach(0, [said])


def test_identities_tell_apart_what_computes_other_kv():
    """Rank, number of ranks, block size and weights."""
    access = dummy().kv_access
    config = Offload()
    identities = {
        RankOffload(config, 0, 1, access).identity(),
        RankOffload(config, 0, 2, access).identity(),
        RankOffload(config, 1, 2, access).identity(),
        RankOffload(config, 0, 1, dummy("dummy:seed=1").kv_access).identity(),
    }
    assert len(identities) == 4
    assert RankOffload(config, 0, 1, dummy().kv_access).identity() in identities


def test_weights_are_read_once_unless_somebody_asks(monkeypatch):
    """An attachment after a failure costs no look at all weights."""
    rank = Rank()
    looks = []
    access = rank.runner.kv_access
    monkeypatch.setattr(access, "weights_digest", lambda: bytes(looks.append(1) or 32))
    for afresh in (False, False, True):
        rank.connector.identity(afresh=afresh)
    assert len(looks) == 2


def test_weights_are_not_read_on_the_thread_of_the_steps(monkeypatch):
    """To attach a rank that has changed since it said who it is fails at once; it is asked again."""
    rank, looks = Rank(), []
    said = rank.connector.identity()
    rank.runner.operations.update_weights({"seed": 9})
    monkeypatch.setattr(rank.runner.kv_access, "weights_digest", lambda: bytes(looks.append(1) or 32))
    with pytest.raises(ModelNotReady, match="changed meanwhile"):
        rank.connector.attach(1, [said])
    assert not looks


def test_a_full_disk_is_said_and_harms_nobody(tmp_path, monkeypatch):
    """The key is dropped, the step goes on."""
    rank = Rank(Offload(bytes=10**6, directory=tmp_path))
    rank.attach()

    def full(key):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(rank.connector._store, "commit", full)
    for _ in range(2):
        report = rank.move(stores=[(1, A)])
        assert (report.dropped, report.stats["failed_stores"]) == ({A}, 1)


def test_what_makes_room_is_told():
    """And what is to be loaded in a step does not make room for what is stored in it."""
    rank = Rank(Offload(bytes=2 * BLOCK_BYTES))
    assert rank.attach().capacity == 2
    rank.move(stores=[(1, A), (2, B)])
    report = rank.move(stores=[(3, C)], loads=[(4, A)])
    assert (report.dropped, report.invalid_block_ids) == ({B}, frozenset())


def test_reports_wait_for_the_sampling_of_their_step():
    """Forward passes run ahead of samplings; each report goes with its own."""
    rank = Rank()
    rank.attach()
    for step, key in ((1, A), (2, B)):
        rank.connector.move(step, KVTransfer(epoch=0, load_block_ids=[step], load_keys=[key]))
    assert rank.connector.take_report(1).invalid_block_ids == {1}
    assert rank.connector.take_report(2).invalid_block_ids == {2}
    assert rank.connector.take_report(3) is None


def test_it_prints_its_state(config):
    """For people."""
    rank = Rank(config)
    assert "rank 0: detached" in repr(rank.connector)
    rank.attach(4)
    assert "attached in epoch 4" in repr(rank.connector)
    rank.connector.close()
    assert "detached, None" in repr(rank.connector)
