"""Structured output through the whole engine, with the dummy model: its byte vocabulary says what the grammar lets it."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import time
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import anyio
import jsonschema
import pytest

from aexec import AsyncLLM, InvalidRequest, SamplingParams, StructuredOutput
from aexec.config import Restart, StructuredOutputConfig
from aexec.errors import RequestFailed

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(120)]

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "maxItems": 2},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
JSON = StructuredOutput(json_schema=SCHEMA)
LAYOUTS = {
    "uni": {},
    "no overlap": {"async_scheduling": False},
    "chunked": {"max_num_batched_tokens": 8},
    "preempted": {"num_blocks": 16, "block_size": 8},
    "mp TP 2": {"executor": "mp", "tensor_parallel_size": 2},
    "mp PP 2": {"executor": "mp", "pipeline_parallel_size": 2},
}
#: A schema of a few kilobytes that its library compiles for minutes, and a grammar that crashes it.
HANGS = StructuredOutput(
    json_schema={"allOf": [{"type": "string", "pattern": f"[a-c]{{{number}}}d"} for number in range(1, 300)]}
)
CRASHES = StructuredOutput(
    grammar="start: r0\n"
    + "\n".join(f"r{number}: r{number + 1} r{number + 1}" for number in range(12000))
    + '\nr12000: "a" | '
)
BOMB = StructuredOutput(regex="(" * 50 + "a" + "{1,30})" * 50)


@pytest.fixture
def anyio_backend():
    """The engine is asyncio's."""
    return "asyncio"


def params(number, structured=None, **settings):
    """Greedy and seeded requests in turns."""
    how = {"temperature": 0.0} if number % 2 else {"seed": number}
    return SamplingParams(**{"max_tokens": 64, "structured": structured} | how | settings)


async def sixteen(llm):
    """Eight plain requests and eight with a schema, at once."""
    wishes = [
        (f"request {number} " * (1 + number % 3), params(number, JSON if number >= 8 else None)) for number in range(16)
    ]
    return await asyncio.gather(*(llm.complete(prompt, sampling) for prompt, sampling in wishes))


@pytest.fixture(scope="module")
def expected():
    """What the plain ones say alone, and all of them one by one."""

    async def run():
        async with AsyncLLM("dummy", async_scheduling=False, max_num_seqs=1) as llm:
            return [each.token_ids for each in await sixteen(llm)]

    return asyncio.run(run())


@pytest.mark.parametrize("layout", LAYOUTS)
async def test_constrained_outputs_validate_and_plain_ones_are_unchanged(layout, expected):
    """The same tokens on every executor, in any batch, overlapped, in chunks, and after preemptions."""
    async with AsyncLLM("dummy", **LAYOUTS[layout]) as llm:
        outputs = await sixteen(llm)
        preemptions = (await llm.statistics()).scheduler.num_preemptions
    assert [each.token_ids for each in outputs] == expected
    assert (preemptions > 0) == (layout == "preempted")
    for each in outputs[8:]:
        assert each.finish_reason == "stop"
        jsonschema.validate(json.loads(each.text), SCHEMA)
    assert all(each.finish_reason == "length" for each in outputs[:8])


@pytest.mark.parametrize(
    ("wish", "pattern"),
    [
        (StructuredOutput(regex="[a-f]{4}-[0-9]{2}"), "[a-f]{4}-[0-9]{2}"),
        (StructuredOutput(choice=("yes", "no", "perhaps")), "yes|no|perhaps"),
        (
            StructuredOutput(grammar='start: pair ("," pair)~2\npair: /[a-z]/ "=" /[0-9]/'),
            "[a-z]=[0-9](,[a-z]=[0-9]){2}",
        ),
        (StructuredOutput(json_schema='{"type": "integer", "minimum": 10, "maximum": 99}'), "[0-9]{2}"),
    ],
)
async def test_each_kind_of_grammar_is_kept(wish, pattern):
    """The output ends by itself where nothing can follow, even if end tokens are ignored."""
    async with AsyncLLM("dummy") as llm:
        for settings in ({}, {"ignore_eos": True}, {"min_tokens": 20}):
            output = await llm.complete("go", params(1, wish, **settings))
            assert re.fullmatch(pattern, output.text)
            assert (output.finish_reason, output.stop_reason) == ("stop", None)


