from __future__ import annotations

import asyncio
import pickle
import threading
from pathlib import Path

import anyio
import pytest

from aexec import InvalidRequest, StructuredOutput
from aexec.config import StructuredOutputConfig
from aexec.engine.bytes_text import ByteTokenizer
from aexec.engine.grammar import manager as module
from aexec.engine.grammar.following import RequestGrammar
from aexec.engine.grammar.manager import BACKENDS, GrammarManager
from aexec.engine.hub_text import HubTokenizer
from aexec.engine.request import Request, RequestStatus
from aexec.engine.scheduler import RequestUpdate
from aexec.errors import ConfigError, MissingExtra, QueueFull, RequestFailed
from aexec.messages.request import SamplingParams

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend():
    """The engine is asyncio's."""
    return "asyncio"


def hangs(number):
    """A schema of a few kilobytes that its library compiles for minutes."""
    return {
        "title": str(number),
        "allOf": [{"type": "string", "pattern": f"[a-c]{{{size}}}d"} for size in range(1, 300)],
    }


def is_there(pid):
    return Path(f"/proc/{pid}").exists()


class Desk:
    """The requests of an engine."""

    def __init__(self):
        self.requests = {}

    def add(self, name, *, grammar=None, structured=None, ends=(256,)):
        request = Request(
            request_id=name,
            token_ids=[1, 2],
            num_prompt_tokens=2,
            sampling=SamplingParams(),
            stop_token_ids=frozenset(ends),
            max_num_tokens=100,
            structured=structured,
            grammar=None if grammar is None else RequestGrammar(grammar),
            status=RequestStatus.RUNNING,
        )
        self.requests[name] = request
        return request

    def finish(self, name, status):
        self.requests.pop(name).move(status)


@pytest.fixture
def desk():
    """No requests yet."""
    return Desk()


@pytest.fixture
async def managing(desk):
    """Makes managers, and closes them."""
    opened = []

    def make(ends=(256,), **settings):
        config = StructuredOutputConfig(**settings)
        opened.append(
            GrammarManager(
                config, ByteTokenizer(), vocab_size=512, end_token_ids=ends, find=desk.requests.get, finish=desk.finish
            )
        )
        return opened[-1]

    yield make
    for each in opened:
        await each.aclose()


# -- compiling -------------------------------------------------------------------------------


async def test_a_grammar_is_compiled_once(managing, desk):
    """Requests that ask at once share the compilation, later ones find it; each has a grammar of its own."""
    manager = managing()
    requests = [desk.add(str(number), structured=StructuredOutput(regex="ab")) for number in range(4)]
    first, second, third = await asyncio.gather(*map(manager.compile, requests[:3]))
    fourth = await manager.compile(requests[3])
    assert first.advance(list(b"ab"))
    assert not any(each.advance([]) for each in (second, third, fourth))
    found = manager.statistics()
    assert (found.num_compiled, found.num_hits, found.num_cached, found.num_compilers) == (1, 1, 1, 1)


async def test_a_library_that_stops_everything_is_made_ready_while_the_engine_opens(managing, desk, hub_tokens):
    """Where it takes a while, which is with a real vocabulary; a request finds it there."""
    tokenizer = HubTokenizer(hub_tokens, {}, None)
    for preload, expected in ((True, ["llguidance"]), (False, [])):
        config = StructuredOutputConfig(preload=preload)
        manager = GrammarManager(
            config, tokenizer, vocab_size=300, end_token_ids=(262,), find=desk.requests.get, finish=desk.finish
        )
        await manager.preload()
        assert list(manager._backends) == expected
        await manager.compile(desk.add("a", structured=StructuredOutput(choice=("yes",))))
        assert list(manager._backends) == ["llguidance"]
        await manager.aclose()
    bytes_only = managing()
    await bytes_only.preload()
    assert not bytes_only._backends


async def test_so_many_are_kept(managing, desk):
    """The latest used."""
    manager = managing(cache_size=2)
    for text in ("a", "b", "a", "c"):
        await manager.compile(desk.add(text, structured=StructuredOutput(regex=text)))
    assert [spec.text for _, spec in manager._kept] == ["a", "c"]


