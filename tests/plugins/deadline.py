"""A deadline for each async test: one that hangs fails alone, with where every task of its loop stands.

The timeout of pytest-timeout, which comes later, ends the whole run.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import traceback
from collections.abc import Awaitable, Callable, Generator
from typing import Any

import anyio
import pytest
import sniffio

BEFORE = 10.0  # seconds before the timeout of pytest-timeout


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Generator[None, Any, Any]:
    """Run an async test under its deadline."""
    test = pyfuncitem.obj
    if not inspect.iscoroutinefunction(test):
        return (yield)
    pyfuncitem.obj = under_deadline(test, seconds_for(pyfuncitem))
    try:
        return (yield)
    finally:
        pyfuncitem.obj = test


def seconds_for(item: pytest.Item) -> float:
    """What the test may take, by its mark or the configuration's setting."""
    mark = item.get_closest_marker("timeout")
    limit = mark.args[0] if mark is not None else float(item.config.getini("timeout"))
    return max(limit - BEFORE, limit / 2)


def under_deadline(test: Callable[..., Awaitable[None]], seconds: float) -> Callable[..., Awaitable[None]]:
    """The test; it is cancelled after so long and fails with what its loop's tasks wait for."""

    @functools.wraps(test)
    async def limited(*args: Any, **kwargs: Any) -> None:
        stacks: list[str] = []
        timer = None
        if sniffio.current_async_library() == "asyncio":
            timer = asyncio.get_running_loop().call_later(seconds, lambda: stacks.extend(all_stacks()))
        try:
            with anyio.move_on_after(seconds + 0.1) as scope:
                await test(*args, **kwargs)
        finally:
            if timer is not None:
                timer.cancel()
        if scope.cancelled_caught:
            pytest.fail("\n".join([f"still running after {seconds:.0f} s", *stacks]), pytrace=False)

    return limited


def all_stacks() -> list[str]:
    """Where each task of the running loop stands, its innermost call last."""
    from aexec.worker.stacks import awaited_frames

    stacks = ((task.get_name(), awaited_frames(task.get_coro())) for task in asyncio.all_tasks())
    return [f"{name}:\n{''.join(traceback.format_list(frames))}" for name, frames in stacks]
