"""SmolLM2 through driver, executor, worker and runner: token for token what ``transformers`` generates."""

from __future__ import annotations

import asyncio
import itertools
import statistics
import time
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pytest

from aexec import AsyncLLM, SamplingParams
from aexec.engine.hub_text import load_tokenizer
from aexec.model.sources.resolve import resolve_model

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(300)]

NEW_TOKENS = 48
LENGTHS = (1, 2, 3, 5, 8, 13, 16, 17, 31, 32, 33, 64, 100, 150, 257, 400)
GREEDY = SamplingParams(max_tokens=NEW_TOKENS, temperature=0.0, ignore_eos=True)
SEEDED = SamplingParams(max_tokens=24, temperature=0.9, top_p=0.95, seed=1234, ignore_eos=True)
TEXT = """
The lighthouse keeper had counted ships for forty years. On clear nights he wrote their names into a ledger, and when
fog came he rang a bell and listened. One winter a ship answered that was on no list: three short notes, and then a long
one. He climbed down to the water, lit a second lamp, and waited. In the morning there were footprints on the ice, and
beside them a wooden box with a map of the coast as it had been before the harbour was built. The map showed a village
where now there was only sand. He asked the fishermen, and the oldest of them said that her grandmother had been born
there; that the sea had taken it in a single night; and that on that night a bell had been rung until it cracked. So the
keeper went to the bell, and found that under the paint there was a seam of bronze, mended long ago by careful hands.
Water boils at one hundred degrees at sea level, and at less on a mountain, since the air above it weighs less. To make
bread one needs flour, water, salt and time; the yeast does the rest. A prime number has exactly two divisors. Between
any number above one and its double there is always another prime, which was proved by a young man of nineteen years.
Whoever plants a walnut tree plants it for his grandchildren. Ten thousand steps are about seven kilometres. The letter
arrived on a Tuesday, without a stamp, and nobody in the house would say who had carried it up the stairs to the attic.
def area(width: float, height: float) -> float:
    \"\"\"The area of a rectangle.\"\"\"
    return width * height
If it rains tomorrow, we will stay at home and sort the seeds: beans to the left, peas to the right, and the ones that
nobody can name into the blue jar. My uncle says that the best soup is the one that somebody else has cooked. In 1847 the
railway reached the valley, and within ten years there were two schools, a brewery and a newspaper that was printed every
Saturday. The cat, meanwhile, had found the warm place behind the oven and did not intend to leave it before the spring.
"""


@dataclass(frozen=True)
class Reference:
    """What ``transformers`` generates for each prompt alone."""

    prompts: list[list[int]]
    outputs: list[tuple[int, ...]]


@pytest.fixture(scope="session")
def directory():
    """The converted model's directory."""
    return resolve_model("smollm2").directory


@pytest.fixture(scope="session")
def prompts(directory) -> list[list[int]]:
    """Prompts of 1 to 400 tokens, each from another place of the text."""
    tokens = load_tokenizer(directory).encode(TEXT.strip().replace("\n", " "))
    assert len(tokens) > max(LENGTHS) + 7
    starts = (7 * place % (len(tokens) - length) for place, length in enumerate(LENGTHS))
    return [tokens[start : start + length] for start, length in zip(starts, LENGTHS, strict=True)]


@pytest.fixture(scope="session")
def reference(directory, prompts) -> Reference:
    """Each prompt alone, greedy, in fp32, without an end token.

    Two prompts at a time, each on one thread: on a busy machine torch's own threads would
    wait for each other most of the time.
    """
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig

    model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    model.generation_config = GenerationConfig(do_sample=False, max_new_tokens=NEW_TOKENS, pad_token_id=0)

    def generate(prompt: list[int]) -> tuple[int, ...]:
        ids = torch.tensor([prompt])
        with torch.inference_mode():
            whole = model.generate(ids, attention_mask=torch.ones_like(ids))
        return tuple(whole[0, len(prompt) :].tolist())

    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with ThreadPoolExecutor(2) as pool:
            return Reference(prompts, list(pool.map(generate, prompts)))
    finally:
        torch.set_num_threads(num_threads)


@pytest.fixture(scope="module")
async def llm(anyio_backend) -> AsyncIterator[AsyncLLM]:
    """SmolLM2 with room for all."""
    async with AsyncLLM("smollm2", dtype="float32", num_blocks=256) as opened:
        yield opened


@pytest.fixture(scope="module")
async def tight(anyio_backend) -> AsyncIterator[AsyncLLM]:
    """SmolLM2 with so few KV blocks that requests have to give way."""
    async with AsyncLLM("smollm2", dtype="float32", num_blocks=48, max_num_batched_tokens=1024) as opened:
        yield opened


async def answers(llm: AsyncLLM, prompts: list[list[int]], params: SamplingParams = GREEDY) -> list[tuple[int, ...]]:
    return [result.token_ids for result in await asyncio.gather(*(llm.complete(prompt, params) for prompt in prompts))]


# ---------------------------------------------------------------- greedy


async def test_16_prompts_at_once_give_the_tokens_of_each_alone(llm, reference):
    """Mixed lengths in one batch, prefills beside decodes."""
    before = await llm.statistics()
    assert await answers(llm, reference.prompts) == reference.outputs
    assert (await llm.statistics()).num_steps - before.num_steps < 2 * NEW_TOKENS


