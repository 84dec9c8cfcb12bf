"""The hand-off merges what is not taken, keeps order, and ends once."""

from __future__ import annotations

import asyncio

import anyio
import pytest

from aexec.engine.completion import collect
from aexec.engine.generation import Generation
from aexec.engine.stream import SampleStreams, TokenStream
from aexec.errors import RequestFailed, WrongLoop
from aexec.messages.request import SamplingParams, TokenLogprobs

pytestmark = pytest.mark.anyio


async def test_a_slow_reader_gets_all_that_waits_as_one_chunk():
    """Text, tokens and log-probabilities are merged, and counted."""
    stream = TokenStream("a", num_prompt_tokens=3)
    entries = [TokenLogprobs(token, -0.5, 1, {}) for token in (7, 8)]
    stream.put("one ", [7], entries[:1], prompt_logprobs=(None,))
    stream.put("two", [8], entries[1:])
    chunk = await stream.get()
    assert (chunk.text, chunk.token_ids, chunk.logprobs) == ("one two", (7, 8), tuple(entries))
    assert (chunk.prompt_logprobs, chunk.finish_reason) == ((None,), None)
    assert (chunk.num_prompt_tokens, chunk.num_completion_tokens) == (3, 2)
    stream.put("", [9])
    stream.finish("stop", 9)
    chunk = await stream.get()
    assert (chunk.token_ids, chunk.logprobs, chunk.prompt_logprobs) == ((9,), None, None)
    assert (chunk.finish_reason, chunk.stop_reason, chunk.num_completion_tokens) == ("stop", 9, 3)


async def test_a_reader_waits_until_something_is_new():
    """``get`` returns with the first token that is put."""
    stream = TokenStream("a", 1)
    reader = asyncio.create_task(stream.get())
    await anyio.wait_all_tasks_blocked()
    assert not reader.done()
    stream.put("x", [1])
    assert (await reader).text == "x"


async def test_an_error_comes_after_what_was_put():
    """The reader loses no token to a failure."""
    stream = TokenStream("a", 1)
    stream.put("x", [1])
    stream.fail(RequestFailed("broken"))
    assert (await stream.get()).text == "x"
    for _ in range(2):
        with pytest.raises(RequestFailed, match="broken"):
            await stream.get()


async def test_a_waiting_reader_learns_of_a_failure_at_once():
    """Nothing was put, and nothing will be."""
    stream = TokenStream("a", 1)
    reader = asyncio.create_task(stream.get())
    await anyio.wait_all_tasks_blocked()
    stream.fail(RequestFailed("broken"))
    with pytest.raises(RequestFailed):
        await reader


@pytest.mark.parametrize("samples", [1, 2])
async def test_a_second_reader_of_a_request_leaves_it_to_the_first(engine, samples):
    """It is refused, and the request goes on to its end."""
    async with engine() as (llm, executor):
        executor.hold()
        stream = llm.generate("a", SamplingParams(max_tokens=3, n=samples), request_id="a")
        first = asyncio.create_task(collect(stream))
        await executor.held.wait()
        with (
            anyio.fail_after(5),
            pytest.raises(anyio.BusyResourceError, match="already reading the stream of request a from"),
        ):
            await anext(stream)
        executor.release()
        assert len((await first).token_ids) == 3


class SlowDriver:
    """Turns a prompt into tokens once it may, and answers it at once."""

    def __init__(self):
        self.may_go = anyio.Event()
        self.submitted = []

    async def encode(self, prompt):
        await self.may_go.wait()
        return (1,)

    async def submit(self, prompt, sampling, options, streams):
        self.submitted.append(streams)
        streams[0].put("x", [1])
        streams[0].finish("length")


