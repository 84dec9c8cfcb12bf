from __future__ import annotations

import asyncio

import pytest

from aexec import ExecuteModel, ExecutorConfig, open_executor
from aexec.errors import ProtocolError
from aexec.executor.direct import DirectReply
from aexec.messages.step import ForwardLaunched
from aexec.testing.workers import StepProbeWorker

pytestmark = pytest.mark.anyio


def result_of(reply):
    return reply.result(asyncio.get_running_loop())


async def test_a_reply_that_is_there_is_not_waited_for():
    """Nothing else has its turn."""
    reply = DirectReply()
    reply.resolve("value")
    others = []
    asyncio.get_running_loop().call_soon(others.append, 1)
    assert await result_of(reply) == "value"
    assert not others


async def test_a_reply_that_comes_later_wakes_its_asker():
    """Be it a value or an error."""
    for end, expected in ((DirectReply.resolve, 7), (DirectReply.fail, ProtocolError("no"))):
        reply = DirectReply()
        asyncio.get_running_loop().call_soon(end, reply, expected)
        found = await asyncio.gather(result_of(reply), return_exceptions=True)
        assert found == [expected]


async def test_whoever_leaves_says_so_once():
    """A reply that comes after that is dropped."""
    reply, left = DirectReply(), []
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
    reply, left = DirectReply(), []
    reply.on_cancel(lambda: left.append(1))
    asker = asyncio.ensure_future(result_of(reply))
    await asyncio.sleep(0)
    reply.resolve("value")
    asker.cancel()
    await asyncio.wait([asker])
    assert not left


async def test_a_reply_can_be_printed():
    """It says where it is."""
    reply = DirectReply()
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
