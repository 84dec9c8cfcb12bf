"""Sleep, wake-up and new weights of the torch runner, by the tokens that come after."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from aexec.errors import ConfigError, ModelLoadError, ModelNotReady, ProtocolError, WeightsMismatch
from aexec.messages import SchedulerOutput
from aexec.model.memory import resident_host_bytes
from aexec.testing.tiny_models import TINY_ARCHITECTURES

PROMPT = [11, 12, 13, 200, 7]


def tokens_of(runner, make, name: str = "r") -> list[int]:
    scheduler = make(block_size=8)
    scheduler.add(name, PROMPT, 12)
    return scheduler.run(runner)[name]


def state_of(directory: Path) -> dict[str, torch.Tensor]:
    """What a trainer holds that was started from the same files."""
    model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


@pytest.fixture
def other(tiny_model) -> Path:
    """The same architecture with other random weights."""
    return tiny_model("llama_gqa", seed=1)


@pytest.fixture
def runner(tiny_model, ready_runner):
    """A runner of its own, as these tests change it."""
    return ready_runner(tiny_model("llama_gqa"), block_size=8)


@pytest.mark.parametrize("level", [1, 2])
def test_tokens_after_a_sleep_are_those_before(level, runner, toy_scheduler) -> None:
    """From level 1 by waking alone, from level 2 with the weights loaded again (G55)."""
    before = tokens_of(runner, toy_scheduler)
    runner.operations.sleep(level)
    report = runner.operations.wake_up()
    assert report.weights == ("ready" if level == 1 else "missing")
    if level == 2:
        runner.operations.load_weights()
    assert tokens_of(runner, toy_scheduler) == before


@pytest.mark.parametrize(
    ("level", "tags", "says"),
    [
        (1, None, r"asleep \(sleep level 1\); call wake_up\(\['weights'\]\)"),
        (1, ["kv_cache"], r"asleep \(sleep level 1\)"),
        (1, ["weights"], r"the KV cache is asleep; call wake_up\(\['kv_cache'\]\)"),
        (2, None, r"discarded \(sleep level 2\)"),
        (2, ["weights", "kv_cache"], r"missing since sleep level 2; call load_weights\(\) or update_weights\(\)"),
    ],
)
def test_a_forward_pass_in_the_wrong_state_is_refused(level, tags, says, runner, toy_scheduler) -> None:
    """It raises and says what to do; nothing is ever computed on weights or a cache that are not there (G55)."""
    runner.operations.sleep(level)
    if tags:
        runner.operations.wake_up(tags)
    with pytest.raises(ModelNotReady, match=says):
        tokens_of(runner, toy_scheduler)
    runner.execute_model(SchedulerOutput(finished_request_ids=["r"]))


def test_sleep_says_what_it_frees(runner) -> None:
    """On a CPU level 1 keeps the weights where they are, and says so; level 2 discards them."""
    cache = runner._store.cache.num_bytes
    first = runner.operations.sleep(1)
    assert (first.weights, first.freed_weights_bytes) == ("kept", 0)
    assert first.freed_cache_bytes >= cache
    assert first.held_bytes == runner.info().num_parameters * 4
    second = runner.operations.sleep(2)
    assert (second.weights, second.freed_cache_bytes, second.held_bytes) == ("discarded", 0, 0)
    assert second.freed_weights_bytes == first.held_bytes


def test_nothing_holds_the_cache_of_a_sleeping_model(runner, toy_scheduler) -> None:
    """Neither the runner nor any layer of the model."""
    tokens_of(runner, toy_scheduler)
    keys = weakref.ref(runner._store.cache.keys[0])
    runner.operations.sleep(1)
    gc.collect()
    assert keys() is None


def test_memory_is_really_given_back(tiny_model, ready_runner) -> None:
    """Resident memory falls by the cache that was written to, and at level 2 by the weights too."""
    runner = ready_runner(tiny_model("llama", vocab_size=100_000, hidden_size=128), num_blocks=6000)
    runner._store.cache.zero(torch.arange(6000))
    cache, weights = runner._store.cache.num_bytes, runner._store.weights.nbytes
    assert min(cache, weights) > 90 * 2**20
    before = resident_host_bytes()
    first = runner.operations.sleep(1)
    assert before - first.memory_after > 0.9 * cache
    second = runner.operations.sleep(2)
    assert second.memory_before - second.memory_after > 0.9 * weights


def test_a_request_does_not_outlive_its_kv(runner, toy_scheduler) -> None:
    """After a sleep in its middle the runner does not know it any longer, nor blocks that hold nothing."""
    scheduler = toy_scheduler(block_size=8)
    scheduler.add("r", list(range(20)), 12)
    runner.execute_model(scheduler.schedule())
    scheduler.commit(runner.sample_tokens(None))
    runner.operations.sleep(1)
    runner.operations.wake_up()
    with pytest.raises(ProtocolError, match="request r is not known to the runner: it was forgotten, as its KV went"):
        runner.execute_model(scheduler.schedule())
    other = toy_scheduler(block_size=8)
    other.add("s", list(range(20)), 12)
    other.running["s"].num_computed = 16
    with pytest.raises(ProtocolError, match="16 computed tokens in blocks that hold nothing: its KV went with sleep"):
        runner.execute_model(other.schedule())


def test_a_preempted_request_goes_on_after_a_sleep(runner, toy_scheduler) -> None:
    """Sent again as new it ends as if nothing had happened."""
    expected = tokens_of(runner, toy_scheduler)
    scheduler = toy_scheduler(block_size=8)
    scheduler.add("r", PROMPT, 12)
    for _ in range(5):
        runner.execute_model(scheduler.schedule())
        scheduler.commit(runner.sample_tokens(None))
    scheduler.preempt("r")
    runner.operations.sleep(1)
    runner.operations.wake_up()
    assert scheduler.run(runner)["r"] == expected


def test_a_step_that_waits_for_its_sampling_keeps_the_model_awake(runner, toy_scheduler) -> None:
    """Sleep, a load and an update are refused until it is sampled."""
    scheduler = toy_scheduler(block_size=8)
    scheduler.add("r", PROMPT, 12)
    runner.execute_model(scheduler.schedule())
    for operation in (runner.operations.sleep, runner.operations.load_weights, runner.operations.start_weight_update):
        with pytest.raises(ModelNotReady, match=r"1 forward pass\(es\) wait for their sampling"):
            operation()
    scheduler.commit(runner.sample_tokens(None))
    scheduler.run(runner)


@pytest.mark.parametrize("name", sorted({*TINY_ARCHITECTURES} - {"llama", "qwen2", "phi", "gemma2"}))
def test_new_weights_say_what_a_fresh_start_says(name, tiny_model, ready_runner, toy_scheduler) -> None:
    """Of every kind of architecture: packed, tied, fused and many experts' weights (G56)."""
    fresh = ready_runner(tiny_model(name, seed=1), block_size=8)
    runner = ready_runner(tiny_model(name), block_size=8)
    expected, before = tokens_of(fresh, toy_scheduler), tokens_of(runner, toy_scheduler)
    state = state_of(tiny_model(name, seed=1))
    report = runner.operations.update_weights(state)
    assert set(report.applied) == set(state)
    assert (report.version, report.is_complete) == (2, True)
    assert tokens_of(runner, toy_scheduler) == expected != before


