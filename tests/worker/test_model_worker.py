from __future__ import annotations

import pytest

from aexec import ExecuteModel, ExecutorConfig, open_executor
from aexec.config import CacheConfig, ModelConfig
from aexec.errors import ConfigError
from aexec.messages.batch import NewRequestData, SchedulerOutput
from aexec.messages.request import SamplingParams

pytestmark = pytest.mark.anyio


def open_dummy(**settings):
    kwargs = {"model_config": ModelConfig(model="dummy"), "cache_config": CacheConfig(num_blocks=8)}
    return open_executor(ExecutorConfig(worker_kwargs=kwargs, **settings))


def one_request():
    request = NewRequestData(
        request_id="r",
        token_ids=[1, 2, 3],
        num_prompt_tokens=3,
        block_ids=[1],
        num_computed_tokens=0,
        sampling=SamplingParams(temperature=0.0),
    )
    return SchedulerOutput(new=[request], num_scheduled_tokens={"r": 3})


async def test_the_default_worker_runs_a_model():
    """From a SchedulerOutput to a token, in two phases."""
    async with open_dummy() as executor:
        (info,) = await executor.collective_rpc("model_info")
        assert (info.architecture, info.num_blocks) == ("Dummy", 8)
        await executor.execute_model(ExecuteModel(1, one_request(), 3))
        result = await executor.sample_tokens(1)
        assert result.output.request_ids == ["r"]
        ((token,),) = result.output.sampled_token_ids
        assert 0 <= token < info.vocab_size


async def test_a_step_without_tokens_only_updates_requests():
    """Its output is empty."""
    async with open_dummy() as executor:
        await executor.execute_model(ExecuteModel(1, one_request(), 3))
        await executor.sample_tokens(1)
        result = await executor.execute_model(ExecuteModel(2, SchedulerOutput(finished_request_ids=["r"]), 0))
        assert result.output.request_ids == []


async def test_it_runs_scheduler_outputs_only():
    """Another payload is refused with what to do."""
    async with open_dummy() as executor:
        await executor.execute_model(ExecuteModel(1, {"batch": 1}, 3))
        with pytest.raises(ConfigError, match="step 1 carries dict: ModelWorker runs a SchedulerOutput"):
            await executor.sample_tokens(1)


async def test_a_model_has_to_be_named():
    """The error shows the signature of the worker class."""
    with pytest.raises(ConfigError, match="missing a required argument: 'model_config'"):
        await open_executor(ExecutorConfig())
