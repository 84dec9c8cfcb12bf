from __future__ import annotations

import asyncio
import threading

import pytest

from aexec.errors import CallTimeout
from aexec.executor.ray import api
from aexec.executor.ray.api import off_loop
from aexec.executor.ray.shutdown import end_actors

pytestmark = pytest.mark.anyio


async def test_a_blocking_call_leaves_the_loop_alone():
    """It has a thread of its own, and its result and its errors come as they are."""

    def where(error=None):
        if error is not None:
            raise error
        return threading.current_thread()

    thread = await off_loop("look", where, timeout=5.0)
    assert thread is not threading.current_thread()
    assert thread.name == "aexec-ray-look"
    with pytest.raises(TimeoutError, match="Ray's own"):
        await off_loop("look", where, TimeoutError("Ray's own"), timeout=5.0)


async def test_a_call_past_its_limit_says_what_it_was():
    """The thread goes on; what came of it is undone, for nobody knows of it."""
    go, undone = threading.Event(), threading.Event()
    given = []

    def undo(value):
        given.append(value)
        undone.set()

    with pytest.raises(CallTimeout, match=r"ray: init passed its limit of 0.01 s"):
        await off_loop("init", lambda: go.wait() and "made", timeout=0.01, undo=undo)
    go.set()
    assert await asyncio.to_thread(undone.wait, 5.0)
    assert given == ["made"]


async def test_a_cancelled_call_is_undone():
    """At once for whoever waits, and in the end for what was made."""
    go, undone = threading.Event(), threading.Event()
    waiting = asyncio.ensure_future(off_loop("init", go.wait, timeout=5.0, undo=lambda _: undone.set()))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert not undone.is_set()
    go.set()
    assert await asyncio.to_thread(undone.wait, 5.0)


class NoActor:
    """Whatever is asked of its handle connects the process."""

    def __getattr__(self, name):
        raise AssertionError(name)


async def test_a_process_that_somebody_has_disconnected_is_not_connected_again(monkeypatch):
    """Ray would start a cluster of its own to be told that an actor, which is gone with the last one, is to end."""
    monkeypatch.setattr(api, "is_connected", bool)
    monkeypatch.setattr("aexec.executor.ray.shutdown.is_connected", bool)
    monkeypatch.setattr(api, "ray", NoActor)
    await asyncio.wait_for(end_actors([NoActor()], 5.0), 5.0)
