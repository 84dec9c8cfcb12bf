"""Offload in whole engines: what comes back is not computed, and no token shows that it was away."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
from dataclasses import dataclass
from typing import Any, ClassVar

import anyio
import pytest
from anyio import to_thread

from aexec import AsyncLLM, ExecutorConfig, SamplingParams, open_executor
from aexec.config import CacheConfig, ModelConfig, Offload, Restart
from aexec.engine.connector.offload import OffloadConnector
from aexec.errors import ConfigError
from aexec.model.dummy.kv_access import DummyKVAccess
from aexec.testing.tiny_models import save_tiny_model
from aexec.worker.kv.offload import RankOffload

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(150)]

GREEDY = SamplingParams(max_tokens=6, temperature=0.0)
PROMPTS = [[(i * 37 + j * 11) % 190 + 33 for j in range(50 + i)] for i in range(6)]
SMALL = {"num_blocks": 16}  # of which one prompt takes four: the pool holds half of them
TP, PP = {"executor": "mp", "tensor_parallel_size": 2}, {"executor": "mp", "pipeline_parallel_size": 2}
BLOCK_SIZE = 16
ANSWERS: dict[str, list[Any]] = {}


@pytest.fixture(scope="module")
def tiny_llama(tmp_path_factory) -> str:
    return str(save_tiny_model("llama_gqa", tmp_path_factory.mktemp("tiny") / "llama"))


async def one_round(llm: AsyncLLM, prompts=PROMPTS) -> tuple[list[Any], int]:
    """What all prompts are answered, and how many tokens were computed for it."""
    before = (await llm.statistics()).num_scheduled_tokens
    answers = [(await llm.complete(prompt, GREEDY)).token_ids for prompt in prompts]
    return answers, (await llm.statistics()).num_scheduled_tokens - before


async def answers_without(model: str) -> list[Any]:
    """What one rank answers that neither keeps nor shares anything; the same for all tests."""
    if model not in ANSWERS:
        async with AsyncLLM(model, **SMALL, prefix_caching=False) as llm:
            ANSWERS[model] = (await one_round(llm))[0]
    return ANSWERS[model]


def tails(prompts=PROMPTS) -> int:
    """Tokens that have to be computed where all full blocks of the prompts come back."""
    return sum((len(prompt) - 1) % BLOCK_SIZE + 1 + GREEDY.max_tokens - 1 for prompt in prompts)


WHOLE = sum(len(prompt) + GREEDY.max_tokens - 1 for prompt in PROMPTS)


async def until_attached(llm: AsyncLLM) -> None:
    with anyio.fail_after(20):
        while not (await llm.statistics()).connector.is_attached:
            await llm.complete([1], SamplingParams(max_tokens=1))


# ---------------------------------------------------------------- what it is for


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        pytest.param("dummy", {}, id="dummy-uni"),
        pytest.param("dummy", TP, id="dummy-tp2"),
        pytest.param("dummy", PP, id="dummy-pp2"),
        pytest.param("llama", TP, id="llama-tp2"),
        pytest.param("llama", PP, id="llama-pp2"),
    ],
)
async def test_the_second_round_computes_the_tails_only(model, layout, tiny_llama):
    """With a pool too small for all prompts: what was evicted comes back from host memory, on all ranks."""
    model = tiny_llama if model == "llama" else model
    expected = await answers_without(model)
    async with AsyncLLM(model, **SMALL, **layout, kv_connector=Offload(bytes=2**26)) as llm:
        assert await one_round(llm) == (expected, WHOLE)
        assert await one_round(llm) == (expected, tails())
        figures = (await llm.statistics()).connector
        assert (figures.failed_loads, figures.loaded_blocks > 0) == (0, True)


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        pytest.param("dummy", TP, id="dummy-tp2"),
        pytest.param("dummy", PP, id="dummy-pp2"),
        pytest.param("llama", {}, id="llama-uni"),
    ],
)
async def test_the_next_engine_computes_the_tails_only(model, layout, tiny_llama, tmp_path):
    """From a directory, whose files outlive the workers."""
    model = tiny_llama if model == "llama" else model
    expected = await answers_without(model)
    for num_tokens in (WHOLE, tails()):
        async with AsyncLLM(model, **SMALL, **layout, kv_connector=Offload(directory=tmp_path)) as llm:
            assert await one_round(llm) == (expected, num_tokens)
            assert (await llm.statistics()).connector.failed_loads == 0


PROGRAM = """
import asyncio, json, sys
from aexec import AsyncLLM, SamplingParams
from aexec.config import Offload

