"""The dummy's weights are a number: all operations on a model, without torch."""

from __future__ import annotations

import pytest

from aexec.config import CacheConfig, ModelConfig
from aexec.errors import ConfigError, ModelNotReady, ProtocolError, WeightsMismatch
from aexec.messages import SchedulerOutput
from aexec.model.dummy.runner import DummyRunner


@pytest.fixture
def open_dummy():
    def open_it(model: str = "dummy") -> DummyRunner:
        runner = DummyRunner(ModelConfig(model=model), CacheConfig(num_blocks=32, block_size=4))
        runner.initialize_cache(runner.determine_available_memory())
        return runner

    return open_it


def tokens_of(runner, make) -> list[int]:
    scheduler = make(num_blocks=32, block_size=4)
    scheduler.add("r", [72, 105], 12)
    return scheduler.run(runner)["r"]


def test_another_seed_is_the_model_of_that_seed(open_dummy, toy_scheduler) -> None:
    """An update says what a dummy with that seed says from its start (G56)."""
    runner = open_dummy()
    before = tokens_of(runner, toy_scheduler)
    report = runner.operations.update_weights({"seed": 7})
    assert (report.applied, report.version) == (("seed",), 2)
    assert tokens_of(runner, toy_scheduler) == tokens_of(open_dummy("dummy:seed=7"), toy_scheduler) != before
    runner.operations.load_weights()
    assert tokens_of(runner, toy_scheduler) == before


@pytest.mark.parametrize("level", [1, 2])
def test_a_sleeping_dummy_says_nothing(level, open_dummy, toy_scheduler) -> None:
    """Until it is awake, and has its seed again (G55)."""
    runner = open_dummy()
    before = tokens_of(runner, toy_scheduler)
    report = runner.operations.sleep(level)
    assert report.freed_cache_bytes == 32 * 4 * 8
    with pytest.raises(ModelNotReady, match=f"sleep level {level}"):
        tokens_of(runner, toy_scheduler)
    runner.execute_model(SchedulerOutput(finished_request_ids=["r"]))
    woken = runner.operations.wake_up()
    assert woken.is_ready == (level == 1)
    if level == 2:
        with pytest.raises(ModelNotReady, match="missing since sleep level 2"):
            tokens_of(runner, toy_scheduler)
        runner.operations.load_weights()
    assert tokens_of(runner, toy_scheduler) == before


def test_the_ledger_finds_who_relies_on_old_kv(open_dummy, toy_scheduler) -> None:
    """A request that goes on over an update as if nothing had happened is refused."""
    runner = open_dummy()
    scheduler = toy_scheduler(num_blocks=32, block_size=4)
    scheduler.add("r", [72, 105], 12)
    runner.execute_model(scheduler.schedule())
    scheduler.commit(runner.sample_tokens(None))
    runner.operations.update_weights({"seed": 7})
    with pytest.raises(ProtocolError, match="is sent as cached and is not live"):
        runner.execute_model(scheduler.schedule())


def test_it_has_one_weight(open_dummy) -> None:
    """Other names and shapes are refused as with any model."""
    with pytest.raises(WeightsMismatch, match=r"no weight named bias; wrong shapes: seed is \[2\], expected \[\]"):
        open_dummy().operations.update_weights({"bias": 1, "seed": [1, 2]})


def test_only_its_seed_may_differ(open_dummy) -> None:
    """Another vocabulary would be another model."""
    with pytest.raises(ConfigError, match="expected one that differs in its seed"):
        open_dummy().operations.load_weights("dummy:vocab_size=64")


def test_its_state_can_be_saved(open_dummy, toy_scheduler, tmp_path) -> None:
    """And loaded by another one."""
    runner, other = open_dummy(), open_dummy()
    runner.operations.update_weights({"seed": 7})
    runner.operations.save_sharded_state(str(tmp_path / "state"))
    other.operations.load_weights(str(tmp_path / "state"))
    assert tokens_of(other, toy_scheduler) == tokens_of(runner, toy_scheduler)
