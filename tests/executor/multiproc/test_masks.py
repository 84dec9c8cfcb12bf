"""The bitmask of a step goes where the step is sampled, and nowhere else."""

from __future__ import annotations

import numpy as np
import pytest

from aexec.messages.batch import GrammarOutput
from aexec.messages.step import ExecuteModel, StepId
from aexec.testing.workers import ConnectorProbeWorker, StepProbeWorker

pytestmark = pytest.mark.anyio


async def test_only_the_rank_that_samples_gets_the_bitmask(opening):
    """SO-06, STEP-06: the others are told to go on, in the same order, with and without one."""
    async with opening(ConnectorProbeWorker, ranks=3) as executor:
        for number in (1, 2, 3):
            bitmask = np.full((number, 1), number, dtype=np.int32)
            grammar = GrammarOutput(request_ids=[f"r{row}" for row in range(number)], bitmask=bitmask)
            await executor.execute_model(ExecuteModel(StepId(number)))
            await executor.sample_tokens(StepId(number), grammar if number != 2 else None)
        logs = await executor.collective_rpc(lambda worker: [entry for entry in worker.log if entry[0] == "sample"])
        assert executor.statistics().steps_in_flight == 0
    assert logs[executor.output_rank] == [("sample", 1, 1), ("sample", 2, None), ("sample", 3, 3)]
    assert logs[0] == logs[1] == [("sample", 1, None), ("sample", 2, None), ("sample", 3, None)]


async def test_a_large_bitmask_arrives_whole(opening):
    """One that does not fit into a frame travels beside it."""
    bitmask = np.arange(256 * 1536, dtype=np.int32).reshape(256, 1536)
    grammar = GrammarOutput(request_ids=[str(row) for row in range(256)], bitmask=bitmask)
    async with opening(StepProbeWorker) as executor:
        await executor.execute_model(ExecuteModel(StepId(1)))
        result = await executor.sample_tokens(StepId(1), grammar)
    assert result.output == (1, executor.output_rank, bitmask.tolist())