@pytest.mark.parametrize("name", ["llama_gqa", "gemma2"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_update_in_chunks_after_deep_sleep_is_a_fresh_start(
    name, dtype, tiny_model, ready_runner, toy_scheduler
) -> None:
    """One tensor at a time, in any order, onto weights that were discarded."""
    expected = tokens_of(ready_runner(tiny_model(name, seed=1), block_size=8, dtype=dtype), toy_scheduler)
    runner = ready_runner(tiny_model(name), block_size=8, dtype=dtype)
    operations = runner.operations
    operations.sleep(2)
    operations.wake_up(["weights"])
    operations.start_weight_update()
    for item in reversed(state_of(tiny_model(name, seed=1)).items()):
        report = operations.update_weights([item])
        assert not report.is_complete
    operations.finish_weight_update()
    operations.wake_up(["kv_cache"])
    assert tokens_of(runner, toy_scheduler) == expected


def test_nobody_changes_weights_through_the_trainers_tensors(runner, other, toy_scheduler, ready_runner) -> None:
    """What was given may be overwritten right after each call."""
    operations = runner.operations
    operations.start_weight_update()
    for name, tensor in state_of(other).items():
        operations.update_weights({name: tensor})
        tensor.fill_(torch.nan)
    operations.finish_weight_update()
    assert tokens_of(runner, toy_scheduler) == tokens_of(ready_runner(other, block_size=8), toy_scheduler)


def test_a_half_done_update_runs_nothing(runner, other, toy_scheduler) -> None:
    """Neither a step nor a second start; finishing names what is missing, and works once that has come."""
    state = state_of(other)
    last = state.popitem()
    operations = runner.operations
    operations.start_weight_update()
    operations.update_weights(state)
    with pytest.raises(ModelNotReady, match="the weights are half updated; send what is missing"):
        tokens_of(runner, toy_scheduler)
    with pytest.raises(ModelNotReady, match="an update of the weights was refused"):
        operations.start_weight_update()
    with pytest.raises(WeightsMismatch, match=rf"still missing: {last[0]}; send them and finish again") as caught:
        operations.finish_weight_update()
    assert caught.value.missing == (last[0],)
    operations.update_weights([last])
    assert operations.finish_weight_update().version == 2
    tokens_of(runner, toy_scheduler)


def test_what_does_not_fit_is_named_and_changes_nothing(runner, other, toy_scheduler) -> None:
    """Unknown names and wrong shapes, all of them at once."""
    before = tokens_of(runner, toy_scheduler)
    state = state_of(other)
    state["model.layers.9.mlp.up_proj.weight"] = state.pop("model.layers.0.mlp.up_proj.weight")
    state["model.norm.weight"] = torch.zeros(3)
    with pytest.raises(WeightsMismatch) as caught:
        runner.operations.update_weights(state)
    assert str(caught.value).startswith(
        "the model has no weight named model.layers.9.mlp.up_proj.weight; "
        "wrong shapes: model.norm.weight is [3], expected [64]"
    )
    assert caught.value.__notes__ == ["the weights are what they were"]
    assert tokens_of(runner, toy_scheduler) == before


def test_an_iterator_that_fails_in_its_middle_leaves_nothing_that_runs(runner, other, toy_scheduler) -> None:
    """The weights are mixed, the error says so, and a load from the files mends it."""
    before = tokens_of(runner, toy_scheduler)
    state = state_of(other)

    def stream():
        yield from list(state.items())[:5]
        raise OSError("the trainer is gone")

    with pytest.raises(OSError, match="the trainer is gone") as caught:
        runner.operations.update_weights(stream())
    assert "half updated" in caught.value.__notes__[0]
    with pytest.raises(ModelNotReady, match="half updated"):
        tokens_of(runner, toy_scheduler)
    runner.operations.load_weights()
    assert tokens_of(runner, toy_scheduler) == before


def test_a_partial_update_leaves_the_rest(runner, other, toy_scheduler, ready_runner) -> None:
    """One layer's query projection, which is a part of a packed matrix; not after deep sleep."""
    name = "model.layers.1.self_attn.q_proj.weight"
    mine = dict(runner._store.weights.tensors())
    tensor = state_of(other)[name]
    assert runner.operations.update_weights({name: tensor}, partial=True).applied == (name,)
    for each, now in runner._store.weights.tensors():
        assert torch.equal(now, tensor if each == name else mine[each])
    runner.operations.sleep(2)
    runner.operations.wake_up()
    with pytest.raises(WeightsMismatch, match=r"still missing: lm_head.weight, .* and \d+ more"):
        runner.operations.update_weights({name: tensor}, partial=True)


def test_a_tied_weight_goes_by_either_name(tiny_model, ready_runner, toy_scheduler) -> None:
    """A trainer that lists the embedding only has given the head as well."""
    expected = tokens_of(ready_runner(tiny_model("gemma", seed=1), block_size=8), toy_scheduler)
    runner = ready_runner(tiny_model("gemma"), block_size=8)
    state = state_of(tiny_model("gemma", seed=1))
    del state["lm_head.weight"]
    runner.operations.update_weights(state)
    assert tokens_of(runner, toy_scheduler) == expected


def test_each_stage_takes_its_own(tiny_model, ready_runner) -> None:
    """Of two pipeline stages; names of the other one are counted, and unknown ones are refused by both."""
    stages = [ready_runner(tiny_model("llama_gqa"), block_size=8, pp_rank=rank, pp_size=2) for rank in range(2)]
    state = state_of(tiny_model("llama_gqa", seed=1))
    reports = [stage.operations.update_weights(state) for stage in stages]
    assert [report.elsewhere for report in reports] == [len(state) - len(report.applied) for report in reports]
    assert set(reports[0].applied) | set(reports[1].applied) == set(state)
    assert not set(reports[0].applied) & set(reports[1].applied)
    for stage in stages:
        for name, tensor in stage._store.weights.tensors():
            assert torch.equal(tensor, state[name])
        with pytest.raises(WeightsMismatch, match=r"no weight named model\.nothing"):
            stage.operations.update_weights({"model.nothing": torch.zeros(1)})


def test_weights_load_from_another_directory(runner, other, tiny_model, ready_runner, toy_scheduler) -> None:
    """Then from the model's own again."""
    before = tokens_of(runner, toy_scheduler)
    report = runner.operations.load_weights(str(other))
    assert report.version == 2
    assert "model.layers.0.self_attn.q_proj.weight" in report.applied
    assert tokens_of(runner, toy_scheduler) == tokens_of(ready_runner(other, block_size=8), toy_scheduler) != before
    runner.operations.load_weights()
    assert tokens_of(runner, toy_scheduler) == before


@pytest.mark.parametrize(
    ("name", "changes", "says"),
    [
        ("llama_gqa", {"vocab_size": 600}, r"lm_head.weight is \[600, 64\] there and \[512, 64\] here"),
        ("llama_gqa", {"num_hidden_layers": 2}, r"model.layers.2.input_layernorm.weight is missing there"),
        ("llama_gqa", {"max_position_embeddings": 64}, "it holds 64 positions and the one here 512"),
        ("gpt2", {}, "another model|no LlamaForCausalLM"),
    ],
)
def test_another_model_is_not_loaded(name, changes, says, runner, tiny_model, toy_scheduler) -> None:
    """It is refused before anything is changed."""
    before = tokens_of(runner, toy_scheduler)
    with pytest.raises(ConfigError, match=says):
        runner.operations.load_weights(str(tiny_model(name, **changes)))
    assert tokens_of(runner, toy_scheduler) == before


def test_a_load_that_fails_leaves_nothing_that_runs(runner, tiny_model, tmp_path, toy_scheduler) -> None:
    """Files that turn out bad half-way: no weights, until a load succeeds."""
    before = tokens_of(runner, toy_scheduler)
    for file in tiny_model("llama_gqa").iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    with pytest.raises(ModelLoadError, match="is cut short"):
        runner.operations.load_weights(str(tmp_path))
    with pytest.raises(ModelNotReady, match=r"the weights are not loaded; call load_weights\(\)"):
        tokens_of(runner, toy_scheduler)
    runner.operations.load_weights()
    assert tokens_of(runner, toy_scheduler) == before
