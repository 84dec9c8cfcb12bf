from __future__ import annotations

import asyncio
import contextvars

import anyio
import pytest

from aexec import ExecuteModel, ExecutorConfig, open_executor
from aexec.errors import ProtocolError
from aexec.executor.direct import DirectReply
from aexec.messages.step import ForwardLaunched
from aexec.testing.workers import StepProbeWorker

pytestmark = pytest.mark.anyio


def new_reply():
    return DirectReply(asyncio.get_running_loop())


async def result_of(reply):
    return await reply


async def test_a_reply_that_is_there_is_not_waited_for():
    """Nothing else has its turn."""
    reply = new_reply()
    reply.resolve("value")
    others = []
    asyncio.get_running_loop().call_soon(others.append, 1)
    assert await result_of(reply) == "value"
    assert not others


async def test_a_reply_that_comes_later_wakes_its_asker():
    """Be it a value or an error."""
    for end, expected in ((DirectReply.resolve, 7), (DirectReply.fail, ProtocolError("no"))):
        reply = new_reply()
        asyncio.get_running_loop().call_soon(end, reply, expected)
        found = await asyncio.gather(result_of(reply), return_exceptions=True)
        assert found == [expected]


async def test_whoever_waits_goes_on_in_the_turn_of_the_answer():
    """Before anything else that is ready has its turn."""
    reply, seen = new_reply(), []

    async def ask():
        seen.append(await reply)
        seen.append(asyncio.current_task())

    asker = asyncio.ensure_future(ask())
    await asyncio.sleep(0)
    loop = asyncio.get_running_loop()
    loop.call_soon(reply.resolve, "value")
    loop.call_soon(seen.append, "others")
    await asyncio.wait([asker])
    assert seen == ["value", asker, "others"]


async def test_an_answer_that_another_task_gives_waits_for_its_turn():
    """Two tasks never run at once."""
    reply, seen = new_reply(), []

    async def ask():
        seen.append(await reply)

    asker = asyncio.ensure_future(ask())
    await asyncio.sleep(0)
    reply.resolve("value")
    assert not seen
    await asyncio.wait([asker])
    assert seen == ["value"]


async def test_the_asker_keeps_its_own_context():
    """That of the answer is none of its business."""
    variable = contextvars.ContextVar("variable")
    reply, seen = new_reply(), []

    async def ask():
        variable.set("asker")
        await reply
        seen.append(variable.get())

    asker = asyncio.ensure_future(ask())
    await asyncio.sleep(0)
    variable.set("answer")
    asyncio.get_running_loop().call_soon(reply.resolve, 1)
    await asyncio.wait([asker])
    assert seen == ["asker"]


async def test_a_time_limit_ends_the_wait():
    """As with whatever else a task waits for."""
    reply, left = new_reply(), []
    reply.on_cancel(lambda: left.append(1))
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.001):
            await reply
    assert left == [1]
    with anyio.move_on_after(0.001) as scope:
        await new_reply()
    assert scope.cancelled_caught


async def test_whoever_leaves_says_so_once():
    """A reply that comes after that is dropped."""
    reply, left = new_reply(), []
    reply.on_cancel(lambda: left.append(1))
    asker = asyncio.ensure_future(result_of(reply))
    await asyncio.sleep(0)
    asker.cancel()
    await asyncio.wait([asker])
    reply.resolve("late")
    assert asker.cancelled()
    assert left == [1]


async def test_an_asker_cancelled_after_the_reply_has_not_left():
    """The call has had its end."""
    reply, left = new_reply(), []
    reply.on_cancel(lambda: left.append(1))
    asker = asyncio.ensure_future(result_of(reply))
    await asyncio.sleep(0)
    reply.resolve("value")
    asker.cancel()
    await asyncio.wait([asker])
    assert not left


async def test_a_reply_can_be_printed():
    """It says where it is."""
    reply = new_reply()
    assert repr(reply) == "<DirectReply: new>"
    reply.resolve(1)
    assert repr(reply) == "<DirectReply: answered>"


async def test_a_launch_that_can_go_is_answered_in_its_own_turn():
    """It waits for nothing, and nothing else has its turn."""
    async with open_executor(ExecutorConfig(worker_cls=StepProbeWorker)) as executor:
        await executor.collective_rpc("echo", (1,))
        others = []
        asyncio.get_running_loop().call_soon(others.append, 1)
        assert await executor.execute_model(ExecuteModel(1, None, 1)) == ForwardLaunched(1)
        assert not others
        await executor.sample_tokens(1)


async def test_calls_that_find_the_actor_at_work_keep_their_order():
    """What came first through the mailbox is sent first."""
    async with open_executor(ExecutorConfig(worker_cls=StepProbeWorker)) as executor:
        paused = asyncio.ensure_future(executor.pause(mode="keep"))
        await asyncio.sleep(0)
        step = asyncio.ensure_future(executor.execute_model(ExecuteModel(1, None, 1)))
        await paused
        await asyncio.sleep(0)
        assert executor.statistics().steps_waiting == 1
        await executor.resume()
        await step
        await executor.sample_tokens(1)
