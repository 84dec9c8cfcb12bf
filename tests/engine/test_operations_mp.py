"""New weights, deep sleep and saved states of a model that is spread over processes both ways."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from anyio import to_thread
from transformers import AutoModelForCausalLM

from aexec import AsyncLLM, SamplingParams
from aexec.testing.tiny_models import save_tiny_model

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(120)]

GREEDY = SamplingParams(max_tokens=12, temperature=0.0)
PROMPT = [11, 12, 13, 200, 7]
SPREAD: dict[str, Any] = {"executor": "mp", "tensor_parallel_size": 2, "pipeline_parallel_size": 2, "num_blocks": 64}


async def says(llm: AsyncLLM) -> tuple[int, ...]:
    return tuple((await llm.complete(PROMPT, GREEDY)).token_ids)


async def said(model: object, **settings: Any) -> tuple[int, ...]:
    async with AsyncLLM(str(model), num_blocks=64, **settings) as llm:
        return await says(llm)


async def test_four_ranks_take_their_parts_of_new_weights(tmp_path):
    """Tensor-parallel slices and stages alike say what one fresh rank says, and again from the state that they save."""
    first, second = [
        await to_thread.run_sync(lambda seed=seed: save_tiny_model("llama_gqa", tmp_path / str(seed), seed=seed))
        for seed in range(2)
    ]
    before, after = await said(first, executor="uni"), await said(second, executor="uni")
    assert before != after
    trainer: Any = await to_thread.run_sync(lambda: AutoModelForCausalLM.from_pretrained(second, dtype=torch.float32))
    state = trainer.state_dict()
    async with AsyncLLM(str(first), **SPREAD) as llm:
        assert await says(llm) == before
        report = await llm.update_weights(iter(state.items()), chunk_bytes=20_000)
        assert sorted(report.applied) == sorted(state)
        assert await says(llm) == after
        files = await llm.collective_rpc("save_sharded_state", (str(tmp_path / "saved"),))
        assert len(set(files)) == 4
        await llm.sleep(2)
        await llm.wake_up()
        await llm.load_weights()
        assert await says(llm) == before
        await llm.load_weights(str(tmp_path / "saved"))
        assert await says(llm) == after