async def test_a_request_that_leaves_takes_nothing_from_others(managing, desk):
    """Whoever waits for the same grammar gets it, though the first who asked is gone."""
    manager = managing()
    asking = [
        asyncio.ensure_future(manager.compile(desk.add(str(number), structured=StructuredOutput(regex="ab"))))
        for number in range(2)
    ]
    while not manager._under_way:  # noqa: ASYNC110 - a thread reads the grammar first
        await anyio.sleep(0.001)
    asking[0].cancel()
    with anyio.fail_after(20):
        assert (await asking[1]).advance(list(b"ab"))


async def test_a_grammar_that_does_not_compile_fails_its_request(managing, desk):
    """The error names the request and repeats the library's reason; nothing is kept of it."""
    manager = managing()
    with pytest.raises(InvalidRequest, match=r"(?s)the regex of request a is refused: .*unclosed group"):
        await manager.compile(desk.add("a", structured=StructuredOutput(regex="(a")))
    found = manager.statistics()
    assert (found.num_refused, found.num_cached) == (1, 0)


async def test_a_compiler_that_cannot_start_fails_the_request(managing, desk, monkeypatch):
    """It is no fault of the request, and the error does not say so."""
    monkeypatch.setitem(module.BACKENDS, "llguidance", ("aexec.engine.grammar.base:Missing", "structured"))
    with pytest.raises(RequestFailed, match="no grammar could be compiled for request a: the process for it"):
        await managing().compile(desk.add("a", structured=StructuredOutput(regex="a")))


async def test_closing_ends_what_is_under_way(managing, desk):
    """Compilations too: nothing is left behind, and it takes no time."""
    manager = managing()
    asking = asyncio.ensure_future(manager.compile(desk.add("a", structured=StructuredOutput(json_schema=hangs(0)))))
    while not any(compiler.pid for compiler in manager._compilers):  # noqa: ASYNC110 - a process has no event
        await anyio.sleep(0.005)
    with anyio.fail_after(5):
        await manager.aclose()
    with pytest.raises((asyncio.CancelledError, InvalidRequest, RequestFailed)):
        await asking


@pytest.mark.parametrize(
    ("tokenizer", "structured", "message"),
    [
        (None, StructuredOutput(regex="a"), "needs a tokenizer, and this model has none"),
        (
            ByteTokenizer(),
            StructuredOutput(regex="a", backend="outlines"),
            "is 'outlines': expected one of llguidance, xg",
        ),
        (ByteTokenizer(), StructuredOutput(regex="a" * 2000), "regex has 2,000 characters: expected at most 1,000"),
    ],
)
def test_what_is_certain_to_fail_is_refused_at_once(desk, tokenizer, structured, message):
    """Before the request is queued."""
    config = StructuredOutputConfig(max_bytes=1000)
    manager = GrammarManager(
        config, tokenizer, vocab_size=512, end_token_ids=(), find=desk.requests.get, finish=desk.finish
    )
    with pytest.raises(InvalidRequest, match=message):
        manager.check(structured)


@pytest.mark.parametrize(
    ("name", "error", "message"),
    [
        ("llguidance", MissingExtra, r"needs the extra 'structured' .*: pip install 'aexec\[structured\]'"),
        ("xgrammar", InvalidRequest, r"'xgrammar', and it is not installed: pip install xgrammar"),
    ],
)
async def test_a_library_that_is_not_installed_is_named_with_what_to_do(managing, monkeypatch, name, error, message):
    """The exact command."""
    monkeypatch.setattr(module, "find_spec", lambda _: None)
    with pytest.raises(error, match=message):
        managing().check(StructuredOutput(regex="a", backend=name))


