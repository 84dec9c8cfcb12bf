"""A worker class that does on demand the worst that worker code does, for tests of backends with processes.

It dies in every way a process can, hangs in native code, ignores requests to end, returns
what cannot travel, and leaves children of its own.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from aexec import environ
from aexec.testing.workers import StepProbeWorker
from aexec.worker.context import WorkerContext

__all__ = ("FLAGS", "WAYS_TO_DIE", "FaultyWorker", "raise_flag")

#: A driver may put things here: a worker process that sees them was forked, and must not have been.
FLAGS: list[str] = []


def _exit_at_once() -> NoReturn:
    os._exit(0)


#: By name; a signal's name is what ``WorkerDied.signal`` says, and none is an exit code of 0.
WAYS_TO_DIE: dict[str, Callable[[], None]] = {
    "SIGKILL": lambda: signal.raise_signal(signal.SIGKILL),
    "SIGSEGV": lambda: os.kill(os.getpid(), signal.SIGSEGV),
    "SIGABRT": os.abort,
    "exit": _exit_at_once,
}


def raise_flag() -> None:
    """A ``worker_init`` function."""
    FLAGS.append("raised in the worker")


class FaultyWorker(StepProbeWorker):
    """A worker that can do anything wrong.

    Args:
        context: The rank's place.
        fail_in: See ``ProbeWorker``.
        hang_in: See ``ProbeWorker``.
        seconds: See ``ProbeWorker``.
        fail_rank: This rank raises ``ValueError("bad cfg")`` in ``load_model``, and the
            others hang there for ``seconds``, as ranks do that wait for it.
        farewell: A file to which ``shutdown`` adds the rank.
        stubborn_rank: This rank ignores ``SIGTERM``, and hangs in its ``shutdown``.
    """

    def __init__(
        self,
        context: WorkerContext,
        *,
        fail_in: str = "",
        hang_in: str = "",
        seconds: float = 0.0,
        fail_rank: int | None = None,
        farewell: str = "",
        stubborn_rank: int | None = None,
    ) -> None:
        super().__init__(context, fail_in=fail_in, hang_in=hang_in, seconds=seconds)
        self._wait, self._fail_rank, self._farewell = seconds, fail_rank, farewell
        self._stubborn = stubborn_rank == context.rank
        self._calls = 0
        if self._stubborn:
            with contextlib.suppress(ValueError):  # not on the main thread, as with Ray
                signal.signal(signal.SIGTERM, signal.SIG_IGN)

    def load_model(self) -> None:
        """The second hook."""
        super().load_model()
        if self._fail_rank == self.context.rank:
            raise ValueError("bad cfg")
        if self._fail_rank is not None:
            self.native_sleep(self._wait)

    def shutdown(self) -> None:
        """The last hook."""
        if self._farewell:
            with Path(self._farewell).open("a", encoding="utf-8") as file:
                file.write(f"{self.context.rank}\n")
        if self._stubborn:
            self.native_sleep(60.0)

    def pid(self) -> int:
        """Its process."""
        return os.getpid()

    def flags(self) -> list[str]:
        """What is in :data:`FLAGS` here."""
        return list(FLAGS)

    def variable(self, name: str) -> str | None:
        """An environment variable."""
        return environ.inherited().get(name)

    def thread_count(self) -> int:
        """Threads of its process."""
        return threading.active_count()

    def die(self, way: str, rank: int | None = None) -> int:
        """End the process without any Python clean-up; see :data:`WAYS_TO_DIE`."""
        if rank is None or rank == self.context.rank:
            with contextlib.suppress(ValueError, OSError):
                resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            WAYS_TO_DIE[way]()
        return self.context.rank

    def die_or_wait(self, way: str, rank: int, seconds: float) -> None:
        """End one rank while the others hang in native code, as in a collective."""
        self.die(way, rank)
        self.native_sleep(seconds)

    def die_on_call(self, number: int) -> int:
        """End the process at every so many calls; how many there were so far."""
        self._calls += 1
        if self._calls == number:
            self.die("SIGKILL")
        return self._calls

    def native_sleep(self, seconds: float, rank: int | None = None) -> None:
        """Block in C code, where no Python signal handler and no exception can reach, without the GIL."""
        if rank is not None and rank != self.context.rank:
            return
        give_up = time.monotonic() + seconds
        libc = ctypes.CDLL(None)
        while (left := give_up - time.monotonic()) > 0:
            libc.usleep(int(min(left, 0.9) * 1e6))

    def stuck(self, seconds: float, rank: int | None = None) -> None:
        """Hang under a name that a stack shows."""
        self.native_sleep(seconds, rank)

    def unportable(self) -> Any:
        """Return what no other process can have."""
        return threading.Lock()

    def zeros(self, size: int) -> bytes:
        """So many bytes."""
        return bytes(size)

    def length(self, data: Any) -> int:
        """How much has arrived."""
        return len(data)

    def have_child(self) -> int:
        """Start a process of its own, which would sleep for a minute; its pid."""
        command = [sys.executable, "-S", "-c", "import time; time.sleep(60)"]
        return subprocess.Popen(command, stdin=subprocess.DEVNULL).pid  # noqa: S603 - our own words

    def complain(self, text: str) -> None:
        """Write to the standard error of the process, past Python's own buffers."""
        os.write(2, text.encode())

    def join_group(self, backend: str = "gloo") -> int:
        """Join the ranks by ``torch.distributed``; the sum of all ranks, which proves it."""
        import torch

        here, distributed = self.context, _distributed()
        distributed.init_process_group(
            backend, init_method=here.distributed_init_method, rank=here.rank, world_size=here.world_size
        )
        total = torch.tensor([float(here.rank)])
        distributed.all_reduce(total)
        return int(total.item())

    def barrier(self, raising_rank: int | None = None, dying_rank: int | None = None) -> None:
        """Meet all ranks, but for one that raises, or dies."""
        if raising_rank == self.context.rank:
            raise ValueError(f"rank {raising_rank} came to nothing")
        self.die("SIGKILL", -1 if dying_rank is None else dying_rank)
        _distributed().barrier()


def _distributed() -> Any:
    return importlib.import_module("torch.distributed")
