"""Weights saved by rank and loaded by rank; the layouts of tensor parallelism are in tests of several processes."""

from __future__ import annotations

import json
import shutil

import pytest
import torch

from aexec.errors import ConfigError, ModelLoadError, ModelNotReady
from aexec.model.sources.sharded import INDEX, RankPlace, read_index
from aexec.testing.tiny_models import TINY_ARCHITECTURES

PROMPT = [11, 12, 13, 200, 7]


def tokens_of(runner, make) -> list[int]:
    scheduler = make(block_size=8)
    scheduler.add("r", PROMPT, 12)
    return scheduler.run(runner)["r"]


@pytest.fixture(scope="module")
def llama_state(tiny_model, ready_runner, tmp_path_factory):
    """The saved state of one rank, not to be changed."""
    directory = tmp_path_factory.mktemp("state") / "llama"
    ready_runner(tiny_model("llama_gqa"), block_size=8).operations.save_sharded_state(str(directory))
    return directory


@pytest.mark.parametrize("name", sorted({*TINY_ARCHITECTURES} - {"llama", "qwen2", "phi", "gemma2"}))
def test_a_saved_state_says_what_its_model_said(name, tiny_model, ready_runner, toy_scheduler, tmp_path) -> None:
    """The directory is a model by itself: no other file is needed."""
    runner = ready_runner(tiny_model(name), block_size=8)
    runner.operations.save_sharded_state(str(tmp_path))
    again = ready_runner(tmp_path, block_size=8)
    assert tokens_of(again, toy_scheduler) == tokens_of(runner, toy_scheduler)


def test_two_stages_save_and_load_their_own(tiny_model, ready_runner, tmp_path) -> None:
    """Each reads its own file, and holds what it held."""
    stages = [ready_runner(tiny_model("gemma"), block_size=8, pp_rank=rank, pp_size=2) for rank in range(2)]
    files = [stage.operations.save_sharded_state(str(tmp_path)) for stage in stages]
    assert files == [str(tmp_path / f"rank-0000{rank}-of-00002.safetensors") for rank in range(2)]
    for rank, stage in enumerate(stages):
        again = ready_runner(tmp_path, block_size=8, pp_rank=rank, pp_size=2)
        expected = dict(stage._store.weights.tensors())
        found = dict(again._store.weights.tensors())
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_another_layout_is_refused(llama_state, ready_runner) -> None:
    """With both layouts, and what to do."""
    with pytest.raises(ConfigError, match=r"tensor_parallel_size 1 and pipeline_parallel_size 1, .* has 1 and 2: open"):
        ready_runner(llama_state, pp_rank=0, pp_size=2)


def test_another_partition_is_refused(tiny_model, ready_runner, tmp_path) -> None:
    """Two stages again, with other layers: one that is out of place is named."""
    for rank in range(2):
        stage = ready_runner(tiny_model("llama_gqa"), pp_rank=rank, pp_size=2, partition=(1, 3))
        stage.operations.save_sharded_state(str(tmp_path))
    with pytest.raises(
        ConfigError, match=r"a rank with other layers \(model.layers.1.* for one\): .*pipeline_partition"
    ):
        ready_runner(tmp_path, pp_rank=0, pp_size=2, partition=(2, 2))


def test_updated_weights_are_saved(tiny_model, ready_runner, toy_scheduler, tmp_path) -> None:
    """A state is of the weights that run, not of the files that were loaded."""
    runner = ready_runner(tiny_model("llama_gqa"), block_size=8)
    runner.operations.load_weights(str(tiny_model("llama_gqa", seed=1)))
    runner.operations.save_sharded_state(str(tmp_path))
    runner.operations.load_weights()
    before = tokens_of(runner, toy_scheduler)
    runner.operations.load_weights(str(tmp_path))
    fresh = ready_runner(tiny_model("llama_gqa", seed=1), block_size=8)
    assert tokens_of(runner, toy_scheduler) == tokens_of(fresh, toy_scheduler) != before


def test_half_a_model_is_not_saved(tiny_model, ready_runner, tmp_path) -> None:
    """Sleeping weights are refused, and nothing is written."""
    runner = ready_runner(tiny_model("llama_gqa"), block_size=8)
    runner.operations.sleep(2)
    with pytest.raises(ModelNotReady, match="save_sharded_state was refused: the weights are discarded"):
        runner.operations.save_sharded_state(str(tmp_path / "state"))
    assert not (tmp_path / "state").exists()


def test_the_models_own_directory_is_not_written_to(tiny_model, ready_runner) -> None:
    """It would be two kinds of model at once."""
    runner = ready_runner(tiny_model("llama_gqa"), block_size=8)
    with pytest.raises(ConfigError, match="holds the model itself; choose another directory"):
        runner.operations.save_sharded_state(str(tiny_model("llama_gqa")))


def test_a_place_that_cannot_be_written_is_named(tiny_model, ready_runner, tmp_path) -> None:
    """A file where the directory should be."""
    (tmp_path / "file").touch()
    runner = ready_runner(tiny_model("llama_gqa"), block_size=8)
    with pytest.raises(ConfigError, match=r"save_sharded_state: .*file cannot be written \(File exists"):
        runner.operations.save_sharded_state(str(tmp_path / "file"))


def test_a_state_that_is_not_whole_is_refused(llama_state, ready_runner, tmp_path) -> None:
    """A rank's file that is missing or cut, and an index that is damaged or of another time."""
    for number, (damage, says) in enumerate(
        [
            (
                lambda path: (path / RankPlace().file).rename(path / "rank-00001-of-00002.safetensors"),
                "it has no rank-",
            ),
            (lambda path: (path / INDEX).write_text("{"), "is damaged"),
            (lambda path: (path / INDEX).write_text(json.dumps({"version": 0})), "another version of aexec"),
            (lambda path: (path / RankPlace().file).write_bytes(b"x" * 100), "is no safetensors file|is damaged"),
        ]
    ):
        path = shutil.copytree(llama_state, tmp_path / str(number))
        damage(path)
        with pytest.raises(ModelLoadError, match=says):
            ready_runner(path)


def test_a_directory_of_another_kind_has_no_index(tiny_model) -> None:
    """It is loaded as ever."""
    assert read_index(tiny_model("llama_gqa")) is None
