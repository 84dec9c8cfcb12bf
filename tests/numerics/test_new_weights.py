"""New weights by a call of the workers' own methods, while the engine is paused: what is said next is said by them."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch
from anyio import to_thread
from transformers import AutoModelForCausalLM

from aexec import AsyncLLM, SamplingParams
from aexec.testing.tiny_models import save_tiny_model

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(120)]

GREEDY = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
LONG = SamplingParams(max_tokens=100, temperature=0.0, ignore_eos=True)
PROMPT = [(7 * place) % 512 for place in range(40)]  # more than two blocks, which the prefix cache keeps


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Two tiny random Llamas of the same shapes."""
    home = tmp_path_factory.mktemp("weights")
    return [str(save_tiny_model("llama", home / str(seed), seed=seed)) for seed in range(2)]


@pytest.fixture(scope="module")
async def said(models):
    """What each of them says on a fresh start."""
    answers = []
    for model in models:
        async with AsyncLLM(model, num_blocks=64) as llm:
            answers.append((await llm.complete(PROMPT, GREEDY)).token_ids)
    return answers


async def state_of(model: str) -> dict[str, Any]:
    """What a trainer of this model has."""
    trainer: Any = await to_thread.run_sync(lambda: AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32))
    return trainer.state_dict()


async def give_while_paused(llm, state):
    """All of it in one call; a stream that runs meanwhile goes on."""
    running = llm.generate([5, 6, 7], LONG)
    await anext(running)
    await llm.pause()
    reports = await llm.collective_rpc("update_weights", (state,))
    assert {report.version for report in reports} == {2}
    waiting = asyncio.create_task(llm.complete(PROMPT, GREEDY))
    await llm.resume()
    assert [chunk.finish_reason async for chunk in running][-1] == "length"
    return (await waiting).token_ids


async def give_in_chunks_after_a_deep_sleep(llm, state):
    """Level 2 has discarded the weights: requests wait for the last chunk, and no longer."""
    pairs = list(state.items())
    await llm.sleep(2)
    waiting = asyncio.create_task(llm.complete(PROMPT, GREEDY))
    await llm.wake_up()
    await llm.collective_rpc("start_weight_update")
    for first in range(0, len(pairs), 8):
        await llm.collective_rpc("update_weights", (pairs[first : first + 8],))
        assert not waiting.done()
    await llm.collective_rpc("finish_weight_update")
    return (await waiting).token_ids


@pytest.mark.parametrize("settings", [{}, {"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}], ids=str)
async def test_weights_by_rpc_are_those_that_speak_next(models, said, settings):
    """On one rank, on two that share layers and on two stages; a prompt of before is no longer in the prefix cache."""
    old, new = said
    async with AsyncLLM(models[0], num_blocks=64, **settings) as llm:
        assert (await llm.complete(PROMPT, GREEDY)).token_ids == old != new
        assert await give_while_paused(llm, await state_of(models[1])) == new
        assert (await llm.complete(PROMPT, GREEDY)).token_ids == new
        assert await give_in_chunks_after_a_deep_sleep(llm, await state_of(models[0])) == old
        assert await give_in_chunks_after_a_deep_sleep(llm, await state_of(models[1])) == new


async def test_the_own_files_by_rpc_are_no_new_weights(models, said):
    """``load_weights`` goes back to them, or to those of another directory."""
    old, new = said
    async with AsyncLLM(models[0], num_blocks=64) as llm:
        await llm.collective_rpc("load_weights", (models[1],))
        assert (await llm.complete(PROMPT, GREEDY)).token_ids == new
        await llm.collective_rpc("load_weights")
        assert (await llm.complete(PROMPT, GREEDY)).token_ids == old
