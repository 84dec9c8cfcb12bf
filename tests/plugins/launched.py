"""Programs of which a launcher runs one for each rank: by hand, as ``srun`` does, and by torchrun."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from aexec.parallel.rendezvous import PortReservation
from aexec.testing.processes import descendants

PRELUDE = """
import asyncio, os, pathlib, signal, sys, threading, time
from aexec import ExecuteModel, ExecutorConfig, ParallelConfig, open_executor
from aexec.executor.external.group import ExternalGroup
from aexec.testing.workers import ProbeWorker, StepProbeWorker

RANK, SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])

class FolderStore:  # torch's takes seconds to import
    folder, problem = pathlib.Path(os.environ["MEETING"]), ""

    async def tell(self, key, value, timeout):
        (self.folder / f"new {RANK}").write_bytes(value)
        (self.folder / f"new {RANK}").rename(self.folder / key.replace("/", " "))

    async def learn(self, key, timeout):
        path = self.folder / key.replace("/", " ")
        while not path.exists():
            await asyncio.sleep(0.01)
        return path.read_bytes()

    def close(self):
        pass

class ByFolder(ExternalGroup):
    def store(self):
        return FolderStore()

def make(worker_cls=StepProbeWorker, **settings):
    layout = ParallelConfig(tensor_parallel_size=SIZE)
    settings = {"backend": ByFolder, "close_grace": 1.0, "start_timeout": 30.0, "parallel": layout} | settings
    return open_executor(ExecutorConfig(worker_cls=worker_cls, **settings))

def say(*words):
    print(*words, flush=True)
"""


class Ended(NamedTuple):
    """How the process of a rank has ended: what it wrote, its exit code (negative: a signal), and when (monotonic)."""

    output: str
    errors: str
    code: int
    at: float


class RankProcesses:
    """A process for each rank, each in a session of its own."""

    def __init__(self, text: str, size: int, folder: Path, **env: str) -> None:
        self._port = PortReservation("127.0.0.1")
        program = folder / "program.py"
        program.write_text(PRELUDE + text)
        self.processes = [self._start(rank, size, program, env) for rank in range(size)]

    def _start(self, rank: int, size: int, program: Path, env: dict[str, str]) -> subprocess.Popen[str]:
        own = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(self._port.port), "MEETING": str(program.parent)}
        return subprocess.Popen(
            [sys.executable, str(program)],
            stdin=subprocess.PIPE,  # open until the end of the rank is waited for
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            env={**os.environ, **place, **{name: str(value) for name, value in own.items()}, **env},
        )

    def line(self, rank: int) -> str:
        """The next line that a rank writes; empty at its end."""
        output = self.processes[rank].stdout
        assert output is not None
        return output.readline().rstrip("\n")

    def lines(self) -> list[str]:
        """The next line of each."""
        return [self.line(rank) for rank in range(len(self.processes))]

    def kill(self, rank: int, number: int = signal.SIGKILL) -> float:
        """Send a signal to one; when that was."""
        os.kill(self.processes[rank].pid, number)
        return time.monotonic()

    def finish(self, rank: int, timeout: float = 30.0) -> Ended:
        """Wait for the end of one."""
        output, errors = self.processes[rank].communicate(timeout=timeout)
        return Ended(output, errors, self.processes[rank].returncode, time.monotonic())

    def end(self) -> None:
        """Leave nothing of them, whatever happened."""
        for process in self.processes:
            end_session(process)
        self._port.close()


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Callable[..., RankProcesses]]:
    """Starts ``launch(text, size=2, **environment)``, and sees to the end of all ranks."""
    with contextlib.ExitStack() as stack:

        def start(text: str, size: int = 2, **env: str) -> RankProcesses:
            folder = Path(tempfile.mkdtemp(dir=tmp_path))
            ranks = RankProcesses(text, size, folder, **env)
            stack.callback(ranks.end)
            return ranks

        yield start


def torchrun(
    program: Path, *arguments: str, logs: Path, redirects: int = 0, ranks: int = 2, restarts: int = 0, **options: Any
) -> subprocess.Popen[str]:
    """Start a program under torchrun, which finds a port for itself; whoever starts it sees to its end.

    It makes a folder in ``logs``; there is each rank's ``stderr.log``, by attempt and rank, with ``redirects=2``.

    Its thread that says every 5 s that it is alive says so once in ten minutes: torchrun leaves it to itself when it is
    interrupted, and has a SIGABRT for an exit code where that thread is in torch's store at the time
    (github.com/pytorch/pytorch/issues/38228).
    """
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    command += [f"--max-restarts={restarts}", f"--log-dir={logs}", f"--redirects={redirects}"]
    return subprocess.Popen(
        [*command, "--rdzv-conf=keep_alive_interval=600", str(program), *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "RES_OPTIONS": "timeout:1 attempts:1"},
        **options,
    )


def end_session(process: subprocess.Popen[str]) -> None:
    """Leave nothing of a process and of all that descends from it."""
    ours = descendants(process.pid) if process.poll() is None else []
    process.kill()
    for pid in ours:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.communicate()
