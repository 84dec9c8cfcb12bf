"""One model on several ranks, each a process: token for token what one process says."""

from __future__ import annotations

import asyncio

import pytest

from aexec import AsyncLLM, ExecutorConfig, ParallelConfig, SamplingParams
from aexec.testing.tiny_models import save_tiny_model

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(300)]

GREEDY = SamplingParams(max_tokens=16, temperature=0.0, ignore_eos=True)
SEEDED = SamplingParams(max_tokens=16, temperature=0.9, top_p=0.9, seed=7, logprobs=2, ignore_eos=True)
#: Longer than a step's budget, so that chunks of prompts and decodes share steps.
PROMPTS = [[(7 * place + 31 * number) % 512 for place in range(3 + 11 * number)] for number in range(6)]
ONE_THREAD = {"OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """A tiny random Llama of four layers and four KV heads."""
    return str(save_tiny_model("llama", tmp_path_factory.mktemp("parallel") / "llama"))


async def answers(llm):
    """All prompts at once, one of them drawn by chance."""
    asked = [llm.complete(prompt, GREEDY) for prompt in PROMPTS[1:]]
    return await asyncio.gather(llm.complete(PROMPTS[0], SEEDED), *asked)


def spread(directory, tensor, pipeline, partition=None, *, plane=None, **settings):
    layout = ParallelConfig(tensor, pipeline, pipeline_partition=partition)
    on_ray = {} if plane is None else {"ray_step_plane": plane}
    config = ExecutorConfig(backend="ray" if plane else "mp", parallel=layout, env=ONE_THREAD, **on_ray)
    return AsyncLLM(directory, executor=config, max_num_batched_tokens=24, **settings)


@pytest.fixture(scope="module")
async def alone(directory):
    """What one rank in this process says."""
    async with AsyncLLM(directory, max_num_batched_tokens=24, num_blocks=64) as llm:
        return await answers(llm), llm.model_info.num_parameters


def on_ray(*values):
    return pytest.param(*values, marks=pytest.mark.ray)


PLANES = [on_ray("channel"), on_ray("compiled_graph")]


@pytest.mark.parametrize(("tensor", "pipeline"), [(2, 1), (1, 2), (2, 2), (1, 4)])
async def test_ranks_together_say_what_one_alone_says(directory, alone, tensor, pipeline):
    """TP, PP and both: greedy and seeded tokens are equal, though each rank holds a part of the weights."""
    await says_what_one_alone_says(directory, alone, tensor, pipeline)


@pytest.mark.parametrize("plane", PLANES)
async def test_ranks_on_ray_say_what_one_alone_says(directory, alone, plane):
    """Two stages of two ranks, whichever road hidden states and tokens take."""
    await says_what_one_alone_says(directory, alone, 2, 2, plane)


async def says_what_one_alone_says(directory, alone, tensor, pipeline, plane=None):
    expected, num_parameters = alone
    async with spread(directory, tensor, pipeline, plane=plane, num_blocks=64) as llm:
        found = await answers(llm)
        assert [each.token_ids for each in found] == [each.token_ids for each in expected]
        infos = await llm.executor.collective_rpc("model_info")
        assert all(info.num_parameters < 0.8 * num_parameters for info in infos)
        figures = await llm.executor.collective_rpc("pipeline_statistics")
        steps = (await llm.statistics()).num_steps
        last = tensor * (pipeline - 1)
        assert {each.sent for each in figures[:last]} <= {steps}
        assert {each.received for each in figures[tensor:]} <= {steps}
    logprobs = [position.logprob for position in found[0].logprobs]
    assert logprobs == pytest.approx([position.logprob for position in expected[0].logprobs], abs=1e-4)


async def test_uneven_stages_use_as_many_blocks_as_the_fullest_of_them_holds(directory, alone):
    """Three layers and one: a block takes thrice the bytes on the first stage, and its number of blocks counts."""
    expected, _ = alone
    async with spread(directory, 1, 2, partition=(3, 1), kv_cache_memory_bytes=2**20) as llm:
        first, second = await llm.executor.collective_rpc("model_info")
        assert first.block_bytes == 3 * second.block_bytes
        assert first.num_blocks < second.num_blocks
        assert (await llm.statistics()).blocks.num_blocks == first.num_blocks - 1  # block 0 is the null block
        found = await answers(llm)
    assert [each.token_ids for each in found] == [each.token_ids for each in expected]


async def test_how_far_each_rank_has_loaded_is_told(directory):
    """A progress bar in this process hears of the weights that the workers read."""
    told = []
    async with spread(directory, 1, 2, num_blocks=8, progress=lambda *report: told.append(report)):
        pass
    weights = [(done, total) for phase, done, total in told if phase == "weights"]
    assert weights[-1][0] == weights[-1][1] > 0
    assert all(done < total for done, total in weights[:-1])


async def run_smollm2(llm):
    """Three greedy answers at once."""
    params = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
    prompts = ["The capital of France is", "Water boils at", "def area(width, height):"]
    return [each.token_ids for each in await asyncio.gather(*(llm.complete(prompt, params) for prompt in prompts))]


@pytest.fixture(scope="module")
async def smollm2_alone():
    """What one rank in this process says."""
    async with AsyncLLM("smollm2", num_blocks=64) as llm:
        return await run_smollm2(llm)


@pytest.mark.parametrize(
    ("tensor", "pipeline", "plane"),
    [(1, 2, None), (3, 1, None), on_ray(1, 2, "channel"), on_ray(1, 2, "compiled_graph")],
)
async def test_smollm2_on_several_ranks_says_what_it_says_on_one(smollm2_alone, tensor, pipeline, plane):
    """Two stages, on this machine and on Ray; and three ranks for its three KV heads."""
    async with spread("smollm2", tensor, pipeline, plane=plane, num_blocks=64) as llm:
        assert await run_smollm2(llm) == smollm2_alone
