"""The process in which grammars are compiled: run by path, given one job at a time, killed when one takes too long.

A compiler that loops or crashes here hurts nobody: this is the only place where a user's
grammar is seen for the first time. It ends when its standard input does, and it limits its
own processor time and memory, in case nobody is left to kill it.

Frames are four bytes of length, big-endian, and JSON. In: first ``path`` (``sys.path``),
``backend`` (``module:Class``), ``size``, ``ends``, ``memory`` and ``stack`` (bytes), and a frame that is the
bytes of the ``tokenizer.json``, or empty; then for each job
``kind``, ``text``, ``whitespace`` and ``seconds``. Out: ``{"ready": seconds}``, then for each job
``prepared`` or ``error``.
"""

from __future__ import annotations

import importlib
import json
import os
import resource
import select
import struct
import sys
import threading
import time
from typing import Any, BinaryIO

__all__ = ("main", "read_frame", "write_frame")

_LENGTH = struct.Struct(">I")


def read_frame(stream: BinaryIO) -> bytes | None:
    """The next frame; None at the end."""
    head = stream.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        return None
    (length,) = _LENGTH.unpack(head)
    body = stream.read(length)
    return body if len(body) == length else None


def write_frame(stream: BinaryIO, value: Any) -> None:
    """Write one frame."""
    body = json.dumps(value).encode()
    stream.write(_LENGTH.pack(len(body)) + body)
    stream.flush()


class _Workshop:
    def __init__(self, setup: dict[str, Any], tokenizer: bytes) -> None:
        sys.path[:] = setup["path"]
        base = importlib.import_module("aexec.engine.grammar.base")
        module, _, name = setup["backend"].partition(":")
        vocabulary = base.Vocabulary(setup["size"], tuple(setup["ends"]), tokenizer.decode() or None)
        self._backend = getattr(importlib.import_module(module), name)(vocabulary)
        self._spec: Any = base.GrammarSpec
        _limit(resource.RLIMIT_AS, _mapped_bytes() + setup["memory"])

    def work(self, job: dict[str, Any]) -> dict[str, Any]:
        """Compile one grammar on a thread whose stack the engine has chosen."""
        _limit(resource.RLIMIT_CPU, int(time.process_time() + job["seconds"] * (os.cpu_count() or 1)) + 2)
        answers: list[dict[str, Any]] = []
        thread = threading.Thread(target=lambda: answers.append(self._prepare(job)))
        thread.start()
        thread.join()
        return answers[0] if answers else {"error": "its compiler failed"}

    def _prepare(self, job: dict[str, Any]) -> dict[str, Any]:
        try:
            return {"prepared": self._backend.prepare(self._spec(job["kind"], job["text"], job["whitespace"]))}
        except MemoryError:
            return {"error": "its compiler ran out of memory"}
        except BaseException as error:  # noqa: BLE001 - a panic of the library is one too
            return {"error": str(error) or type(error).__name__}


def _limit(what: int, most: int) -> None:
    """Set a soft limit, under the hard one that this machine may have set."""
    hard = resource.getrlimit(what)[1]
    resource.setrlimit(what, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))


def _mapped_bytes() -> int:
    with open("/proc/self/statm") as file:  # noqa: PTH123 - the less is imported here the sooner it is there
        return int(file.read().split()[0]) * resource.getpagesize()


def _end_with_the_engine() -> None:
    """While a grammar compiles nobody reads: the end of the line is watched beside."""
    poll = select.poll()
    poll.register(0, 0)
    poll.poll()
    os._exit(0)


def main() -> None:
    """Serve until the line ends."""
    source, sink = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever a library prints is no answer
    setup, tokenizer = read_frame(source), read_frame(source)
    if setup is None or tokenizer is None:
        return
    began = time.monotonic()
    try:
        settings = json.loads(setup)
        workshop = _Workshop(settings, tokenizer)
    except Exception as error:  # noqa: BLE001 - the engine tells it to those who wait
        write_frame(sink, {"error": f"{type(error).__name__}: {error}"})
        return
    threading.Thread(target=_end_with_the_engine, daemon=True).start()
    threading.stack_size(settings["stack"])
    write_frame(sink, {"ready": time.monotonic() - began})
    while (job := read_frame(source)) is not None:
        write_frame(sink, workshop.work(json.loads(job)))


if __name__ == "__main__":
    main()