async def main():
    async with AsyncLLM("dummy", kv_connector=Offload(directory=sys.argv[1])) as llm:
        done = await llm.complete(json.loads(sys.argv[2]), SamplingParams(max_tokens=6, temperature=0.0))
        print(json.dumps([list(done.token_ids), (await llm.statistics()).num_scheduled_tokens]))

asyncio.run(main())
"""


async def test_another_process_begins_where_the_first_one_ended(tmp_path):
    """Closing writes what the cache holds, though nothing was ever evicted; the next process computes a tail."""

    def run() -> list[Any]:
        command = [sys.executable, "-c", PROGRAM, str(tmp_path), json.dumps(PROMPTS[0])]
        return json.loads(subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout)

    first, second = await to_thread.run_sync(run), await to_thread.run_sync(run)
    assert first[0] == second[0]
    assert (first[1], second[1]) == (len(PROMPTS[0]) + 5, tails(PROMPTS[:1]))


async def test_another_layout_another_model_and_another_block_size_find_nothing(tmp_path):
    """In the same directory; each of them finds its own again."""
    offload = Offload(directory=tmp_path)
    for settings in ({}, {"block_size": 8}, {"dtype": "bfloat16"}, PP):
        for model in ("dummy", "dummy:seed=1"):
            async with AsyncLLM(model, **settings, kv_connector=offload) as llm:
                found = (await llm.statistics()).connector.num_blocks
                assert found == (0 if "dtype" not in settings else 3)  # the dummy knows no dtype
                await one_round(llm, PROMPTS[:1])


async def test_two_engines_share_a_directory(tmp_path):
    """At the same time; what one has written before the other opens is found by it."""
    offload = Offload(directory=tmp_path)
    expected = await answers_without("dummy")
    async with AsyncLLM("dummy", **SMALL, kv_connector=offload) as one:
        assert (await one_round(one))[0] == expected
        async with AsyncLLM("dummy", **SMALL, kv_connector=offload) as two:
            assert (await two.statistics()).connector.num_blocks > 0
            answers, num_tokens = await one_round(two)
            assert answers == expected
            assert num_tokens < sum(map(len, PROMPTS))
            assert (await one_round(one))[0] == expected


# ---------------------------------------------------------------- what goes wrong


async def damage(tmp_path, how) -> None:
    for number, path in enumerate(sorted(tmp_path.rglob("*.kv"))):
        if how == "gone" or number % 2:
            path.unlink()
        elif how == "short":
            path.write_bytes(path.read_bytes()[:-1])
        else:
            content = bytearray(path.read_bytes())
            content[-1] ^= 1
            path.write_bytes(content)


@pytest.mark.parametrize("how", ["gone", "short", "wrong"])
async def test_a_damaged_file_costs_time_and_no_token(how, tmp_path):
    """Missing, cut off, or with a wrong byte: what it held is computed again, and kept again."""
    expected = await answers_without("dummy")
    async with AsyncLLM("dummy", **SMALL, kv_connector=Offload(directory=tmp_path)) as llm:
        await one_round(llm)
        await damage(tmp_path, how)
        assert (await one_round(llm))[0] == expected
        assert (await llm.statistics()).connector.failed_loads > 0
        await one_round(llm)
        answers, num_tokens = await one_round(llm)
        assert (answers, num_tokens) == (expected, tails())


class FlakyStore:
    """One fetch and one commit of twenty fail."""

    def __init__(self, store, seed):
        self._store, self._random = store, random.Random(seed)

    def __getattr__(self, name):
        return getattr(self._store, name)

    def fetch(self, key):
        if self._random.random() < 0.05:
            raise KeyError(key)
        return self._store.fetch(key)

    def commit(self, key):
        if self._random.random() < 0.05:
            raise OSError(28, "No space left on device")
        self._store.commit(key)


class FlakyRank(RankOffload):
    def _open_store(self, fingerprint):
        super()._open_store(fingerprint)
        self._store = FlakyStore(self._store, self._rank)


@dataclass(frozen=True, slots=True, kw_only=True)
class Flaky(Offload):
    worker_side: ClassVar[Any] = FlakyRank


def mixture(seed: int, count: int) -> list[tuple[list[int], SamplingParams]]:
    """Requests that begin alike, and go on as they like."""
    draw = random.Random(seed)
    stems = [[draw.randrange(33, 120) for _ in range(draw.randrange(8, 60))] for _ in range(6)]
    return [
        (
            draw.choice(stems)[: draw.randrange(4, 60)]
            + [draw.randrange(33, 120) for _ in range(draw.randrange(1, 9))],
            SamplingParams(max_tokens=draw.randrange(1, 25), temperature=draw.choice([0.0, 1.0]), seed=number),
        )
        for number in range(count)
    ]


async def answers_of(requests, **settings) -> list[list[int]]:
    """All of them at once; every seventh is left after three tokens."""
    answers: list[list[int]] = [[] for _ in requests]

    async def ask(llm, number, prompt, sampling):
        async for chunk in llm.generate(prompt, sampling):
            answers[number] += chunk.token_ids
            if number % 7 == 0 and len(answers[number]) >= 3:
                del answers[number][3:]
                break

    small = {"block_size": 4, "num_blocks": 40, "max_num_batched_tokens": 32}
    async with AsyncLLM("dummy", **small, **settings) as llm, anyio.create_task_group() as group:
        for number, (prompt, sampling) in enumerate(requests):
            group.start_soon(ask, llm, number, prompt, sampling)
    return answers


@pytest.mark.parametrize(
    "layout", [{"async_scheduling": True}, {"async_scheduling": False}, PP], ids=["overlapped", "plain", "pp2"]
)
async def test_whatever_fails_the_tokens_are_the_same(layout):
    """Sixty requests, preempted and left, in a pool of forty blocks, with blocks that cannot be stored or loaded."""
    requests = mixture(len(layout), 60)
    expected = await answers_of(requests, prefix_caching=False)
    for offload in (Offload(bytes=120 * 4 * 8), Flaky(bytes=120 * 4 * 8)):
        assert await answers_of(requests, **layout, kv_connector=offload) == expected


async def test_a_step_that_fails_leaves_nothing_wrong_behind(tmp_path):
    """What its blocks hold is not kept, and the ranks are attached anew."""
    crash, model = 300, "dummy:crash_token_id=300"
    expected = await answers_without(model)
    async with AsyncLLM(model, **SMALL, kv_connector=Offload(directory=tmp_path)) as llm:
        for _ in range(2):
            with pytest.raises(RuntimeError, match="crashes the dummy"):
                await llm.complete([*PROMPTS[0][:40], crash], GREEDY)
            assert (await one_round(llm))[0] == expected
        await until_attached(llm)
    async with AsyncLLM(model, **SMALL, kv_connector=Offload(directory=tmp_path)) as llm:
        assert await one_round(llm) == (expected, tails())


async def test_workers_that_were_lost_are_attached_anew(tmp_path):
    """The stream goes on, and what was evicted before the crash is found after it."""
    expected = await answers_without("dummy")
    settings = {**SMALL, "executor": "mp", "on_failure": Restart(backoff=0.01)}
    async with AsyncLLM("dummy", **settings, kv_connector=Offload(directory=tmp_path)) as llm:
        await one_round(llm)
        await one_round(llm)
        os.kill(llm.executor.ranks[0].pid, signal.SIGKILL)
        assert (await one_round(llm))[0] == expected
        await until_attached(llm)
        assert await one_round(llm) == (expected, tails())


async def test_a_full_disk_at_the_end_does_not_hinder_closing(tmp_path, monkeypatch):
    """What could not be flushed is computed again another time."""

    def full(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("aexec.worker.kv.directory.write_block", full)
    async with AsyncLLM("dummy", kv_connector=Offload(directory=tmp_path)) as llm:
        await one_round(llm)
    assert not list(tmp_path.rglob("*.kv"))


# ---------------------------------------------------------------- other weights


async def test_new_weights_find_nothing_of_the_old_ones(tmp_path):
    """And the old ones, when they are back, find their own in the directory."""
    old, new = await answers_without("dummy"), await answers_without("dummy:seed=7")
    async with AsyncLLM("dummy", **SMALL, kv_connector=Offload(directory=tmp_path)) as llm:
        assert (await one_round(llm))[0] == old
        for weights, expected in ((7, new), (0, old), (7, new)):
            await llm.update_weights({"seed": weights})
            for _ in range(2):
                answers, num_tokens = await one_round(llm)
                assert answers == expected
            await until_attached(llm)
        assert num_tokens == tails()


async def test_weights_that_came_behind_the_engines_back_are_noticed():
    """A worker method that is called directly: nothing is kept under the wrong name, and reuse goes on after a reset."""
    new = await answers_without("dummy:seed=7")
    async with AsyncLLM("dummy", **SMALL, kv_connector=Offload()) as llm:
        await one_round(llm)
        await llm.collective_rpc("update_weights", ({"seed": 7},))
        await llm.reset_prefix_cache()
        for _ in range(3):
            assert (await one_round(llm))[0] == new
        assert (await one_round(llm)) == (new, tails())


@pytest.mark.parametrize("event", ["update_weights", "reset_prefix_cache"])
async def test_requests_run_on_while_the_weights_are_read(event, monkeypatch):
    """Without the offload; it is attached when all of them are read."""
    may_end, read = threading.Event(), DummyKVAccess.weights_digest

    def slowly(access):
        assert may_end.wait(30)
        return read(access)

    async with AsyncLLM("dummy", **SMALL, kv_connector=Offload()) as llm:
        monkeypatch.setattr(DummyKVAccess, "weights_digest", slowly)
        try:
            await (llm.reset_prefix_cache() if event == "reset_prefix_cache" else llm.update_weights({"seed": 7}))
            with anyio.fail_after(10):
                await one_round(llm)
            assert not (await llm.statistics()).connector.is_attached
        finally:
            may_end.set()
        await until_attached(llm)


async def test_what_is_kept_outlives_a_sleep():
    """The cache is gone, the weights are the same."""
    async with AsyncLLM("dummy", **SMALL, kv_connector=Offload()) as llm:
        expected, _ = await one_round(llm)
        await one_round(llm)
        await llm.sleep(1)
        await llm.wake_up()
        await until_attached(llm)
        answers, num_tokens = await one_round(llm)
        assert answers == expected
        assert num_tokens < sum(map(len, PROMPTS))


# ---------------------------------------------------------------- other connectors


async def test_a_directory_that_others_can_look_into_is_refused(tmp_path):
    """Before the first request, and with what to do; nothing stays open."""
    (tmp_path / "open").mkdir(mode=0o755)
    llm = AsyncLLM("dummy", kv_connector=Offload(directory=tmp_path / "open"))
    with pytest.raises(ConfigError, match="chmod 700"):
        await llm.open()
    assert not llm.is_open


async def test_an_executor_without_a_connector_is_refused():
    """The settings of an open executor's workers are its own."""
    config = ExecutorConfig(
        worker_kwargs={"model_config": ModelConfig(model="dummy"), "cache_config": CacheConfig(num_blocks=16)}
    )
    async with open_executor(config) as executor:
        with pytest.raises(ConfigError, match=r"this worker has no KV connector"):
            async with AsyncLLM("dummy", executor=executor, kv_connector=Offload()):
                raise AssertionError("it opened")


async def test_a_connector_of_your_own_is_two_classes():
    """Here one that counts what it is told, and keeps nothing."""
    ended: list[str] = []

    class Counting(OffloadConnector):
        def request_finished(self, request_id):
            ended.append(request_id)

        def match(self, hashes):
            return 0

    @dataclass(frozen=True, slots=True, kw_only=True)
    class Own(Offload):
        scheduler_side: ClassVar[Any] = Counting

    async with AsyncLLM("dummy", **SMALL, kv_connector=Own()) as llm:
        await llm.complete(PROMPTS[0], GREEDY, request_id="mine")
        assert ended == ["mine"]
