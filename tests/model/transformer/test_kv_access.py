"""Blocks of a torch cache as bytes, and what tells apart the weights that made them."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from aexec.config import CacheConfig
from aexec.errors import ModelNotReady, ProtocolError
from aexec.messages import NewRequestData, SamplingParams, SchedulerOutput
from aexec.model.transformer.kv_access import digest_of

PROMPT = [(7 * place) % 400 + 20 for place in range(21)]


@pytest.fixture(params=["float32", "bfloat16"])
def runner(request, tiny_model, ready_runner):
    return ready_runner(tiny_model("llama_gqa"), block_size=8, num_blocks=16, dtype=request.param)


def run(runner, name: str, blocks: list[int], computed: int = 0) -> tuple[int, float]:
    """The token after the prompt, and its log-probability."""
    sampling = SamplingParams(temperature=0.0, logprobs=0)
    new = NewRequestData(
        request_id=name,
        token_ids=PROMPT,
        num_prompt_tokens=len(PROMPT),
        block_ids=blocks,
        num_computed_tokens=computed,
        sampling=sampling,
    )
    runner.execute_model(SchedulerOutput(new=[new], num_scheduled_tokens={name: len(PROMPT) - computed}))
    output = runner.sample_tokens(None)
    runner.execute_model(SchedulerOutput(finished_request_ids=[name]))
    return output.sampled_token_ids[0][0], output.logprobs[0].logprob


def rows(runner, count: int) -> np.ndarray:
    return np.zeros((count, runner.kv_access.block_bytes), dtype=np.uint8)


def test_a_request_goes_on_from_blocks_that_went_out_and_in(runner):
    """Into other places: the same token, from the same logits, though only the tail is run."""
    whole = run(runner, "whole", [1, 2, 3])
    kept = rows(runner, 2)
    runner.kv_access.read([1, 2], list(kept))
    runner.kv_access.spoil([1, 2, 3])
    runner.kv_access.write([9, 5], list(kept))
    token, logprob = run(runner, "tail", [9, 5, 7], computed=16)
    assert token == whole[0]
    assert logprob == pytest.approx(whole[1], abs=2e-2)


def test_a_block_is_all_that_the_cache_has_of_it(runner):
    """Keys and values of all layers, in the cache's dtype."""
    access, info = runner.kv_access, runner.info()
    assert access.block_bytes == info.block_bytes
    assert str(runner._store.cache.dtype) in access.layout
    assert "[4, 2, 8, 2, 16]" in access.layout
    assert "TorchKVAccess" in repr(access)


def test_a_spoiled_block_holds_zeros(runner):
    """Nothing of whoever had it before; others are left as they are."""
    run(runner, "a", [1, 2, 3])
    runner.kv_access.spoil([2])
    runner.kv_access.spoil([])
    held = rows(runner, 3)
    runner.kv_access.read([1, 2, 3], list(held))
    assert [bool(row.any()) for row in held] == [True, False, True]


def test_blocks_may_be_filled_after_new_weights(runner, tiny_model):
    """The runner takes them for computed then, as it takes no others."""
    run(runner, "a", [1, 2, 3])
    kept = rows(runner, 2)
    runner.kv_access.read([1, 2], list(kept))
    runner.operations.load_weights()
    with pytest.raises(ProtocolError, match="computed tokens in blocks that hold nothing"):
        run(runner, "b", [1, 2, 3], computed=16)
    runner.kv_access.write([1, 2], list(kept))
    assert run(runner, "c", [1, 2, 3], computed=16)[0] == run(runner, "d", [4, 5, 6])[0]


def test_there_are_no_blocks_without_a_cache(runner):
    """It says so while it sleeps."""
    access = runner.kv_access
    assert access.is_ready
    version = access.weights_version
    runner.operations.sleep(1)
    assert not access.is_ready
    with pytest.raises(ProtocolError, match="while there is no KV cache"):
        access.read([1], [np.zeros(8, dtype=np.uint8)])
    runner.operations.wake_up()
    assert access.is_ready
    runner.operations.load_weights()
    assert access.weights_version == version + 1


def test_equal_weights_have_equal_digests_and_no_others(tiny_model, ready_runner):
    """Loaded twice, or changed by one element of one layer and back."""
    first, again, other = (
        ready_runner(tiny_model("llama_gqa", **changes)) for changes in ({}, {}, {"rope_theta": 5000.0})
    )
    before = first.kv_access.weights_digest()
    assert before == again.kv_access.weights_digest()
    assert before != other.kv_access.weights_digest()
    weights = first._store.weights
    for name in ("model.layers.2.self_attn.k_proj.weight", "model.norm.weight"):
        tensor = dict(weights.tensors())[name].clone()
        changed = tensor.clone()
        changed.view(-1)[3] += 0.001
        first.operations.update_weights({name: changed}, partial=True)
        assert first.kv_access.weights_digest() != before
        first.operations.update_weights({name: tensor}, partial=True)
        assert first.kv_access.weights_digest() == before


@pytest.mark.parametrize("event", ["update", "load", "sleep"])
def test_weights_that_change_while_they_are_read_have_no_digest(event, tiny_model, ready_runner, monkeypatch):
    """Half of it would be of the old ones; nothing is read that was moved."""
    runner = ready_runner(tiny_model("llama_gqa"))
    operations = runner.operations
    still, pieces = operations.residency.still, itertools.count()
    changes = {
        "update": operations.start_weight_update,
        "load": operations.load_weights,
        "sleep": lambda: (operations.sleep(1), operations.wake_up()),
    }

    def interrupted(num_changes):
        if next(pieces) == 3:
            changes[event]()
        return still(num_changes)

    monkeypatch.setattr(operations.residency, "still", interrupted)
    with pytest.raises(ModelNotReady, match="changed meanwhile"):
        runner.kv_access.weights_digest()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
@pytest.mark.parametrize("shape", [(), (0,), (3,), (40, 50), (1024,)])
def test_a_digest_is_of_shape_dtype_and_content(dtype, shape):
    """One element, an equal tensor of another shape, and what is not contiguous."""
    tensor = torch.arange(int(np.prod(shape))).reshape(shape).to(dtype)
    assert digest_of(tensor) == digest_of(tensor.clone())
    assert digest_of(tensor) != digest_of(tensor[None])
    if tensor.dim() == 2:
        assert digest_of(tensor.T) == digest_of(tensor.T.contiguous())
    if tensor.numel():
        changed = tensor.clone()
        changed.view(-1)[-1] = 1 - changed.view(-1)[-1].to(torch.int64)
        assert digest_of(changed) != digest_of(tensor)


def test_a_pool_for_each_shape_is_one_row(tiny_model):
    """Layers that store differently follow each other in a row."""
    from aexec.model.transformer.kv_access import TorchKVAccess
    from aexec.model.transformer.kv_cache import KVCache, KVShape

    class Store:
        cache = KVCache(
            {0: KVShape(2, 4), 1: KVShape(1, 8)}, 5, CacheConfig().block_size, torch.float32, torch.device("cpu")
        )

    store = Store()
    if len(store.cache.pools) == 1:
        raise AssertionError("two shapes make two pools")
    for pool in store.cache.pools:
        pool.copy_(torch.randn_like(pool))
    access = TorchKVAccess(store, None, lambda blocks: None)  # type: ignore[arg-type]
    row, back = (np.zeros(access.block_bytes, dtype=np.uint8) for _ in range(2))
    access.read([3], [row])
    access.write([1], [row])
    access.read([1], [back])
    assert (row == back).all()
    assert all(torch.equal(pool[:, :, 1], pool[:, :, 3]) for pool in store.cache.pools)
