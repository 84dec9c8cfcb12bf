"""Executors of worker processes for tests, and the worker class that ends in every way there is."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time

import pytest

from aexec import ExecutorConfig, ParallelConfig, open_executor
from aexec.testing.workers import StepProbeWorker


class DyingWorker(StepProbeWorker):
    """Ends on one rank, as told; shipped by value, for no worker can import a test."""

    def die(self, how, rank=0):
        if rank != self.context.rank:
            time.sleep(30)
        if how == "exit 0":
            os._exit(0)
        if how == "abort":
            os.abort()
        if how == "null":
            ctypes.string_at(0)
        os.kill(os.getpid(), getattr(signal, how))

    def sleep_holding_the_lock(self, seconds):
        """In native code that does not let go of the interpreter."""
        ctypes.PyDLL(None).sleep(int(seconds))

    def ignore_term(self):
        """From a plain method: the main thread."""
        signal.signal(signal.SIGTERM, signal.SIG_IGN)

    def environment(self):
        return dict(os.environ)

    def say(self, text):
        sys.stdout.write(text + "\n")
        os.write(2, b"native words\n")


@pytest.fixture
def opening(leak_check):
    """Makes an executor of two ranks, or as many as are asked for."""

    def open_it(worker_cls=DyingWorker, ranks=2, progress=None, **settings):
        layout = ParallelConfig(pipeline_parallel_size=ranks)
        settings = {"worker_output": "none", "close_grace": 0.5} | settings
        config = ExecutorConfig(backend="mp", parallel=layout, worker_cls=worker_cls, **settings)
        return open_executor(config, progress=progress)

    return open_it
