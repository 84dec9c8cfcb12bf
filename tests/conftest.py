"""What every test gets: a loop to run on, and a look at what it left behind."""

from __future__ import annotations

import gc
import logging
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog
from blockbuster import BlockBuster
from hypothesis import settings

# Choose with HYPOTHESIS_PROFILE=nightly, or --hypothesis-profile=nightly, which comes later and wins.
settings.register_profile("ci", max_examples=100, deadline=None, print_blob=True)
settings.register_profile("nightly", parent=settings.get_profile("ci"), max_examples=10_000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))

PATIENCE = 5.0  # seconds that what a test stopped may take to be gone
# Threads of other people's pools that live as long as their loop, or as the process.
POOLS = ("AnyIO worker thread", "Trio thread", "asyncio_", "tqdm")


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    """Async tests run on asyncio; tests of the core say otherwise in their own conftest."""
    return "asyncio"


def _threads() -> set[str]:
    alive = {f"thread {thread.name}" for thread in threading.enumerate() if not thread.name.startswith(POOLS)}
    return {name for name in alive if "TMonitor" not in name}


def _children() -> set[str]:
    tasks = Path("/proc/self/task").glob("*/children")
    return {f"process {pid}" for task in tasks for pid in task.read_text().split()}


def _descriptors() -> set[str]:
    found = set[str]()
    for entry in os.scandir("/proc/self/fd"):
        try:
            found.add(f"fd {entry.name} to {Path(entry.path).readlink()}")
        except FileNotFoundError:
            continue  # the descriptor of this very scan
    return {name for name in found if "/proc/" not in name}


def _shared_memory() -> set[str]:
    ours = ("aexec", f"torch_{os.getpid()}")
    return {f"shared memory {entry.name}" for entry in os.scandir("/dev/shm") if entry.name.startswith(ours)}


def _belongings() -> set[str]:
    return _threads() | _children() | _descriptors() | _shared_memory()


@pytest.fixture(autouse=True)
def leaves_nothing_behind() -> Iterator[None]:
    """No test leaves a thread, a child process, a descriptor or shared memory behind."""
    if not Path("/proc/self/fd").exists():
        yield
        return
    before = _belongings()
    yield
    give_up = time.monotonic() + PATIENCE
    while left := _belongings() - before:
        if time.monotonic() > give_up:
            pytest.fail(f"left behind: {', '.join(sorted(left))}")
        gc.collect()
        threading.Event().wait(0.01)


@pytest.fixture(autouse=True)
def nothing_blocks_the_loop() -> Iterator[None]:
    """A call of aexec that would stop the event loop raises ``BlockingError`` where it stands."""
    detector = BlockBuster("aexec")
    watched = [call for name, call in detector.functions.items() if not name.startswith("os.")]
    for call in watched:  # the calls of os. that it knows are of microseconds, as a stat is
        call.activate()
    yield
    for call in watched:
        call.deactivate()


@pytest.fixture
def logging_as_it_was() -> Iterator[None]:
    """The logger of aexec has after a test what it had before, and structlog is as if nobody had configured it."""
    structlog.reset_defaults()
    logger = logging.getLogger("aexec")
    handlers, level, propagate = list(logger.handlers), logger.level, logger.propagate
    yield
    logger.handlers[:], logger.propagate = handlers, propagate
    logger.setLevel(level)
    structlog.reset_defaults()
