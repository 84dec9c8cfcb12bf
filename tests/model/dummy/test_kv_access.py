"""The dummy's blocks as bytes; its ledger tells what they hold."""

from __future__ import annotations

import numpy as np
import pytest

from aexec.config import CacheConfig, ModelConfig
from aexec.errors import ProtocolError
from aexec.messages import NewRequestData, SamplingParams, SchedulerOutput
from aexec.model.dummy.runner import DummyRunner

PROMPT = [5, 6, 7, 8, 9, 10]


def dummy(name="dummy"):
    runner = DummyRunner(ModelConfig(model=name), CacheConfig(num_blocks=9, block_size=4))
    runner.initialize_cache(10**6)
    return runner


def run(runner, name, blocks, computed=0):
    new = NewRequestData(
        request_id=name,
        token_ids=PROMPT,
        num_prompt_tokens=len(PROMPT),
        block_ids=blocks,
        num_computed_tokens=computed,
        sampling=SamplingParams(temperature=0.0),
    )
    runner.execute_model(SchedulerOutput(new=[new], num_scheduled_tokens={name: len(PROMPT) - computed}))
    return runner.sample_tokens(None).sampled_token_ids[0][0]


def test_a_request_goes_on_from_blocks_that_went_out_and_in():
    """The ledger finds in them what the request needs; in any other it does not."""
    runner = dummy()
    said, row = run(runner, "a", [1, 2]), np.zeros(32, dtype=np.uint8)
    runner.kv_access.read([1], [row])
    runner.kv_access.write([7], [row])
    assert run(runner, "b", [7, 3], computed=4) == said
    with pytest.raises(ProtocolError, match="finds the KV of something else"):
        run(runner, "c", [6, 4], computed=4)


def test_a_spoiled_block_makes_nonsense_until_it_is_filled():
    """Whoever comes with it says something else and harms nobody; what it computes is of use to nobody."""
    runner = dummy()
    said = run(runner, "a", [1, 2])
    runner.kv_access.spoil([7])
    assert run(runner, "b", [7, 3], computed=4) != said
    assert run(runner, "c", [1, 4], computed=4) == said
    runner.execute_model(SchedulerOutput(finished_request_ids=["a", "b", "c"]))
    assert run(runner, "d", [7, 3]) == said


def test_what_is_computed_on_a_spoiled_block_is_found_out():
    """A block of such a request that is taken for a good one holds something else."""
    runner = dummy()
    runner.kv_access.spoil([7])
    tokens = [*PROMPT, 11, 12]
    for name, blocks, computed in (("a", [7, 3], 4), ("b", [1], 0)):
        new = NewRequestData(
            request_id=name,
            token_ids=tokens[: 8 if name == "a" else 4],
            num_prompt_tokens=4,
            block_ids=blocks,
            num_computed_tokens=computed,
            sampling=SamplingParams(temperature=0.0),
        )
        runner.execute_model(SchedulerOutput(new=[new], num_scheduled_tokens={name: 4}))
    late = NewRequestData(
        request_id="c",
        token_ids=[*tokens, 13],
        num_prompt_tokens=9,
        block_ids=[1, 3, 5],
        num_computed_tokens=8,
        sampling=SamplingParams(temperature=0.0),
    )
    with pytest.raises(ProtocolError, match="reads block 3 at position 4"):
        runner.execute_model(SchedulerOutput(new=[late], num_scheduled_tokens={"c": 1}))


def test_another_seed_is_another_model():
    """Its digest says so, and so does its version."""
    runner = dummy()
    access = runner.kv_access
    digest, version = access.weights_digest(), access.weights_version
    assert digest == dummy().kv_access.weights_digest()
    runner.operations.update_weights({"seed": 3})
    assert access.weights_digest() == dummy("dummy:seed=3").kv_access.weights_digest() != digest
    assert access.weights_version == version + 1


def test_there_are_no_blocks_without_a_cache():
    """It says so while it sleeps."""
    runner = dummy()
    access = runner.kv_access
    assert access.is_ready
    runner.operations.sleep(1)
    assert not access.is_ready
    access.spoil([1])
    with pytest.raises(ProtocolError, match="while there is no KV cache"):
        access.read([1], [np.zeros(32, dtype=np.uint8)])
    assert "dummy uint64 [4]" in repr(access)
