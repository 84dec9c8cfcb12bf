"""The process in which grammars are compiled: whatever a grammar does to it, the engine only hears of it."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
from pathlib import Path

import pytest

from aexec.engine.grammar.base import GrammarError, GrammarSpec
from aexec.engine.grammar.compiler import Compiler, CompilerLost, _stack_bytes
from aexec.engine.grammar.manager import BACKENDS

GOOD = GrammarSpec("regex", "[ab]+")
BAD = GrammarSpec("regex", "(((")


class Panic(BaseException):
    """What a library in Rust raises for a fault of its own."""


class Hostile:
    """A library that is hostile itself; it is read by the process, from this file."""

    def __init__(self, vocabulary):
        if vocabulary.size == 1:
            raise ValueError("no such vocabulary")

    def prepare(self, spec):
        if spec.text == "loop":
            while True:
                pass
        if spec.text == "hang":
            time.sleep(600)
        if spec.text == "crash":
            os.abort()
        if spec.text == "leave":
            os._exit(3)
        if spec.text == "memory":
            return str(len(bytearray(4 << 30)))
        if spec.text == "print":
            sys.stdout.write("what is printed is no answer\n")
            sys.stdout.flush()
        if spec.text == "panic":
            raise Panic("it panicked")
        return spec.text * 2


@pytest.fixture
def compiler(vocabulary):
    """Of the library that ships."""
    compiler = Compiler(BACKENDS["llguidance"][0], vocabulary)
    yield compiler
    compiler.close()


@pytest.fixture
def hostile(vocabulary, monkeypatch):
    """Of the library above."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    compiler = Compiler("test_compiler:Hostile", vocabulary)
    yield compiler
    compiler.close()


def job(text):
    return GrammarSpec("regex", text)


def cpu_seconds(pid):
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def test_one_process_compiles_one_grammar_after_the_other(compiler):
    """It is started with the first, and a grammar that is refused does it no harm."""
    assert compiler.pid is None
    assert compiler.prepare(GOOD, 20)
    pid = compiler.pid
    with pytest.raises(GrammarError, match="invalid regex"):
        compiler.prepare(BAD, 20)
    assert compiler.prepare(GOOD, 20)
    assert compiler.pid == pid


@pytest.mark.parametrize("text", ["loop", "hang"])
def test_what_takes_too_long_is_killed(hostile, text):
    """Within its limit, and no core burns for it afterwards; the next grammar gets a new process."""
    assert hostile.prepare(job("a"), 20) == "aa"
    pid, began = hostile.pid, time.monotonic()
    with pytest.raises(GrammarError, match=r"it did not compile within 0\.3 s"):
        hostile.prepare(job(text), 0.3)
    assert time.monotonic() - began < 5
    assert not Path(f"/proc/{pid}").exists()
    assert hostile.prepare(job("b"), 20) == "bb"


@pytest.mark.parametrize(("text", "how"), [("crash", "SIGABRT"), ("leave", "exit code 3")])
def test_a_crash_is_an_error_that_says_how(hostile, text, how):
    """And the next grammar gets a new process."""
    with pytest.raises(GrammarError, match=rf"it crashed its compiler \({how}\)"):
        hostile.prepare(job(text), 20)
    assert hostile.prepare(job("b"), 20) == "bb"


def test_a_grammar_that_is_too_deep_says_so_and_takes_nothing_with_it(compiler):
    """A chain of rules without an end in sight: its size and what to do are in the error, and the next one compiles."""
    chain = GrammarSpec("grammar", "\n".join(f'r{place}: "a" r{place + 1}' for place in range(12_000)))
    deep = chain._replace(text=f'start: r0\n{chain.text}\nr12000: "b"\n')
    said = rf"it crashed its compiler \(SIG\w+\), as .* too deep; this one has {len(deep.text):,} characters: make"
    with pytest.raises(GrammarError, match=said):
        compiler.prepare(deep, 60)
    assert compiler.prepare(GOOD, 20)


def test_an_object_with_thousands_of_properties_compiles(compiler):
    """It needs more stack than the process once had."""
    names = [f"p{place}" for place in range(8_000)]
    schema = {"type": "object", "properties": {name: {"type": "integer"} for name in names}, "required": names}
    assert compiler.prepare(GrammarSpec("json_schema", json.dumps(schema)), 60)


def test_the_process_has_half_the_stack_of_the_engine_s_threads():
    """The engine compiles the same once more: what does not fit has to be found out where a crash harms nobody."""
    before = threading.stack_size(6 << 20)
    try:
        assert _stack_bytes() == 3 << 20
        threading.stack_size(64 << 20)
        assert _stack_bytes() == 4 << 20
    finally:
        threading.stack_size(before)


@pytest.mark.parametrize(("text", "why"), [("memory", "ran out of memory"), ("panic", "it panicked")])
def test_a_failure_inside_is_an_error_that_says_why(hostile, text, why):
    """Its memory has a bound, so that a grammar cannot take the machine's."""
    with pytest.raises(GrammarError, match=why):
        hostile.prepare(job(text), 20)
    assert hostile.prepare(job("b"), 20) == "bb"


def test_what_a_library_prints_is_no_answer(hostile):
    """Nor does it reach our own output."""
    assert hostile.prepare(job("print"), 20) == "printprint"


def test_closing_kills_it_in_the_middle_of_its_work(hostile):
    """Whoever waits is told at once, and nobody gets a new one."""
    hostile.prepare(job("a"), 20)
    pid = hostile.pid
    told: list[BaseException] = []

    def wait():
        try:
            hostile.prepare(job("loop"), 30)
        except GrammarError as error:
            told.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    while cpu_seconds(pid) < 0.02:
        thread.join(0.005)
    hostile.close()
    thread.join(5)
    assert "SIGKILL" in str(told[0])
    assert not Path(f"/proc/{pid}").exists()
    with pytest.raises(CompilerLost, match="the engine was closed"):
        hostile.prepare(job("a"), 20)


def test_a_library_that_cannot_be_opened_is_named(hostile, vocabulary):
    """The error is that of the process."""
    compiler = Compiler("test_compiler:Missing", vocabulary)
    with pytest.raises(CompilerLost, match="Missing"):
        compiler.prepare(GOOD, 20)
    compiler.close()


def test_it_ends_with_the_engine(hostile):
    """Nobody closes it, and nobody kills it: the end of its line is enough, even while it works."""
    hostile.prepare(job("a"), 20)
    process = hostile._process

    def wait():
        with contextlib.suppress(GrammarError):
            hostile.prepare(job("hang"), 30)

    stuck = threading.Thread(target=wait)
    stuck.start()
    while Path(f"/proc/{process.pid}/wchan").exists() and not hostile._work.locked():
        stuck.join(0.005)
    stuck.join(0.1)
    process.stdin.close()
    process.wait(10)
    stuck.join(10)
    assert not stuck.is_alive()
