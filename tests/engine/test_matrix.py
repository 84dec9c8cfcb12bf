"""The same 64 mixed requests say the same on every executor, with every way of scheduling them.

What is right is what a request says *alone*: on one rank, with room for all of it, nothing
shared, chunked or overlapped. Each row of the table then runs all 64 at once on an executor
whose KV cache is too small for them, so that some are preempted, while readers leave and
requests are aborted in the middle. Tokens, texts, reasons and log-probabilities have to be
those of the request alone, whatever the row.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import re
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from aexec import (
    AsyncLLM,
    ExecutorConfig,
    Offload,
    ParallelConfig,
    SamplingParams,
    StructuredOutput,
    open_executor,
)
from aexec.config import CacheConfig, ModelConfig
from aexec.engine.completion import Completion, collect
from aexec.executor.base import Executor
from aexec.messages.request import TokenChunk
from aexec.testing.tiny_models import save_tiny_model

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(240)]

BLOCK_SIZE = 8
ONE_THREAD = {"OMP_NUM_THREADS": "1"}

# ---------------------------------------------------------------- the requests

SCHEMA = {
    "type": "object",
    "properties": {"a": {"enum": ["x", "y"]}, "n": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["a", "n"],
    "additionalProperties": False,
}
#: What is asked for, by kind. ``...`` is filled in from what the request says without it.
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "seeded": {"temperature": 0.9, "top_p": 0.9},
    "penalised": {"temperature": 0.7, "repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.5},
    "stop text": {"temperature": 0.0, "stop": ...},
    "stop token": {"temperature": 1.0, "top_k": 40, "min_tokens": 3, "stop_token_ids": ...},
    "logprobs": {"temperature": 0.8, "min_p": 0.02, "logprobs": 3, "prompt_logprobs": 1},
    "json": {"temperature": 0.9, "structured": StructuredOutput(json_schema=SCHEMA)},
    "regex": {"temperature": 0.0, "structured": StructuredOutput(regex=r"[a-m]{4,9}(-[0-9]{2}){1,3}")},
    "samples": {"temperature": 0.9, "n": 2},
    "left": {"temperature": 0.0},
    "aborted": {"temperature": 1.0},
}


@dataclass(frozen=True)
class Asked:
    """One request of the mix."""

    kind: str
    prompt: list[int]
    params: SamplingParams

    @property
    def cut_after(self) -> int:
        """Tokens after which it is ended from outside; 0: it goes on to its own end."""
        return (self.params.max_tokens or 0) // 3 if self.kind in ("left", "aborted") else 0


def plain_requests(number: int, new_tokens: int) -> list[Asked]:
    """Requests of all kinds in turn, before stop texts and stop tokens are known; every fourth prompt begins alike."""
    asked: list[Asked] = []
    for place, kind in zip(range(number), itertools.cycle(KINDS), strict=False):
        family = place % 4
        shared = [33 + (7 * each + 29 * family) % 90 for each in range(12 * family)]
        own = [33 + (11 * each + 5 * place) % 90 for each in range(3 + place % 17)]
        settings = {name: value for name, value in KINDS[kind].items() if value is not ...}
        seed = None if settings["temperature"] == 0.0 else 1000 + place
        params = SamplingParams(max_tokens=new_tokens, seed=seed, ignore_eos=True, **settings)
        asked.append(Asked(kind, shared + own, params))
    return asked


def with_stop(asked: Asked, said: Completion) -> Asked:
    """The request with a stop that it is known to come to, in the middle of what it says."""
    if KINDS[asked.kind].get("stop"):
        found = re.search(r"[!-~]{3}", said.text[4:]) or re.search(r"[!-~]", said.text)
        assert found is not None, said.text
        return replace(asked, params=msgspec.structs.replace(asked.params, stop=("never said", found[0])))
    if KINDS[asked.kind].get("stop_token_ids"):
        return replace(
            asked,
            params=msgspec.structs.replace(asked.params, stop_token_ids=(said.token_ids[len(said.token_ids) // 2],)),
        )
    return asked


async def run_one(llm: AsyncLLM, number: int, asked: Asked) -> Completion:
    """One request to its end, or to where its reader leaves, or has it aborted."""
    if not asked.cut_after:
        return await llm.complete(asked.prompt, asked.params, priority=number % 3)
    chunks: list[TokenChunk] = []
    generation = llm.generate(asked.prompt, asked.params, request_id=f"cut-{number}", priority=number % 3)
    async for chunk in generation:
        chunks.append(chunk)
        if chunk.num_completion_tokens >= asked.cut_after and asked.kind == "left":
            break
        if chunk.num_completion_tokens >= asked.cut_after:
            await llm.abort(generation.request_id)

    async def again() -> AsyncIterator[TokenChunk]:
        for chunk in chunks:
            yield chunk

    return await collect(again())


async def run_all(llm: AsyncLLM, mix: list[Asked]) -> list[Completion]:
    """All of them at once."""
    return await asyncio.gather(*(run_one(llm, number, asked) for number, asked in enumerate(mix)))


@dataclass(frozen=True)
class Mix:
    """Requests, and what each says alone."""

    model: str
    requests: list[Asked]
    alone: list[Completion]


async def make_mix(model: str, number: int, new_tokens: int, **settings: Any) -> Mix:
    """Ask one by one, on one rank, nothing shared."""
    async with AsyncLLM(model, executor="uni", max_num_seqs=1, **settings) as llm:
        requests: list[Asked] = []
        for asked in plain_requests(number, new_tokens):
            has_stop = any(value is ... for value in KINDS[asked.kind].values())
            said = await llm.complete(asked.prompt, asked.params) if has_stop else None
            requests.append(asked if said is None else with_stop(asked, said))
        alone = [await llm.complete(asked.prompt, asked.params) for asked in requests]
    return Mix(model, requests, alone)


def check_same(mix: Mix, found: list[Completion]) -> None:
    """What was said at once is what was said alone; of a request that was cut, its beginning."""
    for asked, expected, each in zip(mix.requests, mix.alone, found, strict=True):
        where = f"{asked.kind}, prompt of {len(asked.prompt)}"
        if asked.cut_after:
            assert each.token_ids == expected.token_ids[: len(each.token_ids)], where
            assert expected.text.startswith(each.text), where
            assert len(each.token_ids) >= asked.cut_after, where
            continue
        assert said(each) == said(expected), where
        if asked.kind == "samples":
            assert [said(sample) for sample in each.samples] == [said(sample) for sample in expected.samples], where
        if expected.logprobs is not None:
            assert logprobs_of(each) == pytest.approx(logprobs_of(expected), abs=2e-3), where


def said(completion: Completion) -> tuple[Any, ...]:
    """What has to be the same."""
    return completion.token_ids, completion.text, completion.finish_reason, completion.stop_reason


def logprobs_of(completion: Completion) -> list[float]:
    """Of the output, then of the prompt."""
    assert completion.logprobs is not None
    assert completion.prompt_logprobs is not None
    prompt = [entry.logprob for entry in completion.prompt_logprobs if entry is not None]
    return [entry.logprob for entry in completion.logprobs] + prompt


# ---------------------------------------------------------------- models and executors

OFFLOAD = Offload(bytes=2**24)
TENSOR, STAGES = ParallelConfig(2, 1), ParallelConfig(1, 2)
#: Three ranks for the three KV heads of SmolLM2.
LAYOUTS = {"uni": ParallelConfig(), "tp2": TENSOR, "pp2": STAGES, "tp3": ParallelConfig(3, 1)}


@dataclass(frozen=True)
class Size:
    """How much of a model is run."""

    layouts: tuple[str, ...]
    num_requests: int
    new_tokens: int
    num_blocks: int


SIZES = {
    "dummy": Size(("uni", "tp2", "pp2"), 64, 24, 40),
    "llama": Size(("uni", "tp2", "pp2"), 64, 24, 40),
    "smollm2": Size(("uni", "tp3", "pp2"), len(KINDS), 8, 12),
}


def save_tokenizer(directory: Path) -> None:
    """A byte-level tokenizer for 512 ids: three special ones, the bytes, then pairs of letters."""
    import tokenizers

    pre = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    letters = sorted(pre.alphabet())
    pairs = [(first, second) for first in "etaoinshrdlucmfwyp" for second in "etaoinshrdlucm"]
    words = ["<pad>", "<s>", "</s>", *letters, *(first + second for first, second in pairs)]
    vocabulary = {word: place for place, word in enumerate(words)}
    vocabulary |= {f"<extra-{place}>": place for place in range(len(vocabulary), 512)}
    tokens = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=pairs))
    tokens.pre_tokenizer, tokens.decoder = pre, tokenizers.decoders.ByteLevel()
    tokens.add_special_tokens(["<pad>", "<s>", "</s>"])
    tokens.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The dummy, a tiny random Llama that has a tokenizer, and SmolLM2."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # several for tensors this small wait for each other, on a busy machine for long
    directory = save_tiny_model("llama", tmp_path_factory.mktemp("matrix") / "llama")
    save_tokenizer(directory)
    yield {"dummy": "dummy", "llama": str(directory), "smollm2": "smollm2"}
    torch.set_num_threads(num_threads)


@pytest.fixture(scope="module")
def mixes() -> dict[str, Mix]:
    """What has been asked of a model alone, once it has."""
    return {}


@asynccontextmanager
async def executor_of(model: str, layout: ParallelConfig, num_blocks: int) -> AsyncIterator[Executor]:
    """An executor whose KV cache holds so many blocks."""
    is_alone = layout == ParallelConfig()
    cache = CacheConfig(block_size=BLOCK_SIZE, num_blocks=num_blocks, connector=OFFLOAD)
    config = ExecutorConfig(
        backend="uni" if is_alone else "mp",
        parallel=layout,
        worker_kwargs={"model_config": ModelConfig(model=model), "cache_config": cache},
        env={} if is_alone else ONE_THREAD,
    )
    async with open_executor(config) as executor:
        yield executor


@asynccontextmanager
async def opened(
    name: str, layout: str, models: dict[str, str], mixes: dict[str, Mix]
) -> AsyncIterator[tuple[Mix, Executor]]:
    """What a model says alone, and an executor of it."""
    size = SIZES[name]
    if name not in mixes:
        mixes[name] = await make_mix(models[name], size.num_requests, size.new_tokens)
    async with executor_of(models[name], LAYOUTS[layout], size.num_blocks) as executor:
        yield mixes[name], executor


def places(name: str) -> Any:
    """A fixture: a model on each of its layouts, one executor of each for all rows."""

    @pytest.fixture(scope="module", params=SIZES[name].layouts, name=name)
    async def place(
        request: pytest.FixtureRequest, models: dict[str, str], mixes: dict[str, Mix], anyio_backend: str
    ) -> AsyncIterator[tuple[Mix, Executor]]:
        async with opened(name, request.param, models, mixes) as found:
            yield found

    return place


dummy, llama, smollm2 = places("dummy"), places("llama"), places("smollm2")


# ---------------------------------------------------------------- the table


@dataclass(frozen=True)
class Row:
    """One way of scheduling: what is switched on."""

    overlapped: bool
    cached: bool
    chunked: bool
    offloaded: bool = False

    @property
    def settings(self) -> dict[str, Any]:
        """Of ``AsyncLLM``."""
        return {
            "async_scheduling": None if self.overlapped else False,  # where it is possible
            "prefix_caching": self.cached,
            "kv_connector": OFFLOAD if self.offloaded else None,
            "max_num_batched_tokens": 40 if self.chunked else 4096,
        }

    def __str__(self) -> str:
        return "+".join(name for name, is_on in vars(self).items() if is_on) or "plain"


ROWS = [*(Row(*flags) for flags in itertools.product((False, True), repeat=3)), Row(True, True, True, offloaded=True)]
#: Each pair of the first three switches in each of its four positions, and all of them on.
PAIRS = [row for row in ROWS if sum(vars(row).values()) in (0, 2, 4)]


async def check(place: tuple[Mix, Executor], row: Row) -> None:
    """Mixed requests at once, preempted, left and aborted: each says what it says alone, and blocks are free after."""
    mix, executor = place
    async with AsyncLLM(mix.model, executor=executor, **row.settings) as llm:
        found = await run_all(llm, mix.requests)
        counts = await llm.statistics()
        is_overlapped = llm.async_scheduling.is_on
    check_same(mix, found)
    assert counts.num_preemptions > 0
    assert (counts.num_running, counts.num_waiting) == (0, 0)
    assert counts.blocks.num_free_blocks == counts.blocks.num_blocks
    assert is_overlapped == (row.overlapped and executor.output_rank == 0)  # not where there are several stages
    prefix = counts.scheduler.prefix
    assert (prefix.num_loaded_tokens > 0) == row.offloaded
    # What was evicted before it was asked for again is loaded where there is somewhere to load it from.
    found = prefix.num_hit_tokens + prefix.num_loaded_tokens
    share = found / sum(len(asked.prompt) for asked in mix.requests)
    assert (share > 0.25) == row.cached, share  # samples of one prompt share it in any case


@pytest.mark.parametrize("row", ROWS, ids=str)
async def test_the_dummy_says_the_same(dummy: tuple[Mix, Executor], row: Row) -> None:
    """Its runner also proves each batch: that every block that a request reads holds its own history."""
    await check(dummy, row)


@pytest.mark.parametrize("row", PAIRS, ids=str)
async def test_a_tiny_llama_says_the_same(llama: tuple[Mix, Executor], row: Row) -> None:
    """A model whose tokens depend on KV that was really computed, shared, and computed again."""
    await check(llama, row)


@pytest.mark.parametrize("row", [ROWS[0], ROWS[-1]], ids=str)
async def test_smollm2_says_the_same(smollm2: tuple[Mix, Executor], row: Row) -> None:
    """A real model, a request of each kind: with nothing switched on, and with everything."""
    await check(smollm2, row)
