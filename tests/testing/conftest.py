from __future__ import annotations

from collections.abc import AsyncIterator
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
    """The test kit runs on asyncio, on uvloop and on trio."""
    backend: tuple[str, dict[str, Any]] = request.param
    return backend


@pytest.fixture(scope="session", autouse=True)
def libuv_has_its_pipe() -> None:
    """Libuv opens one pipe with the first loop of a process, for good: before a test looks for leaks."""
    uvloop.new_event_loop().close()


@pytest.fixture
async def system(request: pytest.FixtureRequest) -> AsyncIterator[ActorSystem]:
    """An open system in real time; a test that has ``virtual_clock`` has it in virtual time."""
    in_virtual_time = "virtual_clock" in request.fixturenames
    clock = request.getfixturevalue("virtual_clock") if in_virtual_time else None
    async with ActorSystem(name="test", timeout=10.0, clock=clock) as system:
        yield system
