"""The operations of the worker that ships, by name through an executor."""

from __future__ import annotations

import json

import anyio
import pytest

from aexec import ExecuteModel, ExecutorConfig, open_executor
from aexec.config import CacheConfig, ModelConfig
from aexec.errors import ConfigError, ModelNotReady, WeightsMismatch
from aexec.messages.batch import NewRequestData, SchedulerOutput
from aexec.messages.request import SamplingParams
from aexec.worker.profiler import RankProfiler

pytestmark = pytest.mark.anyio


def open_dummy(**settings):
    kwargs = {"model_config": ModelConfig(model="dummy"), "cache_config": CacheConfig(num_blocks=8)}
    return open_executor(ExecutorConfig(worker_kwargs=kwargs, **settings))


async def first_token(executor, step: int) -> int:
    request = NewRequestData(
        request_id=f"r{step}",
        token_ids=[1, 2, 3],
        num_prompt_tokens=3,
        block_ids=[1],
        num_computed_tokens=0,
        sampling=SamplingParams(temperature=0.0),
    )
    finished = [f"r{step - 1}"]
    batch = SchedulerOutput(new=[request], num_scheduled_tokens={f"r{step}": 3}, finished_request_ids=finished)
    await executor.execute_model(ExecuteModel(step, batch, 3))
    result = await executor.sample_tokens(step)
    return result.output.sampled_token_ids[0][0]


async def test_the_reinforcement_loop_by_name():
    """Pause, new weights in chunks, resume: the next step runs on them (G56)."""
    async with open_dummy() as executor:
        before = await first_token(executor, 1)
        await executor.pause("finish")
        await executor.collective_rpc("start_weight_update")
        (chunk,) = await executor.collective_rpc("update_weights", ([("seed", 7)],))
        (done,) = await executor.collective_rpc("finish_weight_update")
        assert (chunk.is_complete, done.is_complete, done.version) == (False, True, 2)
        await executor.resume()
        assert await first_token(executor, 2) != before
        await executor.collective_rpc("load_weights")
        assert await first_token(executor, 3) == before


async def test_the_executor_and_the_worker_sleep_alike():
    """Asked through the executor or by name, a step is refused by name until all is awake (G55)."""
    async with open_dummy() as executor:
        before = await first_token(executor, 1)
        (report,) = await executor.sleep(2)
        assert (report.level, report.weights) == (2, "discarded")
        with pytest.raises(ModelNotReady, match="the weights are discarded"):
            await first_token(executor, 2)
        await executor.wake_up()
        with pytest.raises(ModelNotReady, match="the weights are missing"):
            await first_token(executor, 3)
        await executor.collective_rpc("load_weights")
        assert await first_token(executor, 4) == before


async def test_a_worker_that_sleeps_behind_its_executors_back_refuses_steps():
    """The rank itself is the last to say no."""
    async with open_dummy() as executor:
        await executor.collective_rpc(lambda worker: worker.sleep(1))
        with pytest.raises(ModelNotReady, match="a forward pass was refused: the weights are asleep"):
            await first_token(executor, 1)


async def test_errors_of_updates_come_as_they_are():
    """With their type and their names."""
    async with open_dummy() as executor:
        with pytest.raises(WeightsMismatch) as caught:
            await executor.collective_rpc("update_weights", ({"sed": 1},))
        assert caught.value.unknown == ("sed",)


async def test_a_profile_is_a_chrome_trace(tmp_path):
    """One file for each rank and generation, with the steps in it."""
    async with open_dummy() as executor:
        (started,) = await executor.collective_rpc("profile", ("start", str(tmp_path / "traces")))
        await first_token(executor, 1)
        (path,) = await executor.collective_rpc("profile", ("stop",))
        assert path == started == str(tmp_path / "traces" / "trace-rank0-generation1-0.json")
        events = json.loads(await anyio.Path(path).read_text())["traceEvents"]
        assert [event["name"] for event in events] == ["execute_model step 1", "sample_tokens step 1"]
        assert all(event["ph"] == "X" and event["dur"] >= 0 for event in events)
        (second,) = await executor.collective_rpc("profile", ("start", str(tmp_path)))
        assert second.endswith("-1.json")
    assert await anyio.Path(second).is_file()  # a recording that nobody stopped ends with the worker


@pytest.mark.parametrize("actions", [["stop"], ["start", "start"], ["begin"]])
async def test_profiles_start_before_they_stop(actions, tmp_path):
    """Out of turn they are refused, with the turn."""
    async with open_dummy() as executor:
        *first, last = actions
        for action in first:
            await executor.collective_rpc("profile", (action, str(tmp_path)))
        with pytest.raises(ConfigError, match=f"profile {last}|action of profile is '{last}'"):
            await executor.collective_rpc("profile", (last, str(tmp_path)))


def test_torch_records_operators(tmp_path):
    """Where there is torch the trace has its operators, below the step that called them."""
    import torch

    profiler = RankProfiler(3, 2, uses_torch=True)
    profiler.start(tmp_path)
    with profiler.span("execute_model step 1"):
        torch.ones(4, 4) @ torch.ones(4, 4)
    path = profiler.stop()
    assert path.name == "trace-rank3-generation2-0.json"
    names = {event.get("name") for event in json.loads(path.read_text())["traceEvents"]}
    assert {"execute_model step 1", "aten::mm"} <= names


def test_a_directory_that_cannot_be_made_is_refused(tmp_path):
    """Before anything is recorded."""
    (tmp_path / "file").touch()
    profiler = RankProfiler(0, 1, uses_torch=False)
    with pytest.raises(ConfigError, match="cannot be made"):
        profiler.start(tmp_path / "file" / "traces")
    assert "off" in repr(profiler)
