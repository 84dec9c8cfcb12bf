"""``AsyncLLM``: opening, asking, leaving, closing."""

from __future__ import annotations

import asyncio
import gc
import threading

import anyio
import anyio.lowlevel
import anyio.to_thread
import pytest
import trio

from aexec.config import ExecutorConfig, ParallelConfig, Restart
from aexec.engine.assembly import ModelText
from aexec.errors import ConfigError, ExecutorClosed, InvalidRequest
from aexec.messages.request import SamplingParams

pytestmark = pytest.mark.anyio

GREEDY = SamplingParams(max_tokens=12, temperature=0.0)
LONG = SamplingParams(max_tokens=1500, temperature=0.0)


# ---------------------------------------------------------------- streams


async def test_chunks_add_up_to_the_whole_answer(engine):
    """Deltas, a finish in the last one only, and counts that grow."""
    async with engine() as (llm, _):
        whole = await llm.complete("Hello", GREEDY)
        chunks = [chunk async for chunk in llm.generate("Hello", GREEDY)]
        assert "".join(chunk.text for chunk in chunks) == whole.text
        assert tuple(token for chunk in chunks for token in chunk.token_ids) == whole.token_ids
        assert [chunk.finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["length"]
        assert chunks[-1].num_completion_tokens == whole.num_completion_tokens == 12
        assert {chunk.num_prompt_tokens for chunk in chunks} == {5}


async def test_a_slow_reader_gets_fewer_and_larger_chunks_and_holds_up_nobody(engine):
    """While it does not read, its tokens are merged; the request runs to its end meanwhile."""
    async with engine() as (llm, _):
        slow = llm.generate("slow", GREEDY)
        first = await anext(slow)
        await llm.complete("other", SamplingParams(max_tokens=40, temperature=0.0))
        assert (await llm.statistics()).num_running == 0
        rest = [chunk async for chunk in slow]
        assert len(rest) == 1
        assert first.token_ids + rest[0].token_ids == (await llm.complete("slow", GREEDY)).token_ids


async def leave_by_break(stream):
    async for _ in stream:
        break


async def leave_by_aclose(stream):
    await anext(stream)
    await stream.aclose()


async def leave_by_block(stream):
    async with stream as chunks:
        await anext(chunks)


async def leave_by_cancellation(stream):
    async def read():
        async for _ in stream:
            pass

    reader = asyncio.create_task(read())
    await anyio.wait_all_tasks_blocked()
    reader.cancel()
    await asyncio.wait([reader])
    assert reader.cancelled()


async def leave_by_timeout(stream):
    await anext(stream)
    with anyio.move_on_after(0):
        await anext(stream)


@pytest.mark.parametrize(
    "leave", [leave_by_break, leave_by_aclose, leave_by_block, leave_by_cancellation, leave_by_timeout]
)
async def test_leaving_a_stream_aborts_its_request_and_frees_its_blocks(engine, leave):
    """By whatever way: nothing runs on for nobody."""
    async with engine() as (llm, executor):
        executor.hold()
        leaving = asyncio.create_task(leave(llm.generate("Hello", LONG)))
        await executor.held.wait()
        if leave is not leave_by_cancellation:
            executor.release()
        await leaving
        gc.collect()
        await anyio.wait_all_tasks_blocked()
        statistics = await llm.statistics()
        assert (statistics.num_running, statistics.blocks.num_holders) == (0, 0)
        assert len(executor.steps) < 20
        executor.release()


async def test_a_left_stream_is_over(engine):
    """It gives nothing more, and may be closed again."""
    async with engine() as (llm, _):
        stream = llm.generate("Hello", LONG)
        await anext(stream)
        await stream.aclose()
        await stream.aclose()
        with pytest.raises(StopAsyncIteration):
            await anext(stream)
        assert repr(stream) == "<Generation request-1: over>"


async def test_a_stream_that_was_never_read_is_no_request(engine):
    """Nothing runs before the first ``anext``."""
    async with engine() as (llm, executor):
        stream = llm.generate("Hello", LONG)
        assert repr(stream) == "<Generation request-1: not begun>"
        await stream.aclose()
        assert executor.steps == []


async def test_cancelling_one_of_eight_leaves_seven_as_they_are(engine):
    """Their tokens are those that each has alone."""
    async with engine() as (llm, _):
        prompts = [f"prompt {number}" for number in range(8)]
        alone = [(await llm.complete(prompt, GREEDY)).token_ids for prompt in prompts]
        readers = [asyncio.create_task(llm.complete(prompt, GREEDY)) for prompt in prompts]
        await anyio.lowlevel.checkpoint()
        readers[3].cancel()
        results = await asyncio.gather(*readers, return_exceptions=True)
        assert isinstance(results.pop(3), asyncio.CancelledError)
        del alone[3]
        assert [result.token_ids for result in results] == alone


async def test_256_requests_run_at_once(engine):
    """All of them are in one step, and each gets its own tokens."""
    async with engine() as (llm, executor):
        params = SamplingParams(max_tokens=6, temperature=0.0)
        results = await asyncio.gather(
            *(llm.complete([65, number % 256, number // 256], params) for number in range(300))
        )
        assert max(len(step.payload.num_scheduled_tokens) for step in executor.steps) == 256
        assert [len(result.token_ids) for result in results] == [6] * 300
        assert results[7].token_ids == (await llm.complete([65, 7, 0], params)).token_ids


@pytest.mark.parametrize("params", [GREEDY, SamplingParams(max_tokens=12, temperature=1.0, seed=7)])
async def test_preemption_changes_no_token(engine, params):
    """With few blocks requests give way and start over; what they say is the same."""
    prompts = [[65 + number] * 9 for number in range(6)]
    async with engine() as (llm, _):
        roomy = [result.token_ids for result in await asyncio.gather(*(llm.complete(p, params) for p in prompts))]
    async with engine(num_blocks=10, block_size=4) as (llm, _):
        tight = [result.token_ids for result in await asyncio.gather(*(llm.complete(p, params) for p in prompts))]
        statistics = await llm.statistics()
        assert statistics.num_preemptions > 0
        assert statistics.blocks.num_free_blocks == 9
    assert tight == roomy


async def test_a_seed_decides_the_tokens_and_none_draws_one(engine):
    """The engine's own seed makes the draws repeatable."""
    sampled = SamplingParams(max_tokens=12)
    drawn = []
    for _ in range(2):
        async with engine(seed=3) as (llm, _):
            drawn.append([(await llm.complete("a", sampled)).token_ids for _ in range(2)])
    assert drawn[0] == drawn[1]
    assert drawn[0][0] != drawn[0][1]


# ---------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        ("", "the prompt is an empty text"),
        ([], "the prompt of request request-1 is empty"),
        (b"bytes", "the prompt is b'bytes': expected text or a sequence of token ids"),
        (None, "the prompt is None: expected text"),
        ({1: 2}, "the prompt is {1: 2}: expected text"),
        (["Hello"], r"prompt\[0\] is 'Hello': expected a token id from 0 to 511"),
        ([512], r"prompt\[0\] is 512: expected a token id from 0 to 511"),
        ("a\ud800", "is no Unicode text"),
        ([65] * 2048, "has 2048 tokens and the context holds 2048: expected at most 2047"),
        ("x" * 5000, "has 5000 tokens and the context holds 2048"),
    ],
)
async def test_a_bad_prompt_is_refused_at_the_first_chunk_and_others_go_on(engine, prompt, words):
    """The error names the value, what is expected, and disturbs nobody."""
    async with engine() as (llm, _):
        good = asyncio.create_task(llm.complete("good", GREEDY))
        with pytest.raises(InvalidRequest, match=words):
            await anext(llm.generate(prompt, GREEDY, request_id="request-1"))
        assert len((await good).token_ids) == 12


async def test_sampling_has_to_be_sampling_params(engine):
    """A dictionary is refused at once, with what it should have been."""
    async with engine() as (llm, _):
        with pytest.raises(InvalidRequest, match=r"sampling is \{'max_tokens': 4\}: expected SamplingParams"):
            llm.generate("a", {"max_tokens": 4})


async def test_a_request_that_can_never_fit_the_cache_is_refused(engine):
    """With the remedy, while others run."""
    async with engine(num_blocks=4, block_size=4) as (llm, _):
        with pytest.raises(InvalidRequest, match="may grow to 21 tokens and the KV cache holds 12"):
            await llm.complete([65] * 9, GREEDY)
        assert (await llm.complete([65] * 9, SamplingParams(max_tokens=None))).num_completion_tokens == 4


async def test_a_model_without_a_tokenizer_takes_token_ids_only(engine, engine_class):
    """Text, stop texts and conversations are refused; the text of its answers is empty."""
    engine_class.assembly.text = ModelText(None, (256,))
    async with engine() as (llm, _):
        answer = await llm.complete([65, 66], GREEDY)
        assert (answer.text, len(answer.token_ids)) == ("", 12)
        with pytest.raises(InvalidRequest, match=r"the prompt is the text 'Hello'.*no tokenizer.json: pass token ids"):
            await llm.complete("Hello", GREEDY)
        with pytest.raises(InvalidRequest, match="stop texts need a tokenizer"):
            await llm.complete([65], SamplingParams(stop=("x",)))
        with pytest.raises(InvalidRequest, match=r"has no tokenizer\.json"):
            llm.chat_prompt([{"role": "user", "content": "x"}])


async def test_a_long_text_becomes_tokens_off_the_loop(engine, engine_class):
    """The loop goes on while a thread works on it."""
    threads = []

    class Watched(type(engine_class.assembly.text.tokenizer)):
        def encode(self, text):
            threads.append(threading.current_thread())
            return super().encode(text)

    engine_class.assembly.text = ModelText(Watched(), (256,))
    async with engine("dummy:max_model_len=9000") as (llm, _):
        for text in ("short", "x" * 5000):
            await llm.complete(text, SamplingParams(max_tokens=1))
    assert [thread is threading.main_thread() for thread in threads] == [True, False]


# ---------------------------------------------------------------- opening and closing


async def test_opening_and_closing_may_happen_in_different_tasks(engine_class):
    """As in a server's lifespan, or in two notebook cells; both may be said twice."""
    llm = engine_class("dummy")
    assert repr(llm) == "<Engine 'dummy': closed>"
    await asyncio.create_task(llm.open())
    assert await llm.open() is llm
    assert llm.is_open
    assert (await llm.complete("a", GREEDY)).finish_reason == "length"
    await asyncio.create_task(llm.aclose())
    await llm.aclose()
    (executor,) = engine_class.assembly.opened
    assert executor.is_closed


async def test_a_closed_engine_says_how_to_open_it(engine_class):
    """Before it is opened, and after it was closed."""
    llm = engine_class("dummy")
    with pytest.raises(ExecutorClosed, match=r"Engine\('dummy'\) is not open: use `async with`"):
        llm.generate("a")
    async with llm:
        pass
    with pytest.raises(ExecutorClosed):
        _ = llm.executor
    async with llm:
        assert len((await llm.complete("a", GREEDY)).token_ids) == 12


async def test_an_executor_that_was_given_stays_open(engine_class, fake_executor):
    """Whoever opened it closes it."""
    executor = fake_executor()
    async with engine_class("dummy", executor=executor) as llm:
        assert llm.executor is executor
    assert not executor.is_closed


async def test_an_executor_that_was_given_is_told_to_forget_though_its_last_step_failed(engine_class, fake_executor):
    """Whoever uses it next may use the same ids."""
    executor = fake_executor()
    async with engine_class("dummy", executor=executor) as llm:
        executor.hold()
        reader = asyncio.create_task(llm.complete("a", GREEDY, request_id="mine"))
        await executor.held.wait()
        executor.fail_sample = ConfigError("this step failed")
        executor._gate = anyio.Event()
        executor._gate.set()
    await asyncio.gather(reader, return_exceptions=True)
    assert executor.steps[-1].payload.finished_request_ids == ["mine"]


async def test_a_failed_start_closes_what_was_opened(engine_class, fake_executor):
    """An executor whose workers hold no model is closed again, and the error is theirs."""

    async def open_executor(config, progress):
        executor = fake_executor()
        executor.collective_rpc = None
        engine_class.assembly.opened.append(executor)
        return executor

    engine_class.assembly.open_executor = open_executor
    llm = engine_class("dummy")
    with pytest.raises(TypeError):
        await llm.open()
    assert [executor.is_closed for executor in engine_class.assembly.opened] == [True]
    assert not llm.is_open


async def test_cancelling_the_opening_ends_what_its_thread_does(engine_class):
    """A conversion of minutes stops at its next report, and the engine can be opened again."""
    begun, ended = threading.Event(), threading.Event()

    def convert(model, progress):
        try:
            while True:
                progress("convert", 0, 1)
                begun.set()
        finally:
            ended.set()

    load, engine_class.assembly.load_text = engine_class.assembly.load_text, convert
    llm = engine_class("dummy")
    opening = asyncio.create_task(llm.open())
    assert await anyio.to_thread.run_sync(begun.wait, 10)
    opening.cancel()
    await asyncio.wait([opening])
    assert opening.cancelled()
    assert await anyio.to_thread.run_sync(ended.wait, 10)
    engine_class.assembly.load_text = load
    async with llm:
        assert llm.is_open


async def test_opening_tells_how_far_it_is(engine_class):
    """On the loop, also what a thread reports."""
    told = []
    async with engine_class("dummy", progress=lambda *facts: told.append(facts)):
        await anyio.lowlevel.checkpoint()
    assert told == [("text", 1, 1), ("workers", 1, 1)]


async def test_settings_reach_the_executor(engine_class):
    """The layout, what happens on failure, and what a worker is constructed with."""
    llm = engine_class("dummy", executor="mp", tensor_parallel_size=2, block_size=8, on_failure=Restart())
    async with llm:
        pass
    (config,) = engine_class.assembly.configs
    assert (config.backend, config.parallel, config.on_failure) == ("mp", ParallelConfig(2), Restart())
    assert (config.worker_kwargs["model"].model, config.worker_kwargs["cache"].block_size) == ("dummy", 8)


async def test_an_executor_config_keeps_its_own_worker_arguments(engine_class):
    """The engine adds its own to them."""
    config = ExecutorConfig(backend="uni", worker_kwargs={"extra": 1})
    async with engine_class("dummy", executor=config):
        pass
    assert set(engine_class.assembly.configs[0].worker_kwargs) == {"model", "cache", "extra"}


@pytest.mark.parametrize(
    "given",
    [
        {"executor": ExecutorConfig(backend="mp", parallel=ParallelConfig(2), on_failure=Restart())},
        {"executor": ExecutorConfig(backend="mp"), "tensor_parallel_size": 2, "on_failure": Restart()},
        {
            "executor": ExecutorConfig(backend="mp", parallel=ParallelConfig(2), on_failure=Restart()),
            "tensor_parallel_size": 2,
            "on_failure": Restart(),
        },
    ],
    ids=["in the config", "beside the config", "in both alike"],
)
async def test_the_layout_is_the_engines_or_its_executor_configs(engine_class, given):
    """So is what happens on failure: whichever of the two says something."""
    async with engine_class("dummy", **given):
        pass
    (config,) = engine_class.assembly.configs
    assert (config.backend, config.parallel, config.on_failure) == ("mp", ParallelConfig(2), Restart())


@pytest.mark.parametrize(
    ("config", "beside", "said"),
    [
        (
            {"parallel": ParallelConfig(4)},
            {"tensor_parallel_size": 2},
            r"parallel is ParallelConfig\(.*=4, .* beside it",
        ),
        ({"on_failure": Restart(1)}, {"on_failure": Restart(2)}, "on_failure is Restart.*: leave one of them out"),
    ],
)
def test_an_engine_and_its_executor_config_do_not_contradict_each_other(engine_class, config, beside, said):
    """Two layouts are refused, and so are two ways to fail."""
    with pytest.raises(ConfigError, match=said):
        engine_class("dummy", executor=ExecutorConfig(**config), **beside)


async def test_an_open_executor_has_its_layout_already(engine):
    """Another one beside it is refused."""
    async with engine() as (llm, executor):
        with pytest.raises(ConfigError, match="beside an open executor, which has its own"):
            type(llm)("dummy", executor=executor, tensor_parallel_size=2)


async def test_an_executor_that_was_not_awaited_is_refused(engine_class):
    """The error says what is missing."""
    with pytest.raises(ConfigError, match="await open_executor"):
        engine_class("dummy", executor=object())


async def test_facts_about_the_model_and_the_engine_can_be_read(engine):
    """``model_info``, ``tokenizer``, ``statistics`` and the repr."""
    async with engine(num_blocks=16) as (llm, executor):
        assert (llm.model_info.vocab_size, llm.model_info.num_blocks) == (512, 16)
        assert llm.chat_prompt([{"role": "user", "content": "x"}]) == "user: x\nassistant:"
        await llm.complete("Hello", GREEDY)
        statistics = await llm.statistics()
        assert (statistics.num_finished, statistics.num_steps, statistics.num_scheduled_tokens) == (1, 12, 16)
        assert llm.async_scheduling == (False, "async_scheduling=False")
        assert (
            repr(llm) == f"<Engine 'dummy': open on {executor!r}, async scheduling off: {llm.async_scheduling.reason}>"
        )


async def test_a_model_may_be_a_path(engine_class, tmp_path):
    """One of pathlib's stands for its text."""
    assert engine_class(tmp_path).model.model == str(tmp_path)


def test_an_engine_says_that_it_runs_on_asyncio(engine_class):
    """As executors do; actors alone run on trio too."""
    with pytest.raises(ConfigError, match="engines run on asyncio, uvloop included"):
        trio.run(engine_class("dummy").open)
