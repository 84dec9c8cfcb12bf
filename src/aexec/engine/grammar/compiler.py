"""The engine's end of the workshop: a process that compiles grammars, and is killed when one takes too long.

Everything here blocks, and is for a thread.
"""

from __future__ import annotations

import json
import os
import resource
import select
import signal
import struct
import subprocess
import sys
import threading
import time
from typing import Any

from aexec.engine.grammar import workshop
from aexec.engine.grammar.base import GrammarError, GrammarSpec, GrammarTooSlow, Vocabulary

__all__ = ("Compiler", "CompilerLost")

_LENGTH = struct.Struct(">I")
_START_SECONDS = 60.0  # to import a library, torch with it
_MEMORY_BYTES = 1 << 30  # beyond what the library and the vocabulary take
_CHUNK = 1 << 16
_MOST_STACK_BYTES = 8 << 20  # half of it takes an object with 9,000 optional properties
_UNLIMITED_STACK_BYTES = 2 << 20  # that threads have where the limit says "unlimited"


class CompilerLost(Exception):
    """The process could not be started."""


class Compiler:
    """One process for one library and one vocabulary; it is started with the first grammar.

    Args:
        backend: ``module:Class`` of the library.
        vocabulary: What its grammars are about.
    """

    def __init__(self, backend: str, vocabulary: Vocabulary) -> None:
        self._backend, self._vocabulary = backend, vocabulary
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()  # of the process's beginning and end
        self._work = threading.Lock()  # held while somebody reads and writes its pipes
        self._is_closed = False

    def __repr__(self) -> str:
        """As in ``<Compiler pid 712>``."""
        return f"<Compiler pid {self._process.pid}>" if self._process else "<Compiler: not started>"

    @property
    def pid(self) -> int | None:
        """Of the process; None while there is none."""
        process = self._process
        return None if process is None else process.pid

    def prepare(self, spec: GrammarSpec, seconds: float) -> str:
        """Compile a grammar there.

        Args:
            spec: The grammar.
            seconds: How long it may take; then the process is killed.

        Returns:
            What the library's ``load`` takes.

        Raises:
            GrammarError: It does not compile, or crashes its compiler.
            GrammarTooSlow: It takes too long.
            CompilerLost: There is no process to compile it in.
        """
        with self._work:
            return self._prepare(spec, seconds)

    def close(self) -> None:
        """Kill the process, whatever it does; who waits for it is told so."""
        with self._lock:
            self._is_closed = True
            process, self._process = self._process, None
        if process is not None:
            process.kill()
            with self._work:  # whose holder sees the end of the line
                _kill(process)

    def _prepare(self, spec: GrammarSpec, seconds: float) -> str:
        process = self._started()
        job = {"kind": spec.kind, "text": spec.text, "whitespace": spec.whitespace, "seconds": seconds}
        try:
            answer = self._ask(process, job, seconds)
        except (EOFError, BrokenPipeError):
            how = self._how_it_ended(process)
            raise GrammarError(
                f"it crashed its compiler ({how}), as grammars do that are too large or nested too deep; this one has "
                f"{len(spec.text):,} characters: make it smaller, or of fewer parts"
            ) from None
        except TimeoutError:
            self._end(process)
            raise GrammarTooSlow(f"it did not compile within {seconds:g} s") from None
        if "error" in answer:
            raise GrammarError(answer["error"])
        prepared: str = answer["prepared"]
        return prepared

    def _started(self) -> subprocess.Popen[bytes]:
        with self._lock:
            if self._is_closed:
                raise CompilerLost("the engine was closed")
            if self._process is not None and self._process.poll() is None:
                return self._process
            try:
                self._process = process = _spawn()
            except OSError as error:
                raise CompilerLost(f"this interpreter cannot be started anew: {error}") from None
        setup = {
            "path": sys.path,
            "backend": self._backend,
            "size": self._vocabulary.size,
            "ends": self._vocabulary.end_token_ids,
            "tokenizer": self._vocabulary.tokenizer_json,
            "memory": _MEMORY_BYTES,
            "stack": _stack_bytes(),
        }
        try:
            text = (self._vocabulary.tokenizer_json or "").encode()
            answer = self._ask(process, setup, _START_SECONDS, text)
        except (EOFError, BrokenPipeError, TimeoutError):
            self._end(process)
            raise CompilerLost(f"the process for it did not come up ({self._how_it_ended(process)})") from None
        if "error" in answer:
            self._end(process)
            raise CompilerLost(f"the process for it did not come up: {answer['error']}")
        return process

    def _ask(
        self, process: subprocess.Popen[bytes], frame: dict[str, Any], seconds: float, *more: bytes
    ) -> dict[str, Any]:
        assert process.stdin is not None
        assert process.stdout is not None
        deadline = time.monotonic() + seconds
        for body in (json.dumps(frame).encode(), *more):
            _write(process.stdin.fileno(), _LENGTH.pack(len(body)) + body, deadline)
        (length,) = _LENGTH.unpack(_read(process.stdout.fileno(), _LENGTH.size, deadline))
        answer: dict[str, Any] = json.loads(_read(process.stdout.fileno(), length, deadline))
        return answer

    def _end(self, process: subprocess.Popen[bytes]) -> None:
        with self._lock:
            if self._process is process:
                self._process = None
        _kill(process)

    def _how_it_ended(self, process: subprocess.Popen[bytes]) -> str:
        self._end(process)
        code = process.returncode
        return f"exit code {code}" if code >= 0 else signal.Signals(-code).name


def _stack_bytes() -> int:
    """Stack to compile with: half of what threads of this process have, where the grammar is compiled once more.

    What needs too much of it is found out by a crash, which must be that of the other process.
    """
    here = threading.stack_size() or resource.getrlimit(resource.RLIMIT_STACK)[0]
    return max(min(here if here != resource.RLIM_INFINITY else _UNLIMITED_STACK_BYTES, _MOST_STACK_BYTES) // 2, 1 << 20)


def _spawn() -> subprocess.Popen[bytes]:
    process = subprocess.Popen(  # noqa: S603 - this interpreter, and a file of ours
        [sys.executable, "-I", workshop.__file__],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        bufsize=0,
        start_new_session=True,  # who presses Ctrl-C means us
    )
    assert process.stdin is not None
    assert process.stdout is not None
    os.set_blocking(process.stdin.fileno(), False)
    os.set_blocking(process.stdout.fileno(), False)
    return process


def _kill(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()


def _write(fd: int, data: bytes, deadline: float) -> None:
    left = memoryview(data)
    while left:
        _wait(fd, select.POLLOUT, deadline)
        left = left[os.write(fd, left[:_CHUNK]) :]


def _read(fd: int, size: int, deadline: float) -> bytes:
    parts: list[bytes] = []
    while size:
        _wait(fd, select.POLLIN, deadline)
        part = os.read(fd, min(size, _CHUNK))
        if not part:
            raise EOFError
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


def _wait(fd: int, what: int, deadline: float) -> None:
    poll = select.poll()
    poll.register(fd, what)
    if not poll.poll(max(deadline - time.monotonic(), 0.0) * 1e3):
        raise TimeoutError
