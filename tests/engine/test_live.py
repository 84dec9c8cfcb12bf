"""From what a step brought to the readers' streams, without an executor."""

from __future__ import annotations

import anyio
import pytest

from aexec.config import SchedulerConfig
from aexec.engine.blocks import BlockPool
from aexec.engine.bytes_text import ByteTokenizer
from aexec.engine.live import LiveStreams
from aexec.engine.request import Request, RequestStatus
from aexec.engine.scheduler import Scheduler
from aexec.engine.stream import TokenStream
from aexec.errors import RequestFailed
from aexec.messages.batch import ModelRunnerOutput
from aexec.messages.request import SamplingParams, TokenLogprobs

pytestmark = pytest.mark.anyio


class Engine:
    """A scheduler and the streams of its requests; a test says what is sampled."""

    def __init__(self, tokenizer=None):
        self.scheduler = Scheduler(SchedulerConfig(), BlockPool(64, 4), lambda: 1)
        self.live = LiveStreams(self.scheduler, tokenizer or ByteTokenizer())

    def begin(self, name, num_prompt=3, max_tokens=8, **sampling):
        params = SamplingParams(**({"max_tokens": max_tokens, "temperature": 0.0} | sampling))
        request = Request(name, [65] * num_prompt, num_prompt, params, frozenset([0]), num_prompt + max_tokens)
        stream = TokenStream(name, num_prompt)
        self.scheduler.add(request)
        self.live.follow(request, stream)
        return stream

    def step(self, **tokens):
        """One step, in which these are sampled; an exception stands for an error of its request."""
        batch = self.scheduler.schedule()
        good = {name: [ord(token)] for name, token in tokens.items() if isinstance(token, str)}
        errors = {name: str(token) for name, token in tokens.items() if isinstance(token, Exception)}
        output = ModelRunnerOutput(request_ids=list(good), sampled_token_ids=list(good.values()), errors=errors)
        return self.live.read(self.scheduler.update(batch, output))

    def hand_out(self, deltas):
        for delta in deltas:
            self.live.hand_out(delta)


async def test_tokens_go_to_their_own_streams():
    """As text and as ids, when they are handed out and not before."""
    engine = Engine()
    first, second = engine.begin("a"), engine.begin("b")
    deltas = engine.step(a="x", b="y")
    assert not first._pending
    engine.hand_out(deltas)
    assert [(chunk.text, chunk.token_ids) for chunk in (await first.get(), await second.get())] == [
        ("x", (120,)),
        ("y", (121,)),
    ]
    assert (len(engine.live), engine.live.request_ids) == (2, ["a", "b"])


async def test_a_stop_text_ends_the_request_before_the_next_step_is_decided():
    """Its blocks are free when the text is read; its stream ends when it is handed out."""
    engine = Engine()
    stream = engine.begin("a", stop=("yz",))
    for token in "xy":
        engine.hand_out(engine.step(a=token))
    deltas = engine.step(a="z")
    assert not engine.scheduler.has_work
    engine.hand_out(deltas)
    chunk = await stream.get()
    assert (chunk.text, chunk.token_ids, chunk.finish_reason, chunk.stop_reason) == (
        "x", (120, 121, 122), "stop", "yz",
    )  # fmt: skip
    assert len(engine.live) == 0


async def test_the_last_chunk_brings_the_text_that_was_held_back():
    """A stop text that never came."""
    engine = Engine()
    stream = engine.begin("a", max_tokens=1, stop=("xy",))
    engine.hand_out(engine.step(a="x"))
    chunk = await stream.get()
    assert (chunk.text, chunk.finish_reason) == ("x", "length")


async def test_an_error_of_one_request_ends_its_stream_alone():
    """The reader gets it once the rest was read."""
    engine = Engine()
    bad, good = engine.begin("bad"), engine.begin("good")
    engine.hand_out(engine.step(bad="x", good="x"))
    engine.hand_out(engine.step(bad=ValueError("NaN"), good="y"))
    assert (await bad.get()).text == "x"
    with pytest.raises(RequestFailed, match="request bad failed: NaN"):
        await bad.get()
    assert (await good.get()).text == "xy"
    assert engine.live.request_ids == ["good"]


async def test_prompt_logprobs_come_once_with_the_first_token():
    """Whatever the later chunks are."""
    engine = Engine()
    stream = engine.begin("a", prompt_logprobs=0)
    request = engine.scheduler.get("a")
    request.prompt_logprobs.extend(TokenLogprobs(65, -1.0, 1, {}) for _ in range(2))
    engine.hand_out(engine.step(a="x"))
    assert [entry and entry.token_id for entry in (await stream.get()).prompt_logprobs] == [None, 65, 65]
    engine.hand_out(engine.step(a="y"))
    assert (await stream.get()).prompt_logprobs is None


async def test_a_stream_that_nobody_reads_ends_its_request():
    """Its Abort may not have found room in the mailbox."""
    engine = Engine()
    stream = engine.begin("a")
    stream.is_abandoned = True
    engine.step(a="x")
    assert (len(engine.live), engine.scheduler.has_work) == (0, False)


async def test_an_abort_ends_the_stream_and_names_no_other():
    """Not that of a later request of the same id."""
    engine = Engine()
    stream, other = engine.begin("a"), TokenStream("a", 1)
    assert not engine.live.abort("a", other)
    assert engine.live.abort("a", stream)
    assert (await stream.get()).finish_reason == "abort"
    assert not engine.live.abort("a")


async def test_each_stream_that_fails_has_an_error_of_its_own():
    """Raising one object in many tasks would mix their tracebacks; its cause and its notes are kept."""
    engine = Engine()
    streams = [engine.begin(name) for name in "ab"]
    cause = RuntimeError("cause")
    error = ValueError("why")
    error.__cause__ = cause
    error.add_note("a note")
    engine.live.fail(["a", "b", "gone"], error)
    caught = []
    for stream in streams:
        with pytest.raises(ValueError, match="why") as info:
            await stream.get()
        caught.append(info.value)
    assert len({id(each) for each in (error, *caught)}) == 3
    assert all((each.__cause__, each.__notes__) == (cause, ["a note"]) for each in caught)
    assert engine.scheduler.statistics().num_finished == 2


async def test_an_error_that_cannot_be_copied_is_passed_on_itself():
    """Better the same object than none."""

    class Odd(Exception):
        def __init__(self, one, two):
            super().__init__("odd")

    engine = Engine()
    stream, odd = engine.begin("a"), Odd(1, 2)
    engine.live.fail(["a"], odd, RequestStatus.FINISHED_ABORTED)
    with pytest.raises(Odd) as info:
        await stream.get()
    assert info.value is odd
    with anyio.fail_after(10), pytest.raises(Odd):
        await stream.get()


async def test_who_wants_to_know_is_told_of_an_end():
    """Each once, in whatever way it ends; at once if it has ended."""
    engine, told = Engine(), []
    engine.begin("a")
    for name in ("first", "second"):
        engine.live.at_end("a", lambda name=name: told.append(name))
    assert told == []
    engine.live.fail(["a"], RequestFailed("enough"))
    assert told == ["first", "second"]
    engine.live.at_end("a", lambda: told.append("late"))
    assert told == ["first", "second", "late"]
