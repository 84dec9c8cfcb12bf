from __future__ import annotations

import threading

import anyio
import pytest

from aexec.engine.grammar.base import GrammarError
from aexec.engine.grammar.filling import Filler, Wanted
from aexec.engine.grammar.following import RequestGrammar

pytestmark = pytest.mark.anyio

WORDS = 16


def wanted(*grammars):
    return [Wanted(RequestGrammar(grammar), ()) for grammar in grammars]


@pytest.fixture
def anyio_backend():
    """The engine is asyncio's."""
    return "asyncio"


async def test_each_request_has_a_row(scripted, allowed):
    """More of them than one thread takes, in their order."""
    filler = Filler(WORDS, timeout=10.0, max_threads=2)
    texts = [bytes([97 + number % 26]) for number in range(40)]
    filled = await filler.fill(wanted(*map(scripted, texts)))
    assert [allowed(row) for row in filled.bitmask] == [list(text) for text in texts]
    assert filled.failed == {}


async def test_no_two_steps_share_a_bitmask(scripted):
    """SO-05: whoever reads one may keep it."""
    filler = Filler(WORDS, timeout=10.0, max_threads=2)
    first = await filler.fill(wanted(scripted(b"a")))
    kept = first.bitmask.copy()
    await filler.fill(wanted(scripted(b"b")))
    assert (first.bitmask == kept).all()


async def test_no_request_needs_no_row():
    """All of a step's constrained requests may have ended."""
    filled = await Filler(WORDS, timeout=10.0, max_threads=2).fill([])
    assert filled.bitmask.shape == (0, WORDS)


@pytest.mark.parametrize("error", [GrammarError("too complex"), RuntimeError("a panic"), KeyboardInterrupt("a panic")])
async def test_a_grammar_that_gives_up_fails_alone(scripted, allowed, error):
    """Its row allows everything, as nobody will use it; the reason is the library's."""
    grammars = [scripted(b"a"), scripted(b"b", error=error), scripted(b"c")]
    filled = await Filler(WORDS, timeout=10.0, max_threads=1).fill(wanted(*grammars))
    assert allowed(filled.bitmask[0]) == [97]
    assert allowed(filled.bitmask[2]) == [99]
    assert (filled.bitmask[1] == -1).all()
    assert list(filled.failed) == [1]
    assert str(error) in str(filled.failed[1])


async def test_a_slow_grammar_holds_up_the_others_for_so_long_and_fails_alone(scripted, allowed):
    """Others of its step have their rows, those behind it on its thread too; what it writes late is nobody's."""
    gate = threading.Event()
    filler = Filler(WORDS, timeout=0.2, max_threads=1)
    grammars = [scripted(b"a"), scripted(b"b", gate=gate), scripted(b"c")]
    try:
        with anyio.fail_after(5):
            filled = await filler.fill(wanted(*grammars))
        assert "one mask of it took more than 0.2 s" in str(filled.failed[1])
        assert filler.num_late == 1
    finally:
        gate.set()
    assert allowed(filled.bitmask[0]) == [97]
    assert allowed(filled.bitmask[2]) == [99]
    with anyio.fail_after(5):
        while filler.num_late:  # noqa: ASYNC110 - a thread ends without an event
            await anyio.sleep(0.005)
    assert (filled.bitmask[1] == -1).all()