async def test_a_second_reader_is_refused_while_the_prompt_is_still_being_encoded():
    """It does not send the request a second time."""
    driver = SlowDriver()
    stream = Generation(driver, "a", "x" * 5000, SamplingParams())
    first = asyncio.create_task(anext(stream))
    await anyio.wait_all_tasks_blocked()
    with anyio.fail_after(5), pytest.raises(anyio.BusyResourceError, match="already reading the stream of request a"):
        await anext(stream)
    driver.may_go.set()
    assert (await first).text == "x"
    assert len(driver.submitted) == 1


async def test_a_request_that_is_left_while_its_prompt_is_encoded_never_begins():
    """Nobody would read it."""
    driver = SlowDriver()
    stream = Generation(driver, "a", "x" * 5000, SamplingParams())
    first = asyncio.create_task(anext(stream))
    await anyio.wait_all_tasks_blocked()
    await stream.aclose()
    driver.may_go.set()
    with pytest.raises(StopAsyncIteration):
        await first
    assert driver.submitted == []


@pytest.mark.parametrize("samples", [1, 2])
@pytest.mark.parametrize("has_begun", [True, False])
async def test_a_reader_on_another_loop_is_refused_and_the_request_goes_on(engine, has_begun, samples):
    """Nobody would wake it there; on the engine's own loop the request can still be read."""
    async with engine() as (llm, executor):
        stream = llm.generate("a", SamplingParams(max_tokens=3, n=samples), request_id="a")
        chunks = [await anext(stream)] if has_begun else []
        executor.hold()

        async def read() -> None:
            await anext(stream)

        with pytest.raises(WrongLoop, match="actor system engine belongs to"):
            await asyncio.to_thread(asyncio.run, read())
        executor.release()
        chunks += [chunk async for chunk in stream]
        assert sum(len(chunk.token_ids) for chunk in chunks) == 3 * samples


async def test_a_cancelled_wait_takes_nothing():
    """Whoever reads next gets the token."""
    stream = TokenStream("a", 1)
    with anyio.move_on_after(0):
        await stream.get()
    stream.put("x", [1])
    assert (await stream.get()).text == "x"


async def test_a_stream_prints_how_far_it_is():
    """The repr tells what was taken, what waits and how it ended."""
    stream = TokenStream("a", 1)
    stream.put("x", [1, 2])
    await stream.get()
    stream.put("y", [3])
    assert repr(stream) == "<TokenStream a: 2 tokens taken, 1 wait>"
    stream.finish("length")
    assert repr(stream) == "<TokenStream a: 2 tokens taken, 1 wait, finished: length>"


# ---------------------------------------------------------------- samples


def sample_streams(number=3):
    streams = SampleStreams(tuple(TokenStream("a", 1, index) for index in range(number)))
    return streams, streams.streams


async def test_samples_are_read_in_turn():
    """One that always has news does not hold up the others."""
    both, (first, second, _) = sample_streams()
    first.put("a", [1])
    second.put("b", [2])
    assert (await both.get()).index == 0
    first.put("c", [3])
    assert [(await both.get()).index for _ in range(2)] == [1, 0]
    assert repr(both) == "<SampleStreams a: 3 of 3 samples go on>"


async def test_a_reader_of_samples_waits_for_any_of_them():
    """Whichever comes first."""
    both, (_, second, _) = sample_streams()
    reader = asyncio.create_task(both.get())
    await anyio.wait_all_tasks_blocked()
    second.put("b", [2])
    assert (await reader).text == "b"


async def test_samples_are_over_when_the_last_one_is_taken():
    """Each end is a chunk."""
    both, streams = sample_streams(2)
    for stream in streams:
        assert not both.is_taken
        stream.finish("length")
        assert (await both.get()).finish_reason == "length"
    assert both.is_ended
    assert both.is_taken


async def test_an_error_of_one_sample_is_raised_after_what_came_before_it():
    """What was put is not lost."""
    both, (first, second, _) = sample_streams()
    second.put("b", [2])
    second.fail(RuntimeError("broken"))
    first.put("a", [1])
    assert [(await both.get()).text for _ in range(2)] == ["a", "b"]
    with pytest.raises(RuntimeError, match="broken"):
        await both.get()
