"""Steps whose halves are asked for in one turn of the loop: one message to each rank, and no promise less."""

from __future__ import annotations

import asyncio
import os
import signal

import anyio
import pytest

from aexec.errors import WorkerDied
from aexec.executor.lines import pairing
from aexec.messages.step import ExecuteModel, StepId
from aexec.testing.workers import StepProbeWorker

pytestmark = pytest.mark.anyio

USUAL = 16  # steps after which a launch waits for its sampling


@pytest.fixture
def paired(opening, monkeypatch):
    """Makes an executor whose driver counts as one that asks for both halves at once, however busy this machine is."""
    monkeypatch.setattr(pairing, "_PROMPT", 30.0)
    return opening


def sent(executor):
    """Frames that went down each work line so far."""
    return [worker.work_line.statistics().sent for worker in executor._board.group._workers]


async def step(executor, number):
    """One step in one breath."""
    await executor.execute_model(ExecuteModel(StepId(number)))
    return await executor.sample_tokens(StepId(number))


async def make_usual(executor):
    for number in range(1, USUAL + 1):
        await step(executor, number)
    return USUAL + 1


async def logs(executor):
    return [[tuple(entry) for entry in log] for log in await executor.collective_rpc("read_log")]


def done(*numbers):
    """What the log of a rank says of steps."""
    return [(what, number) for number in numbers for what in ("execute", "executed", "sample")]


@pytest.mark.parametrize("ranks", [1, 2])
async def test_a_step_in_one_breath_is_one_frame_to_each_rank(paired, ranks):
    """With the results and the order of any other."""
    async with paired(StepProbeWorker, ranks=ranks) as executor:
        first = await make_usual(executor)
        before = sent(executor)
        for number in range(first, first + 5):
            result = await step(executor, number)
            assert (result.step, result.output[:2]) == (number, (number, executor.output_rank))
        assert sent(executor) == [count + 5 for count in before]
        numbers = range(1, first + 5)
        assert [log[-3 * len(numbers) :] for log in await logs(executor)] == [done(*numbers)] * ranks


async def test_a_launch_alone_begins_when_its_turn_is_over(paired):
    """Its forward pass waits for nothing that the driver has yet to do."""
    async with paired(StepProbeWorker) as executor:
        number = StepId(await make_usual(executor))
        before = sent(executor)
        await executor.execute_model(ExecuteModel(number, {"seconds": 0.3}))
        assert all(worker.work_line.is_holding for worker in executor._board.group._workers)
        await asyncio.sleep(0)
        assert sent(executor) == [count + 1 for count in before]
        with anyio.fail_after(10):
            while {rank.phase for rank in (await executor.check_health()).ranks} != {"execute_model"}:
                pass
        assert (await executor.sample_tokens(number)).step == number


async def test_a_call_between_the_halves_runs_between_them(paired):
    """On all ranks, though all three were asked for in one turn."""
    async with paired(StepProbeWorker) as executor:
        number = StepId(await make_usual(executor))
        asked = [
            executor.execute_model(ExecuteModel(number)),
            executor.collective_rpc("note", (("between", number),)),
            executor.sample_tokens(number),
        ]
        *_, result = await asyncio.gather(*asked)
        assert result.step == number
        order = [("execute", number), ("executed", number), ("between", number), ("sample", number)]
        assert [log[-4:] for log in await logs(executor)] == [order] * 2


async def test_a_call_on_one_rank_between_the_halves_keeps_their_order(paired):
    """That rank has three messages, the other one or two."""
    async with paired(StepProbeWorker) as executor:
        number = StepId(await make_usual(executor))
        await asyncio.gather(
            executor.execute_model(ExecuteModel(number)),
            executor.collective_rpc("note", (("between", number),), ranks=[1]),
            executor.sample_tokens(number),
        )
        first, second = await logs(executor)
        assert first[-3:] == done(number)
        assert second[-4:] == [("execute", number), ("executed", number), ("between", number), ("sample", number)]


async def test_a_rank_that_dies_between_the_halves_is_the_steps_error(paired):
    """Of its sampling, as the launch was answered; and of each later one."""
    async with paired(StepProbeWorker) as executor:
        number = StepId(await make_usual(executor))
        await executor.execute_model(ExecuteModel(number))
        os.kill(executor.ranks[1].pid, signal.SIGKILL)
        with anyio.fail_after(10), pytest.raises(WorkerDied) as caught:
            await executor.sample_tokens(number)
        assert caught.value.rank == 1


async def test_a_driver_that_leaves_between_the_halves_leaves_a_launched_step(paired):
    """It holds its place until it is sampled, by whoever."""
    async with paired(StepProbeWorker) as executor:
        number = StepId(await make_usual(executor))

        async def leaves():
            await executor.execute_model(ExecuteModel(number))
            asyncio.current_task().cancel()
            await asyncio.sleep(10)

        with pytest.raises(asyncio.CancelledError):
            await asyncio.ensure_future(leaves())
        assert executor.statistics().steps_in_flight == 1
        assert (await executor.sample_tokens(number)).step == number
        assert (await step(executor, number + 1)).step == number + 1
        assert executor.statistics().steps_in_flight == 0


async def test_a_sampling_whose_asker_leaves_is_done_all_the_same(paired):
    """Its step is through on all ranks, and the next one follows."""
    async with paired(StepProbeWorker) as executor:
        number = StepId(await make_usual(executor))
        await executor.execute_model(ExecuteModel(number, {"seconds": 0.1}))
        sampling = asyncio.ensure_future(executor.sample_tokens(number))
        await asyncio.sleep(0)
        sampling.cancel()
        assert (await step(executor, number + 1)).step == number + 1
        assert sampling.cancelled()
        assert [log[-6:] for log in await logs(executor)] == [done(number, number + 1)] * 2
        assert executor.statistics().steps_in_flight == 0
