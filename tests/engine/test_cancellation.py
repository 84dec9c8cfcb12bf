"""Whoever calls an operation of the engine and is cancelled, or gives up: the engine is not held for them."""

from __future__ import annotations

import asyncio
from functools import partial

import anyio
import pytest
from anyio import from_thread

from aexec import AsyncLLM, SamplingParams
from aexec.errors import CallTimeout, ModelNotReady, UnknownMethod

pytestmark = pytest.mark.anyio

GREEDY = SamplingParams(max_tokens=12, temperature=0.0)
PROMPT = [72, 101, 108]
OPERATIONS = {
    "pause": lambda llm: llm.pause(),
    "sleep": lambda llm: llm.sleep(),
    "update_weights": lambda llm: llm.update_weights({"seed": 7}),
    "load_weights": lambda llm: llm.load_weights(),
}


async def settled():
    """All messages on their way have arrived."""
    for _ in range(50):
        await asyncio.sleep(0)


async def held_by(llm):
    return (await llm.statistics()).held_by


async def without(method, *args, **kwargs):
    raise UnknownMethod(method, "Worker", ())


@pytest.mark.parametrize("what", OPERATIONS)
async def test_an_operation_that_waits_for_a_step_holds_nothing_once_it_is_cancelled(engine, monkeypatch, what):
    """It had the hold, and had not been told: requests go on, and the hold of another one is not touched."""
    async with engine() as (llm, executor):
        monkeypatch.setattr(executor, "collective_rpc", without)
        undisturbed = (await llm.complete(PROMPT, GREEDY)).token_ids
        executor.hold()
        request = asyncio.create_task(llm.complete(PROMPT, GREEDY))
        await executor.held.wait()
        pause = asyncio.create_task(llm.pause("finish"))
        await settled()
        operation = asyncio.create_task(OPERATIONS[what](llm))
        await settled()
        assert len(await held_by(llm)) == (1 if what == "pause" else 2)
        operation.cancel()
        with pytest.raises(asyncio.CancelledError):
            await operation
        assert await held_by(llm) == ("pause",)
        assert len(llm._frontend.driver._cell.actor._holders) == 1
        await llm.resume()
        executor.release()
        with anyio.fail_after(10.0):
            await pause
            assert (await request).token_ids == undisturbed
        assert await held_by(llm) == ()


async def cancelled(kind, make):
    """Run the coroutine of ``make``, which is given what cancels it."""
    if kind == "anyio":
        with anyio.CancelScope() as scope:
            await make(scope.cancel)
        return
    task = asyncio.current_task()
    with pytest.raises(asyncio.CancelledError):
        await make(task.cancel)
    if hasattr(task, "uncancel"):
        task.uncancel()


@pytest.mark.parametrize("kind", ["anyio", "asyncio"])
async def test_a_cancelled_update_is_given_up(kind):
    """Nothing is held, the weights are what they were, and the next update is taken."""
    async with AsyncLLM("dummy") as llm:
        before = (await llm.complete(PROMPT, GREEDY)).token_ids

        def weights(cancel):
            from_thread.run_sync(cancel)
            yield from ()

        with anyio.fail_after(20.0):
            await cancelled(kind, lambda cancel: llm.update_weights(weights(cancel)))
            assert await held_by(llm) == ()
            assert (await llm.complete(PROMPT, GREEDY)).token_ids == before
            await llm.update_weights({"seed": 7})
            assert (await llm.complete(PROMPT, GREEDY)).token_ids != before


async def test_an_update_that_is_refused_for_another_one_leaves_it_alone():
    """The second is told so; the first goes on, under its own hold, to its end."""
    async with AsyncLLM("dummy") as llm:
        before = (await llm.complete(PROMPT, GREEDY)).token_ids
        seen = []

        async def second():
            with pytest.raises(ModelNotReady):
                await llm.update_weights({"seed": 8})
            seen.append(await held_by(llm))

        def weights():
            from_thread.run(second)
            yield "seed", 7

        await llm.update_weights(weights())
        assert seen == [("new weights",)]
        assert await held_by(llm) == ()
        assert (await llm.complete(PROMPT, GREEDY)).token_ids != before


def hang_after(monkeypatch, executor, method, *, is_done):
    """``method`` never ends for its caller, who is told when it has got that far."""
    inner, arrived = getattr(executor, method), asyncio.Event()

    async def hang(*args):
        if is_done:
            await inner(*args)
        arrived.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(executor, method, hang)
    return arrived


@pytest.mark.parametrize(("method", "is_done"), [("sleep", False), ("wake_up", True)])
async def test_whoever_leaves_a_model_that_is_awake_holds_nothing(monkeypatch, method, is_done):
    """A sleep that never came to be, or a wake-up that did: requests go on."""
    async with AsyncLLM("dummy") as llm:
        before = (await llm.complete(PROMPT, GREEDY)).token_ids
        if method == "wake_up":
            await llm.sleep()
        arrived = hang_after(monkeypatch, llm.executor, method, is_done=is_done)
        operation = asyncio.create_task(getattr(llm, method)())
        with anyio.fail_after(20.0):
            await arrived.wait()
            operation.cancel()
            with pytest.raises(asyncio.CancelledError):
                await operation
            assert await held_by(llm) == ()
            assert (await llm.complete(PROMPT, GREEDY)).token_ids == before


async def test_whoever_leaves_a_model_that_sleeps_can_wake_it(monkeypatch):
    """The sleep was done: requests wait for the wake-up."""
    async with AsyncLLM("dummy") as llm:
        before = (await llm.complete(PROMPT, GREEDY)).token_ids
        arrived = hang_after(monkeypatch, llm.executor, "sleep", is_done=True)
        operation = asyncio.create_task(llm.sleep())
        with anyio.fail_after(20.0):
            await arrived.wait()
            operation.cancel()
            with pytest.raises(asyncio.CancelledError):
                await operation
            assert await held_by(llm) == ("sleep",)
            await llm.wake_up()
            assert (await llm.complete(PROMPT, GREEDY)).token_ids == before


async def test_a_sleep_that_the_workers_do_not_know_holds_nothing(engine, monkeypatch):
    """Nothing sleeps: the error is the caller's, and requests go on."""
    async with engine() as (llm, executor):
        monkeypatch.setattr(executor, "collective_rpc", without)
        monkeypatch.setattr(executor, "sleep", partial(without, "sleep"), raising=False)
        with pytest.raises(UnknownMethod, match="no method 'sleep'"):
            await llm.sleep()
        assert len((await llm.complete(PROMPT, GREEDY)).token_ids) == 12


async def test_a_drain_that_was_given_up_is_not_remembered(engine):
    """However often it is tried while a request runs."""
    async with engine() as (llm, executor):
        executor.hold()
        request = asyncio.create_task(llm.complete(PROMPT, GREEDY))
        await executor.held.wait()
        for _ in range(3):
            with pytest.raises(CallTimeout):
                await llm.drain(timeout=0.001)
        assert llm._frontend.driver._cell.actor._drainers == []
        executor.release()
        await request
        await llm.drain(timeout=10.0)
