from __future__ import annotations

import threading
import time

import anyio
import pytest

from aexec.engine.grammar.base import GrammarError
from aexec.engine.grammar.filling import _MOST_THREADS, Filler, Wanted, _Sheet, _Worker
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


class Paced:
    """A grammar whose mask takes some seconds."""

    def __init__(self, seconds):
        self.seconds = seconds

    def fill(self, token_ids, row):
        del token_ids
        time.sleep(self.seconds)
        row[:] = 1


async def test_each_row_has_its_own_time():
    """Those that wait for their turn behind slow ones are not late for that."""
    filler = Filler(WORDS, timeout=1.2, max_threads=1)  # a row may be late for a machine that stands still as well
    filled = await filler.fill([Wanted(Paced(0.4), ()) for _ in range(4)])
    assert filled.failed == {}
    assert (filled.bitmask == 1).all()


async def test_when_all_threads_hang_a_mask_fails_and_no_step_waits_for_ever(scripted, allowed):
    """No more threads are started then; once they are free again, masks are made as before."""
    gate = threading.Event()
    filler = Filler(WORDS, timeout=0.2, max_threads=_MOST_THREADS)
    hanging = [scripted(gate=gate) for _ in range(_MOST_THREADS * 16)]
    try:
        with anyio.fail_after(20):
            await filler.fill(wanted(*hanging))
            filled = await filler.fill(wanted(scripted(b"a"), scripted(b"b")))
        assert filler.num_late == _MOST_THREADS
        assert sorted(filled.failed) == [0, 1]
        assert str(filled.failed[0]) == "no thread is free for its mask, as those of 64 others hang"
    finally:
        gate.set()
    with anyio.fail_after(10):
        while filler.num_late:  # noqa: ASYNC110 - a thread ends without an event
            await anyio.sleep(0.005)
    filled = await filler.fill(wanted(scripted(b"a")))
    assert allowed(filled.bitmask[0]) == [97]


async def test_a_mask_that_is_in_line_behind_threads_that_hang_fails_too(scripted):
    """Its line does not move: it was there before they were known to hang."""
    gate = threading.Event()
    patient, quick = Filler(WORDS, timeout=60.0, max_threads=1), Filler(WORDS, timeout=0.1, max_threads=1)
    quick._threads = patient._threads
    hanging = [scripted(gate=gate) for _ in range(_MOST_THREADS)]
    try:
        async with anyio.create_task_group() as group:
            for each in hanging:
                group.start_soon(patient.fill, wanted(each))
            with anyio.fail_after(20):
                await anyio.to_thread.run_sync(lambda: all(each.started.wait(20) for each in hanging))
                filled = await quick.fill(wanted(scripted()))
            assert "no thread is free" in str(filled.failed[0])
            gate.set()
    finally:
        gate.set()


def test_a_thread_that_was_left_behind_takes_no_other_row():
    """Nobody would wait for it there."""
    worker, left = _Worker(), []

    class Late:
        def fill(self, token_ids, row):
            del token_ids, row
            left.append(sheet.leave(worker, 0.0))

    sheet = _Sheet([Wanted(Late(), ()), Wanted(Late(), ())], WORDS)
    sheet.work(worker)
    assert left == [0]
    assert sheet.leave(worker, 0.0) is None
    assert sheet.give_up() == [1]
