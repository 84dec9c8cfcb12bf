from __future__ import annotations

import asyncio
import contextlib
import threading

import anyio
import anyio.lowlevel
import pytest

from aexec.actor.finding import describe_here, find_runtime
from aexec.actor.runtime import Interrupted

pytestmark = pytest.mark.anyio


@pytest.fixture
async def runtime():
    runtime = find_runtime()
    await runtime.open()
    yield runtime
    await runtime.close()


async def test_a_runtime_names_its_loop(runtime, anyio_backend_name):
    """The loop that runs here is found, and printed by kind and identity."""
    assert str(runtime).startswith(anyio_backend_name)
    assert describe_here() == str(runtime)
    assert runtime.is_here


async def test_a_runtime_knows_that_it_is_not_here(runtime):
    """From a thread without a loop, nothing is here."""
    seen: list[bool | str] = []
    thread = threading.Thread(target=lambda: seen.extend([runtime.is_here, describe_here()]), name="apart")
    thread.start()
    await anyio.to_thread.run_sync(thread.join)
    assert seen == [False, "thread 'apart', which runs no loop"]


async def test_a_promise_gives_its_value_or_its_error(runtime):
    """Before or after it is awaited."""
    for early in (True, False):
        good, bad = runtime.promise(), runtime.promise()
        async with anyio.create_task_group() as tasks:

            async def wait(good=good, bad=bad) -> None:
                assert await good == 1
                with pytest.raises(ValueError, match="no"):
                    await bad

            if early:
                tasks.start_soon(wait)
                await anyio.wait_all_tasks_blocked()
            assert not good.done()
            good.set_result(1)
            bad.set_exception(ValueError("no"))
            if not early:
                tasks.start_soon(wait)
        assert good.done()
        assert isinstance(bad.exception(), ValueError)


async def test_a_promise_without_waiter_is_cancelled(runtime):
    """When its waiter is cancelled, or says that it has gone, a promise is done and cancelled."""
    waited, left = runtime.promise(), runtime.promise()
    with anyio.move_on_after(0.001):
        await waited
    left.cancel()
    assert (waited.done(), waited.cancelled(), left.done(), left.cancelled()) == (True,) * 4


async def test_a_section_is_cut_short_and_its_task_goes_on(runtime):
    """Interrupted tells of it; the same task can run the next stretch."""
    section = runtime.section()
    ended: list[str] = []

    async def stretch() -> None:
        try:
            await anyio.sleep_forever()
        finally:
            ended.append("ended")

    async def task() -> None:
        for _ in range(2):
            with pytest.raises(Interrupted):
                await section.run(stretch())

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(task)
        for number in (1, 2):
            await anyio.wait_all_tasks_blocked()
            assert section.active
            section.interrupt()
            with anyio.fail_after(5):
                while len(ended) < number:
                    await anyio.lowlevel.checkpoint()
    assert not section.active


async def test_a_section_can_be_cut_short_before_it_begins(runtime):
    """Its coroutine is then closed and never runs; the stretch after it does."""
    section = runtime.section()

    async def value() -> int:
        return 1

    section.interrupt()
    with pytest.raises(Interrupted):
        await section.run(value())
    assert await section.run(value()) == 1


@pytest.mark.parametrize(
    "anyio_backend", [("asyncio", {}), ("asyncio", {"use_uvloop": True})], ids=["asyncio", "uvloop"]
)
async def test_who_swallows_an_interruption_keeps_his_value(runtime):
    """A stretch that ends on its own terms is not reported as cut short, and leaves no cancellation behind."""
    section = runtime.section()
    asyncio.get_running_loop().call_soon(section.interrupt)

    async def stretch() -> str:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(60)
        return "on its own terms"

    assert await section.run(stretch()) == "on its own terms"
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0


async def test_calls_come_later_and_can_be_called_off(runtime):
    """call_later calls in its time, on the loop, unless it is cancelled."""
    called: list[str] = []
    runtime.call_later(0.001, lambda: called.append("first"))
    runtime.call_later(0.002, lambda: called.append("never")).cancel()
    runtime.call_later(0.2, lambda: called.append("second"))
    with anyio.fail_after(5):
        while len(called) < 2:
            await anyio.lowlevel.checkpoint()
    assert called == ["first", "second"]
