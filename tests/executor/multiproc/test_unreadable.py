"""Steps that cannot travel, or cannot be read at the other end: they fail, and nothing else does."""

from __future__ import annotations

import os
import threading

import anyio
import numpy as np
import pytest

from aexec.errors import MessageNotDecoded, MessageNotPortable
from aexec.messages.batch import GrammarOutput
from aexec.messages.step import ExecuteModel, StepId
from aexec.testing.workers import StepProbeWorker

pytestmark = pytest.mark.anyio


def read_on(rank):
    """Nothing, but for the rank that cannot make it."""
    if os.environ["RANK"] == str(rank):
        raise ValueError(f"not on rank {rank}")


class UnreadableOn:
    """A payload that one rank cannot make."""

    def __init__(self, rank):
        self.rank = rank

    def __reduce__(self):
        return read_on, (self.rank,)


class NeverReadable:
    """A payload that no process can make."""

    def __reduce__(self):
        return int, ("no number",)


async def run(executor, number, payload=None):
    """One step, from its launch to its result."""
    await executor.execute_model(ExecuteModel(StepId(number), payload))
    return await executor.sample_tokens(StepId(number))


@pytest.mark.parametrize("payload", [threading.Lock(), {"a": threading.Lock()}])
async def test_a_step_that_could_not_be_sent_may_be_sent_again(opening, payload):
    """The ranks have not seen its id: with another payload it is launched as any other."""
    async with opening(StepProbeWorker) as executor:
        with pytest.raises(MessageNotPortable):
            await executor.execute_model(ExecuteModel(StepId(1), payload))
        with anyio.fail_after(10):
            assert (await run(executor, 1)).output[0] == 1
            assert (await run(executor, 2)).output[0] == 2
        assert executor.statistics().steps_in_flight == 0


async def test_a_sampling_that_could_not_be_sent_may_be_asked_for_again(opening):
    """The ranks wait for it, and sample in order: the step keeps its place until they have sampled it."""
    async with opening(StepProbeWorker) as executor:
        await executor.execute_model(ExecuteModel(StepId(1)))
        no_grammar = GrammarOutput(request_ids=[threading.Lock()], bitmask=np.zeros((1, 1), np.int32))
        with pytest.raises(MessageNotPortable):
            await executor.sample_tokens(StepId(1), no_grammar)
        assert executor.statistics().steps_in_flight == 1
        with anyio.fail_after(10):
            assert (await executor.sample_tokens(StepId(1))).output[0] == 1
            assert (await run(executor, 2)).output[0] == 2
        assert executor.statistics().steps_in_flight == 0


@pytest.mark.parametrize("payload", [NeverReadable(), UnreadableOn(0), UnreadableOn(1)], ids=["all", "0", "1"])
async def test_a_step_that_ranks_cannot_read_holds_up_nothing(opening, payload):
    """Neither the steps after it, nor ``async def`` methods that wait for the steps before them."""
    async with opening(StepProbeWorker) as executor:
        with pytest.raises(MessageNotDecoded):
            await run(executor, 1, payload)
        with anyio.fail_after(10):
            assert (await run(executor, 2)).output[0] == 2
            assert await executor.collective_rpc("async_echo", (3,)) == [3, 3]
        assert executor.statistics().steps_in_flight == 0


async def test_a_sampling_that_a_rank_cannot_read_holds_up_nothing(opening):
    """The rank samples its step all the same, for nobody."""
    async with opening(StepProbeWorker) as executor:
        await executor.execute_model(ExecuteModel(StepId(1)))
        grammar = GrammarOutput(request_ids=[UnreadableOn(1)], bitmask=np.zeros((1, 1), np.int32))
        with pytest.raises(MessageNotDecoded):
            await executor.sample_tokens(StepId(1), grammar)
        with anyio.fail_after(10):
            assert (await run(executor, 2)).output[0] == 2
            assert await executor.collective_rpc("async_echo", (3,)) == [3, 3]
        assert executor.statistics().steps_in_flight == 0
