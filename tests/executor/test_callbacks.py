from __future__ import annotations

import asyncio

import pytest

from aexec.errors import WorkerDied
from aexec.executor.callbacks import FailureCallbacks

pytestmark = pytest.mark.anyio

DEATH = WorkerDied(0, 1, 2)


async def test_plain_and_async_callbacks_run_to_their_end():
    """G63: and an error in one does not stop the others."""
    callbacks, heard = FailureCallbacks(), []

    async def slow(failure):
        await asyncio.sleep(0.01)
        heard.append(("async", failure))

    def broken(failure):
        raise RuntimeError("no")

    for callback in (broken, slow, lambda failure: heard.append(("plain", failure))):
        callbacks.add(callback)
    assert repr(callbacks) == "<FailureCallbacks: 3 waiting, 0 running, failure None>"
    callbacks.fire(DEATH)
    await callbacks.drain(5.0)
    assert heard == [("plain", DEATH), ("async", DEATH)]


async def test_a_callback_that_comes_late_is_called_at_once():
    """The failure is past, and not forgotten."""
    callbacks, heard = FailureCallbacks(), []
    callbacks.fire(DEATH)
    callbacks.add(heard.append)
    await callbacks.drain(5.0)
    assert heard == [DEATH]


async def test_a_callback_that_never_ends_is_cancelled():
    """Closing has a budget."""
    callbacks, ended = FailureCallbacks(), []

    async def hang(failure):
        try:
            await asyncio.sleep(30)
        except asyncio.CancelledError:
            ended.append(failure)
            raise

    callbacks.add(hang)
    callbacks.fire(DEATH)
    await callbacks.drain(0.02)
    await asyncio.sleep(0)
    assert ended == [DEATH]
    await callbacks.drain(0.02)
