"""What every test gets: a loop to run on, which nothing may block; aexec's own plugin looks for leaks."""

from __future__ import annotations

import gc
import logging
import os
import sys
from collections.abc import Generator, Iterator

import pytest
import structlog
from blockbuster import BlockBuster
from hypothesis import settings

pytest_plugins = ("deadline", "ray_session")  # in tests/plugins

# Tensors as small as here are computed by one thread in a quarter of the time: several wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Choose with HYPOTHESIS_PROFILE=nightly, or --hypothesis-profile=nightly, which comes later and wins.
settings.register_profile("ci", max_examples=100, deadline=None, print_blob=True)
settings.register_profile("nightly", parent=settings.get_profile("ci"), max_examples=10_000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))

# The calls of os. that it knows are of microseconds, as a stat is.
WATCHED = [call for name, call in BlockBuster("aexec").functions.items() if not name.startswith("os.")]


class Imported:
    """Torch, transformers and the like are here to stay: to look through them takes each collection a third of a second."""

    MANY = 50  # modules

    def __init__(self) -> None:
        self._num_modules = 0

    def freeze(self) -> None:
        """Leave all that is there out of collections, if much was imported since the last time."""
        if len(sys.modules) > self._num_modules + self.MANY:
            gc.collect()
            gc.freeze()
            self._num_modules = len(sys.modules)


imported = Imported()


def pytest_collection_finish() -> None:
    """Most is imported by now."""
    imported.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None]:
    """Some of it is imported by tests: between two modules, as what a module's fixtures have is still to go."""
    yield
    if nextitem is None or nextitem.path != item.path:
        imported.freeze()


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    """Async tests run on asyncio; tests of the core say otherwise in their own conftest."""
    return "asyncio"


@pytest.fixture(autouse=True)
def nothing_blocks_the_loop() -> Iterator[None]:
    """A call of aexec that would stop the event loop raises ``BlockingError`` where it stands."""
    for call in WATCHED:
        call.activate()
    yield
    for call in WATCHED:
        call.deactivate()


@pytest.fixture(autouse=True)
def logging_as_it_was() -> Iterator[None]:
    """The logger of aexec has after a test what it had before, and structlog is as if nobody had configured it."""
    structlog.reset_defaults()
    logger = logging.getLogger("aexec")
    handlers, level, propagate = list(logger.handlers), logger.level, logger.propagate
    yield
    logger.handlers[:], logger.propagate = handlers, propagate
    logger.setLevel(level)
    structlog.reset_defaults()


@pytest.fixture(autouse=True)
def uncaught_errors_go_where_they_went() -> Iterator[None]:
    """The hook for them is after a test what it was before: torch replaces it as ranks meet, Ray as it is imported."""
    before = sys.excepthook
    yield
    sys.excepthook = before