async def test_grammars_that_hang_do_not_hold_up_the_others(managing, desk):
    """More of them than there are processes, each with a long limit: whoever comes after them waits a moment."""
    manager = managing(compile_timeout=120.0)
    hanging = [
        asyncio.ensure_future(
            manager.compile(desk.add(f"slow {number}", structured=StructuredOutput(json_schema=hangs(number))))
        )
        for number in range(3)
    ]
    while manager.statistics().num_compilers < 2:  # noqa: ASYNC110 - they read their schemas first
        await anyio.sleep(0.005)
    with anyio.fail_after(30):
        await manager.compile(desk.add("quick", structured=StructuredOutput(regex="ab")))
    assert not any(each.done() for each in hanging)
    await manager.aclose()
    results = await asyncio.gather(*hanging, return_exceptions=True)
    assert all(isinstance(each, (asyncio.CancelledError, InvalidRequest, RequestFailed)) for each in results)


async def test_a_compilation_ends_with_the_last_request_that_waits_for_it(managing, desk):
    """The process at work is killed, those in line leave it, and whoever comes next waits for none of them."""
    manager = managing(compile_timeout=120.0, num_compilers=1)
    asking = [
        asyncio.ensure_future(
            manager.compile(desk.add(str(number), structured=StructuredOutput(json_schema=hangs(number // 2))))
        )
        for number in range(8)
    ]
    with anyio.fail_after(30):
        while len(manager._under_way) < 4 or not any(  # noqa: ASYNC110 - a process has no event
            each.pid for each in manager._compilers
        ):
            await anyio.sleep(0.005)
        pid = next(each.pid for each in manager._compilers)
        for each in asking:
            each.cancel()
        await asyncio.gather(*asking, return_exceptions=True)
        assert len(manager._under_way) == 0
        while is_there(pid):  # noqa: ASYNC110 - a process has no event
            await anyio.sleep(0.005)
        await manager.compile(desk.add("quick", structured=StructuredOutput(regex="ab")))
    found = manager.statistics()
    assert (found.num_compiled, found.num_compilers) == (1, 1)


async def test_so_many_grammars_are_under_way(managing, desk):
    """One more is refused, with the limit and its name; who asks for one of them is not."""
    manager = managing(compile_timeout=120.0, max_num_compiling=2)
    asking = [
        asyncio.ensure_future(
            manager.compile(desk.add(str(number), structured=StructuredOutput(json_schema=hangs(number % 2))))
        )
        for number in range(3)
    ]
    with anyio.fail_after(20):
        while "2 under way for 3," not in repr(manager._under_way):  # noqa: ASYNC110 - threads read them first
            await anyio.sleep(0.005)
        said = "request c was turned away, as 2 grammars are being compiled already: send it again later, or open .* "
        with pytest.raises(QueueFull, match=said + "StructuredOutputConfig.max_num_compiling") as caught:
            await manager.compile(desk.add("c", structured=StructuredOutput(regex="ab")))
        assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)
        for each in asking:
            each.cancel()
        await asyncio.gather(*asking, return_exceptions=True)
        await manager.compile(desk.add("d", structured=StructuredOutput(regex="ab")))


async def test_what_failed_once_is_tried_again(managing, desk, monkeypatch):
    """The vocabulary's text, and the library: for want of memory, say."""
    manager, left = managing(), {"text": 1, "library": 1}

    def failing(name, call):
        def fail(*args):
            if left[name]:
                left[name] -= 1
                raise MemoryError(name)
            return call(*args)

        return fail

    monkeypatch.setattr(ByteTokenizer, "to_json", failing("text", ByteTokenizer.to_json))
    monkeypatch.setattr(module, "_open_backend", failing("library", module._open_backend))
    request = desk.add("a", structured=StructuredOutput(regex="ab"))
    for name in ("text", "library"):
        with pytest.raises(MemoryError, match=name):
            await manager.compile(request)
    assert (await manager.compile(request)).advance(list(b"ab"))


# -- the bitmask -----------------------------------------------------------------------------


async def test_a_bitmask_has_rows_for_those_who_have_a_grammar(managing, desk, scripted, allowed):
    """Where their tokens have led to, however many have come since the last one."""
    manager = managing()
    plain, first, second = desk.add("plain"), desk.add("b", grammar=scripted(b"xyz")), desk.add("a", grammar=scripted())
    first.token_ids += list(b"xy")
    names = manager.constrained([plain, first, second])
    assert names == {"a", "b"}
    masks = await manager.mask(names)
    assert masks.output.request_ids == ["a", "b"]
    assert [allowed(row) for row in masks.output.bitmask] == [list(b"a"), list(b"z")]
    assert not masks.failed


async def test_requests_that_have_ended_have_no_row(managing, desk, scripted):
    """They were launched, and aborted before their mask was asked for."""
    manager = managing()
    desk.add("a", grammar=scripted())
    masks = await manager.mask(frozenset({"a", "gone"}))
    assert masks.output.request_ids == ["a"]


async def test_a_request_whose_mask_cannot_be_made_fails_alone(managing, desk, scripted, too_complex):
    """The reason is the library's; the others have their rows."""
    manager = managing()
    desk.add("bad", grammar=scripted(error=too_complex))
    desk.add("good", grammar=scripted())
    desk.add("wrong", grammar=scripted()).token_ids.append(120)
    masks = await manager.mask(frozenset({"bad", "good", "wrong"}))
    failed = {request.request_id: str(error) for request, error in masks.failed.items()}
    assert sorted(failed) == ["bad", "wrong"]
    assert "request bad failed: its grammar cannot go on: too many states" in failed["bad"]
    assert "token 120 came at position 0" in failed["wrong"]


async def test_end_tokens_that_are_ignored_are_masked(managing, desk, allowed):
    """While the text can go on; and where the request stops at them they may come."""
    manager = managing()
    wish = StructuredOutput(regex="a+")
    for name, ends, expected in (("stops", (256,), [97, 256]), ("ignores", (), [97])):
        request = desk.add(name, structured=wish, ends=ends)
        request.grammar = await manager.compile(request)
        request.token_ids += list(b"a")
        masks = await manager.mask(frozenset({name}))
        assert allowed(masks.output.bitmask[0]) == expected


# -- the tokens ------------------------------------------------------------------------------


async def test_a_request_ends_where_nothing_can_follow(managing, desk, scripted):
    """With its last token, as if it had stopped; others go on."""
    manager = managing()
    requests = [desk.add("whole", grammar=scripted(b"ab")), desk.add("half", grammar=scripted()), desk.add("plain")]
    for request in requests:
        request.token_ids += list(b"ab")
    updates = [RequestUpdate(request, list(b"ab")) for request in requests]
    assert manager.accept(updates) == updates
    assert [request.status for request in requests] == [
        RequestStatus.FINISHED_STOPPED,
        RequestStatus.RUNNING,
        RequestStatus.RUNNING,
    ]


async def test_a_token_that_may_not_come_fails_its_request(managing, desk, scripted):
    """A runner that forgets the mask is found out, and its token is not handed out."""
    request = desk.add("a", grammar=scripted())
    request.token_ids.append(120)
    (update,) = managing().accept([RequestUpdate(request, [120])])
    assert update.token_ids == []
    assert "token 120 came at position 0 of the output and may not" in update.error
    assert request.status is RequestStatus.FINISHED_FAILED


async def test_one_slow_mask_holds_up_a_step_no_longer_than_its_limit(managing, desk, scripted):
    """Per-request readiness: the others' rows are there, and it alone fails."""
    gate = threading.Event()
    manager = managing(mask_timeout=0.2)
    desk.add("slow", grammar=scripted(gate=gate))
    desk.add("quick", grammar=scripted())
    try:
        with anyio.fail_after(5):
            masks = await manager.mask(frozenset({"slow", "quick"}))
        assert list(masks.failed) == [desk.requests["slow"]]
        assert manager.statistics().num_late == 1
    finally:
        gate.set()


def test_a_library_that_is_not_known_is_refused_before_anything_opens():
    """By name, with those that are known."""
    assert [StructuredOutputConfig(backend=name).backend for name in BACKENDS] == list(BACKENDS)
    with pytest.raises(ConfigError, match=rf"backend is 'nix': expected one of {', '.join(BACKENDS)}$"):
        StructuredOutputConfig(backend="nix")