async def test_an_end_token_may_come_where_the_text_may_end():
    """And nowhere before; ``min_tokens`` forbids it for longer."""
    async with AsyncLLM("dummy:eos_probability=1.0") as llm:
        output = await llm.complete("go", params(1, StructuredOutput(regex="ab+")))
        assert (output.text, output.stop_reason) == ("ab", 256)
        output = await llm.complete("go", params(1, StructuredOutput(regex="ab+"), min_tokens=5))
        assert output.text == "abbbb"
        output = await llm.complete("go", params(1, StructuredOutput(regex="ab+"), ignore_eos=True, max_tokens=9))
        assert (output.text, output.finish_reason) == ("abbbbbbbb", "length")


async def test_samples_of_one_prompt_each_have_their_way():
    """``n``: one grammar, and every sample validates."""
    async with AsyncLLM("dummy") as llm:
        output = await llm.complete("go", SamplingParams(max_tokens=64, seed=3, n=4, structured=JSON))
        texts = [each.text for each in output.samples]
        assert len(set(texts)) > 1
        for text in texts:
            jsonschema.validate(json.loads(text), SCHEMA)


async def test_a_stop_text_ends_a_constrained_request_too():
    """Whichever comes first."""
    async with AsyncLLM("dummy") as llm:
        output = await llm.complete("go", params(1, StructuredOutput(regex="abcdef"), stop=("d",)))
        assert (output.text, output.stop_reason) == ("abc", "d")


@pytest.mark.parametrize(
    ("wish", "error", "message"),
    [
        (StructuredOutput(regex="((("), InvalidRequest, "unclosed group"),
        (StructuredOutput(json_schema={"type": "strnig"}), InvalidRequest, "Invalid type: strnig"),
        (StructuredOutput(json_schema={"type": "string", "minLength": 5, "maxLength": 2}), InvalidRequest, "minLength"),
        (StructuredOutput(json_schema="[]"), InvalidRequest, "it is a JSON list: expected an object"),
        (
            StructuredOutput(json_schema='{"a": ' + '"' + "x" * 10_000_000 + '"}'),
            InvalidRequest,
            "has 10,000,00. charac",
        ),
        (StructuredOutput(json_schema={"enum": ["x" * 1000] * 10_000}), InvalidRequest, "more than 1,048,576 bytes"),
        (StructuredOutput(regex="a", backend="nobody"), InvalidRequest, "expected one of llguidance"),
        (HANGS, InvalidRequest, r"it did not compile within 0\.8 s"),
        (CRASHES, InvalidRequest, "it crashed its compiler"),
        (BOMB, (InvalidRequest, RequestFailed), "too many|too complex|compile within"),
    ],
    ids=["regex", "type", "impossible", "list", "10 MB text", "10 MB mapping", "backend", "hangs", "crashes", "bomb"],
)
async def test_a_grammar_that_cannot_be_fails_its_request_alone(wish, error, message):
    """Within its limit, with the reason; other requests go on, the loop is free, and nothing burns on."""
    before = set(children())
    async with AsyncLLM("dummy", structured_output=StructuredOutputConfig(compile_timeout=0.8)) as llm:
        neighbour = asyncio.ensure_future(llm.complete("go", params(1, max_tokens=200)))
        gaps = []
        while len(gaps) < 3 and min(gaps, default=0.5) >= 0.5:  # a machine that stands still stops the loop once
            async with largest_gap(gaps):
                began = time.monotonic()
                with pytest.raises(error, match=message):
                    await llm.complete("go", params(1, wish))
                assert time.monotonic() - began < 15
        assert min(gaps) < 0.5
        with anyio.fail_after(20):
            assert len((await neighbour).token_ids) == 200
            assert (await llm.complete("go", params(1, StructuredOutput(choice=("ok",))))).text == "ok"
        with anyio.fail_after(10):
            while not all(map(is_idle, set(children()) - before)):  # noqa: ASYNC110 - processes send no events
                await asyncio.sleep(0.01)
    assert set(children()) <= before


