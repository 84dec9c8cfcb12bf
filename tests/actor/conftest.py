from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import uvloop

from aexec.actor import ActorSystem

LOOPS = {
    "asyncio": ("asyncio", {"debug": True}),
    "uvloop": ("asyncio", {"use_uvloop": True}),
    "trio": ("trio", {}),
}


@pytest.fixture(scope="session", params=LOOPS.values(), ids=LOOPS.keys())
def anyio_backend(request: pytest.FixtureRequest) -> tuple[str, dict[str, Any]]:
    """The core runs on asyncio, on uvloop and on trio."""
    backend: tuple[str, dict[str, Any]] = request.param
    return backend


@pytest.fixture(scope="session", autouse=True)
def libuv_has_its_pipe() -> None:
    """Libuv opens one pipe with the first loop of a process, for good: before a test looks for leaks."""
    uvloop.new_event_loop().close()


@contextmanager
def _no_more_tasks() -> Iterator[None]:
    def refuse(*_: Any, **__: Any) -> Any:
        raise RuntimeError("no more tasks")

    loop = asyncio.get_running_loop()
    loop.set_task_factory(refuse)
    try:
        yield
    finally:
        loop.set_task_factory(None)


@pytest.fixture
def no_more_tasks() -> Any:
    """Inside, the loop makes no task, as uvloop 0.23 does with Python 3.13.0's eager task factory."""
    return _no_more_tasks


@pytest.fixture
async def system(request: pytest.FixtureRequest) -> AsyncIterator[ActorSystem]:
    """An open system, closed by a task that may be another than the test's.

    A test that has the fixture ``virtual_clock`` has it in virtual time: there no deadline
    passes before all that can happen first has happened, however busy the machine is.
    """
    in_virtual_time = "virtual_clock" in request.fixturenames
    clock = request.getfixturevalue("virtual_clock") if in_virtual_time else None
    system = ActorSystem(name="test", timeout=10.0, clock=clock)
    await system.open()
    yield system
    await system.aclose()
    assert system.statistics().actors == 0
