"""Executors that are to be hurt, programs that open them, and eyes on their processes."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from launched import launch as launch

from aexec import ExecutorConfig, ParallelConfig, open_executor
from aexec.executor.base import Executor
from aexec.executor.open import Opening
from aexec.testing.processes import ProcessWatch, descendants

WORKER = "aexec.testing.faulty:FaultyWorker"
RANKS = {"uni": 1, "mp": 3, "ray": 3}
PLANES = ["channel", "compiled_graph"]

PRELUDE = """
import asyncio, os, signal, sys, threading, time
from aexec import ExecutorConfig, ParallelConfig, open_executor

def make(ranks=2, **settings):
    settings = {"backend": "mp", "worker_cls": "aexec.testing.faulty:FaultyWorker", "close_grace": 1.0} | settings
    return open_executor(ExecutorConfig(parallel=ParallelConfig(pipeline_parallel_size=ranks), **settings))

def say(*words):
    print(*words, flush=True)
"""


def open_faulty(backend: str = "mp", ranks: int | None = None, **settings: Any) -> Opening:
    """An executor of ``FaultyWorker``, on one rank in this process or on three in processes of their own."""
    layout = ParallelConfig(pipeline_parallel_size=ranks or RANKS[backend])
    on_ray = {"placement_timeout": 30.0} if backend == "ray" else {}
    settings = {"worker_cls": WORKER, "start_timeout": 40.0, "close_grace": 2.0} | on_ray | settings
    return open_executor(ExecutorConfig(backend=backend, parallel=layout, **settings))


@pytest.fixture(name="open_faulty", scope="session")
def open_faulty_fixture() -> Callable[..., Opening]:
    """See :func:`open_faulty`."""
    return open_faulty


# Of a module, not of the session: while an async fixture lives, anyio runs all tests on its loop.
@pytest.fixture(scope="module")
async def uni(anyio_backend: str) -> AsyncIterator[Executor]:
    """An executor of one rank in this process, for tests that leave it as it was."""
    async with open_faulty("uni") as executor:
        yield executor


@pytest.fixture(scope="module")
async def mp(anyio_backend: str) -> AsyncIterator[Executor]:
    """An executor of three processes, for tests that leave it as it was."""
    async with open_faulty("mp") as executor:
        yield executor


@pytest.fixture(params=["uni", "mp"])
def executor(request: pytest.FixtureRequest, uni: Executor, mp: Executor) -> Executor:
    """Each of the two in its turn."""
    return {"uni": uni, "mp": mp}[request.param]


@pytest.fixture(scope="module", params=PLANES)
def plane(request: pytest.FixtureRequest) -> str:
    """Each way in which a step reaches workers that Ray has placed."""
    return request.param


@pytest.fixture
def open_on_ray(plane: str, ray_cluster: Any) -> Callable[..., Opening]:
    """See :func:`open_faulty`; the workers are Ray's."""
    return functools.partial(open_faulty, "ray", ray_step_plane=plane, graph_buffer_bytes=1 << 20)


# The graph keeps processors busy until it is released.
@pytest.fixture(scope="module")
async def on_ray(anyio_backend: str, plane: str, ray_cluster: Any) -> AsyncIterator[Executor]:
    """An executor of three workers that Ray has placed, for tests that leave it as it was."""
    async with open_faulty("ray", ray_step_plane=plane, graph_buffer_bytes=4 << 20, graph_idle_release=0.5) as executor:
        yield executor


class Program:
    """A program that runs in a session of its own, with all that descends from it."""

    def __init__(
        self,
        text: str,
        *flags: str,
        cwd: Path | None = None,
        command: list[str] | None = None,
        arguments: Sequence[str] = (),
    ) -> None:
        self.process = subprocess.Popen(
            command or [sys.executable, *flags, "-c", PRELUDE + text, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            cwd=cwd,
        )
        self.pid = self.process.pid

    def line(self, timeout: float = 45.0) -> str:
        """The next line of its output; empty at its end. One that does not come in time is the end of the program."""
        assert self.process.stdout is not None
        late = threading.Timer(timeout, self.kill_all)
        late.start()
        began = time.monotonic()
        line = self.process.stdout.readline()
        late.cancel()
        late.join()
        assert line or time.monotonic() - began < timeout, f"no line within {timeout:.0f} s"
        return line.rstrip("\n")

    def watch(self) -> ProcessWatch:
        """Itself and all that descends from it now."""
        return ProcessWatch([self.pid, *descendants(self.pid)])

    def kill(self, number: signal.Signals) -> None:
        """Send a signal to it alone."""
        os.kill(self.pid, number)

    def interrupt_all(self) -> None:
        """What Ctrl-C in a terminal does: SIGINT to all of its process group."""
        os.killpg(self.pid, signal.SIGINT)

    def finish(self, timeout: float = 30.0) -> tuple[str, str, int]:
        """Wait for its end: output, errors, exit code."""
        output, errors = self.process.communicate(timeout=timeout)
        return output, errors, self.process.returncode

    def kill_all(self) -> None:
        """End it, and all that descends from it."""
        for pid in [self.pid, *descendants(self.pid)]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def end(self) -> None:
        """Leave nothing of it, whatever happened."""
        self.kill_all()
        self.process.communicate()


@pytest.fixture
def start() -> Iterator[Callable[..., Program]]:
    """Starts programs, and sees to their end."""
    with contextlib.ExitStack() as stack:

        def start(text: str, *flags: str, **options: Any) -> Program:
            program = Program(text, *flags, **options)
            stack.callback(program.end)
            return program

        yield start


@pytest.fixture
def run(start: Callable[..., Program]) -> Callable[..., str]:
    """Runs a program that has to end well, with nothing on its standard error; its output."""

    def run(text: str, *flags: str, timeout: float = 50.0, **options: Any) -> str:
        output, errors, code = start(text, *flags, **options).finish(timeout)
        assert (errors, code) == ("", 0), errors
        return output

    return run


def shared_memory() -> set[str]:
    """Names in /dev/shm, but for semaphores of Ray's, and those of ours in the folder for temporary files."""
    ours = {path for path in Path("/tmp").iterdir() if "aexec" in path.name and path.suffix != ".lock"}
    memory = {path for path in Path("/dev/shm").iterdir() if not path.name.startswith(("sem.obj", "sem.hdr"))}
    return {str(path) for path in memory | ours}


@pytest.fixture
def no_files_are_left() -> Iterator[None]:
    """Fails a test after which /dev/shm or /tmp has more than before."""
    before = shared_memory()
    yield
    assert shared_memory() - before == set()