@asynccontextmanager
async def largest_gap(gaps):
    """Adds the seconds between two turns of the loop, at most, while the block runs."""
    largest = 0.0

    async def tick():
        nonlocal largest
        last = time.monotonic()
        while True:
            await asyncio.sleep(0.005)
            now = time.monotonic()
            largest, last = max(largest, now - last - 0.005), now

    ticker = asyncio.ensure_future(tick())
    try:
        yield
    finally:
        ticker.cancel()
    gaps.append(largest)


def children():
    """Pids of this process's children; a thread that ends meanwhile has none."""
    found: list[int] = []
    for task in Path("/proc/self/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):
            found += map(int, (task / "children").read_text().split())
    return found


def is_idle(pid):
    """It sleeps, until its next grammar, or it has ended meanwhile."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "S"
    except (FileNotFoundError, ProcessLookupError):
        return True


async def test_a_request_that_waits_for_its_grammar_holds_up_nobody():
    """Plain requests behind it are through before it has been refused; and it may be aborted meanwhile."""
    async with AsyncLLM("dummy", max_num_seqs=1, structured_output=StructuredOutputConfig(compile_timeout=30)) as llm:
        waiting = asyncio.ensure_future(llm.complete("go", params(1, HANGS), request_id="slow"))
        await asyncio.sleep(0)
        with anyio.fail_after(20):
            for _ in range(3):
                await llm.complete("go", params(1))
            assert (await llm.statistics()).scheduler.num_waiting == 1
            assert await llm.abort("slow")
            assert (await waiting).finish_reason == "abort"


async def test_steps_without_a_constrained_request_have_no_bitmask(monkeypatch):
    """Only those that sample one: chunks of its prompt have none either."""
    from aexec.model.dummy.runner import DummyRunner

    seen: list[list[str] | None] = []
    sample = DummyRunner.sample_tokens

    def watched(self, grammar):
        seen.append(None if grammar is None else list(grammar.request_ids))
        return sample(self, grammar)

    monkeypatch.setattr(DummyRunner, "sample_tokens", watched)
    async with AsyncLLM("dummy", max_num_batched_tokens=8, async_scheduling=False) as llm:
        await llm.complete("x" * 30, params(1, StructuredOutput(regex="ab"), max_tokens=5), request_id="a")
    assert seen == [None, None, None, ["a"], ["a"]]


async def test_a_crash_of_a_worker_changes_no_token():
    """The grammars are the engine's: after a restart each goes on from the tokens that its request has."""
    wishes = [params(number, JSON, max_tokens=64) for number in range(4)]

    async def run(*, crashes):
        settings = {
            "executor": "mp",
            "tensor_parallel_size": 2,
            "on_failure": Restart(max_restarts=5, within=60.0, backoff=0.0),
        }
        async with AsyncLLM("dummy:forward_seconds=0.004", **settings) as llm:
            streams = [llm.generate(f"person {number}", wish) for number, wish in enumerate(wishes)]
            tokens = [list((await anext(stream)).token_ids) for stream in streams]
            for rank in crashes:
                os.kill(llm.executor.ranks[rank].pid, signal.SIGKILL)
            await asyncio.gather(*(rest_of(stream, into) for stream, into in zip(streams, tokens, strict=True)))
            return tokens, llm.tokenizer

    calm, tokenizer = await run(crashes=())
    crashed, _ = await run(crashes=(1,))
    assert crashed == calm
    for tokens in calm:
        jsonschema.validate(json.loads(tokenizer.decode(tokens)), SCHEMA)


async def rest_of(stream, tokens):
    """Read it to its end."""
    async for chunk in stream:
        tokens += chunk.token_ids