async def test_a_token_budget_of_32_changes_no_token(reference):
    """All but the short prompts are cut into chunks."""
    async with AsyncLLM("smollm2", dtype="float32", num_blocks=256, max_num_batched_tokens=32) as llm:
        assert await answers(llm, reference.prompts) == reference.outputs
        assert (await llm.statistics()).num_steps > sum(LENGTHS) / 32


async def test_preemption_changes_no_token(tight, reference):
    """With few KV blocks requests give way in the middle and start over."""
    assert await answers(tight, reference.prompts) == reference.outputs
    counts = await tight.statistics()
    assert counts.num_preemptions > 0
    assert counts.blocks.num_free_blocks == counts.blocks.num_blocks


# ---------------------------------------------------------------- sampled


async def test_a_seeded_request_says_the_same_alone_among_others_and_after_a_preemption(llm, tight, prompts):
    """Its tokens depend on its seed, its positions and its logits only."""
    mine, others = prompts[11], [prompt[:40] for prompt in (prompts[-1:] * 15)]
    alone = (await llm.complete(mine, SEEDED)).token_ids
    short = SamplingParams(max_tokens=24, ignore_eos=True)
    _, among = await asyncio.gather(answers(llm, others, short), llm.complete(mine, SEEDED))
    assert among.token_ids == alone
    # 47 blocks: five others fill 40 and this one 4; after a token each the others want 5 more, and it gives way.
    large = [prompts[-1][start : start + 128] for start in range(5)]
    long = SamplingParams(max_tokens=48, ignore_eos=True)
    growing = [asyncio.create_task(tight.complete(prompt, long)) for prompt in large]
    after, times = await asyncio.create_task(read_and_count_preemptions(tight, mine))
    await asyncio.gather(*growing)
    assert after == alone
    assert times > 0


async def read_and_count_preemptions(llm: AsyncLLM, prompt: list[int]) -> tuple[tuple[int, ...], int]:
    """The tokens of a seeded request, and how often it had to give way before its last one."""
    tokens: tuple[int, ...] = ()
    times = 0
    scheduler: Any = llm._frontend.driver._cell.actor._scheduler
    async for chunk in llm.generate(prompt, SEEDED, request_id="mine"):
        tokens += chunk.token_ids
        if (request := scheduler._requests.get("mine")) is not None:
            times = request.num_preemptions
    return tokens, times


# ---------------------------------------------------------------- the loop, and leaving


async def gaps(until: asyncio.Future[Any]) -> list[float]:
    """Seconds from tick to tick of a 10 ms ticker."""
    ticks = [time.perf_counter()]
    while not until.done():
        await asyncio.sleep(0.01)
        ticks.append(time.perf_counter())
    return [after - before for before, after in itertools.pairwise(ticks)]


async def test_the_loop_is_free_while_a_forward_pass_runs(llm, prompts):
    """A 10 ms ticker sees, beside prefills and decodes, hardly more than it sees alone; bounds are wide."""
    alone = await gaps(asyncio.ensure_future(asyncio.sleep(1.0)))
    params = SamplingParams(max_tokens=16, temperature=0.0, ignore_eos=True)
    beside = await gaps(asyncio.ensure_future(answers(llm, prompts[-8:], params)))
    assert statistics.median(beside) < statistics.median(alone) + 0.02
    assert max(beside) < max(alone) + 0.2
    assert len(beside) > 50


async def test_cancelling_one_of_8_streams_frees_its_blocks_and_changes_no_other(llm, reference):
    """The blocks are back before the next token of the others, whose tokens are as ever."""
    prompts, outputs = reference.prompts[:8], reference.outputs[:8]
    readers = [
        asyncio.create_task(llm.complete(prompt, GREEDY, request_id=f"r{n}")) for n, prompt in enumerate(prompts)
    ]
    watched = llm.generate(reference.prompts[12], GREEDY)
    for _ in range(4):
        await anext(watched)
    held = (await llm.statistics()).blocks.num_holders
    readers[3].cancel()
    await watched.aclose()
    await asyncio.wait(readers[3:4])
    assert (await llm.statistics()).blocks.num_holders == held - 2
    results = await asyncio.gather(*readers, return_exceptions=True)
    assert isinstance(results[3], asyncio.CancelledError)
    assert [result.token_ids for n, result in enumerate(results) if n != 3] == outputs[:3] + outputs[4:]
    counts = await llm.statistics()
    assert counts.blocks.num_free_blocks == counts.blocks.num_blocks


# ---------------------------------------------------------------- text


async def test_text_goes_in_and_out_as_with_the_models_own_tokenizer(llm, directory):
    """Prompts, conversations and answers: token ids and text are those of ``transformers``."""
    from transformers import AutoTokenizer

    theirs: Any = AutoTokenizer.from_pretrained(directory)
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    chat = llm.chat_prompt(messages)
    assert chat == theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    for text in (chat, TEXT, "naïve café 🙂 東京"):
        assert llm.tokenizer.encode(text) == theirs(text).input_ids
    answer = await llm.complete(chat, SamplingParams(max_tokens=32, temperature=0.0))
    assert answer.text == theirs.decode(answer.token_ids, skip_special_tokens=True) == "The capital of France is Paris."
    assert (answer.finish_reason, answer.stop_reason) == ("stop", theirs.eos_token_id)
    spoken = "naïve café 🙂 東京 — done"
    decoder = llm.tokenizer.decoder([], skip_special_tokens=True)
    pieces = [decoder.step(token_id) for token_id in theirs(spoken).input_ids]
    assert "".join(pieces) == spoken
    assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in pieces)
