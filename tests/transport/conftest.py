from __future__ import annotations

from typing import Any

import pytest
import uvloop

LOOPS = {"asyncio": ("asyncio", {}), "uvloop": ("asyncio", {"use_uvloop": True})}


@pytest.fixture(scope="session", params=LOOPS.values(), ids=LOOPS.keys())
def anyio_backend(request: pytest.FixtureRequest) -> tuple[str, dict[str, Any]]:
    """Channels run on asyncio and on uvloop."""
    backend: tuple[str, dict[str, Any]] = request.param
    return backend


@pytest.fixture(scope="session", autouse=True)
def libuv_has_its_pipe() -> None:
    """Libuv opens one pipe with the first loop of a process, for good: before a test looks for leaks."""
    uvloop.new_event_loop().close()
