"""Starts on Ray: where workers are placed, what they find there, and what is left of a start that comes to nothing."""

from __future__ import annotations

import asyncio
import functools
import gc
import os
import random
import re
import signal
import sys
import time

import pytest

from aexec import LLM, ConfigError, ExecuteModel, ExecutorConfig, ParallelConfig, SamplingParams, open_executor
from aexec.errors import AexecError, CallTimeout, RemoteError
from aexec.messages.step import StepId
from aexec.testing import faulty
from aexec.testing.processes import ProcessWatch

pytestmark = [pytest.mark.anyio, pytest.mark.ray]


@pytest.fixture
def open_on_a_channel(ray_cluster, open_faulty):
    """For what is over before the first step, and the same on both planes."""
    return functools.partial(open_faulty, "ray", ray_step_plane="channel")


async def test_a_placement_that_never_fits_says_what_is_missing(open_on_a_channel, ray_cluster):
    """G37: at its limit, with what was wanted and what each node has; the group that came to nothing is removed."""
    before = await asyncio.to_thread(ray_cluster.belongings)
    began = time.monotonic()
    with pytest.raises(AexecError, match="unobtainium") as caught:
        await open_on_a_channel(ranks=2, ray_resource="unobtainium", placement_timeout=1.0)
    assert time.monotonic() - began < 5.0
    assert "node" in str(caught.value)
    assert await asyncio.to_thread(ray_cluster.left_since, before) == []


async def test_a_wait_for_placement_can_be_cancelled(open_on_a_channel, ray_cluster):
    """G37: at once, and the group that was waited for is removed."""
    before = await asyncio.to_thread(ray_cluster.belongings)
    starting = asyncio.ensure_future(asyncio.wait_for(open_on_a_channel(ranks=2, ray_resource="unobtainium"), 1.0))
    with pytest.raises(TimeoutError):
        await starting
    assert await asyncio.to_thread(ray_cluster.left_since, before) == []


async def test_a_start_that_is_cancelled_leaves_nothing(open_on_ray, ray_cluster):
    """Promise 5: at ten moments between the first and the last thing it does: no actor, no placement group."""
    before = await asyncio.to_thread(ray_cluster.belongings)
    chance = random.Random(10)
    for moment in range(10):
        starting = asyncio.ensure_future(open_on_ray(ranks=2, close_grace=0.5).__aenter__())
        done, _ = await asyncio.wait([starting], timeout=chance.uniform(0.0, 0.2) * moment)
        if done:
            await starting.result().close()
            continue
        starting.cancel()
        await asyncio.wait([starting])
        assert starting.cancelled()
    assert await asyncio.to_thread(ray_cluster.left_since, before) == []


async def test_a_failed_start_raises_the_root_cause(open_on_a_channel):
    """G32: the one rank's own error, at once, while the others wait for it."""
    with pytest.raises(ValueError, match="bad cfg") as caught:
        await open_on_a_channel(close_grace=0.5, worker_kwargs={"fail_rank": 2, "seconds": 60.0})
    assert isinstance(caught.value, RemoteError)
    assert (caught.value.rank, caught.value.method) == (2, "load_model")


async def test_a_start_past_its_limit_says_where_each_rank_was(open_on_a_channel):
    """G33: and cleans up."""
    slow = {"hang_in": "load_model", "seconds": 60.0}
    with pytest.raises(CallTimeout, match="the start of the workers passed its limit") as caught:
        await open_on_a_channel(ranks=2, start_timeout=8.0, close_grace=0.5, worker_kwargs=slow)
    notes = "\n".join(caught.value.__notes__)
    for rank in range(2):
        assert f"rank {rank} (pid " in notes
    assert "is at load_model" in notes


@pytest.fixture
def four_bundles(ray_cluster):
    """A placement group of somebody else's."""
    import ray
    from ray.util import placement_group, remove_placement_group

    group = placement_group([{"CPU": 1}] * 4, name="of somebody else")
    ray.get(group.ready(), timeout=30)
    yield group
    remove_placement_group(group)


async def test_a_given_placement_group_is_used_and_kept(open_on_a_channel, ray_cluster, four_bundles):
    """G41: the bundles that were named, by object or by name; too few are refused; the group is never removed."""
    for given in (four_bundles, "of somebody else"):
        async with open_on_a_channel(ranks=2, placement_group=given, bundle_indices=[3, 1]) as executor:
            assert len(await asyncio.to_thread(ray_cluster.placement_groups)) == 1
            assert await executor.collective_rpc(bundle_of) == [3, 1]
    with pytest.raises(ConfigError, match="bundle"):
        await open_on_a_channel(ranks=5, placement_group=four_bundles)
    assert len(await asyncio.to_thread(ray_cluster.placement_groups)) == 1


def bundle_of(worker):
    """Which bundle of its placement group a worker is in; Ray's public words do not say."""
    import ray

    names = ray._private.worker.global_worker.core_worker.resource_ids()
    (index,) = {int(name.split("_")[2]) for name in names if re.match(r"bundle_group_\d+_", name)}
    return index


async def test_two_groups_share_devices_by_fractions(open_on_a_channel):
    """G41: half a processor for each of four ranks: two processors are enough."""
    async with open_on_a_channel(ranks=2, ray_resource="CPU", ray_resource_per_worker=0.5) as executor:
        assert await executor.collective_rpc("echo", (1,)) == [1, 1]


async def test_the_environment_of_workers_follows_one_rule(open_on_a_channel, monkeypatch):
    """G39: variables of this moment by the list, the executor's on top, never those of another launcher."""
    monkeypatch.setenv("AEXEC_FIELD_CASE", "of the driver")
    monkeypatch.setenv("AEXEC_ANOTHER", "of the driver")
    monkeypatch.setenv("RANK", "77")
    monkeypatch.setenv("OF_SOMEBODY", "not for workers")
    env = {"MINE": "set", "AEXEC_FIELD_CASE": "of the executor", "A_TOKEN": "hush"}
    async with open_on_a_channel(ranks=2, env=env) as executor:

        async def variable(name):
            return await executor.collective_rpc("variable", (name,))

        assert await variable("MINE") == ["set"] * 2
        assert await variable("AEXEC_FIELD_CASE") == ["of the executor"] * 2
        assert await variable("AEXEC_ANOTHER") == ["of the driver"] * 2
        assert await variable("OF_SOMEBODY") == [None] * 2
        assert await variable("RANK") == ["0", "1"]
        told = str(executor.describe())
        assert "AEXEC_FIELD_CASE" in told
        assert "hush" not in told


async def test_the_list_of_devices_has_one_owner(open_on_a_channel):
    """G40: it is the cluster: whoever sets it a second time is told where it belongs, before anything starts."""
    with pytest.raises(ConfigError, match=r"CUDA_VISIBLE_DEVICES.*'ray start'"):
        await open_on_a_channel(ranks=2, env={"CUDA_VISIBLE_DEVICES": "3,2"})


async def test_a_missing_cupy_is_no_obstacle_to_shared_memory(open_on_ray, monkeypatch):
    """G47: what only nccl needs is asked for only with nccl, and then at start, with the command that installs it."""
    monkeypatch.setitem(sys.modules, "cupy", None)
    async with open_on_ray(ranks=2) as executor:
        await executor.execute_model(ExecuteModel(StepId(1)))
        assert (await executor.sample_tokens(StepId(1))).step == 1


async def test_the_executor_holds_its_workers(open_on_a_channel):
    """G65: whoever drops what was used to make it, and keeps one method only, still has workers."""

    async def only_a_method():
        executor = await open_on_a_channel(ranks=2)
        return executor.collective_rpc, executor.close

    call, close = await only_a_method()
    gc.collect()
    await asyncio.sleep(0.2)
    assert await call("echo", (1,)) == [1, 1]
    await close()


async def test_no_dashboard_is_needed(open_on_ray, ray_cluster):
    """G66: the cluster of all these tests has none."""
    import ray

    assert not ray._private.worker._global_node.webui_url
    async with open_on_ray(ranks=1) as executor:
        assert await executor.collective_rpc("place") == [(0, 1, 0, 0, 1)]


async def test_a_backend_that_is_asked_for_is_taken(open_on_a_channel):
    """G42, G57: one rank or many, ``ray`` means an actor; registration code runs there, before the worker is made."""
    async with open_on_a_channel(ranks=1, worker_init=["aexec.testing.faulty:raise_flag"]) as executor:
        assert executor.describe()["backend"].value == "ray"
        assert await executor.collective_rpc("pid") == [executor.ranks[0].pid] != [os.getpid()]
        assert await executor.collective_rpc("flags") == [["raised in the worker"]]
    assert faulty.FLAGS == []


async def test_two_groups_that_start_at_once_do_not_meet(open_on_a_channel):
    """G49: each has a place of its own for its ranks to find each other."""

    async def meeting_place():
        async with open_on_a_channel(ranks=2) as executor:
            first, second = await executor.collective_rpc(lambda worker: worker.context.distributed_init_method)
            assert first == second != ""
            return first

    assert len(set(await asyncio.gather(meeting_place(), meeting_place()))) == 2


async def test_the_blocking_facade_works_beside_a_loop(ray_cluster):
    """G25: with workers that Ray has placed, while another loop runs in this process, which is not touched."""
    before = asyncio.get_running_loop()

    def use():
        with LLM("dummy", executor="ray", pipeline_parallel_size=2) as llm:
            (done,) = llm.generate([[1, 2, 3]], SamplingParams(max_tokens=4, ignore_eos=True))
            return len(done.token_ids)

    assert await asyncio.to_thread(use) == 4
    assert asyncio.get_running_loop() is before


@pytest.mark.parametrize("backend", ["mp", "ray"])
def test_it_starts_inside_an_async_ray_actor(ray_cluster, backend):
    """G21: on the loop of somebody's async actor, with workers by either backend; the actor lives on."""
    import ray

    class Service:
        async def use(self, backend):
            layout = ParallelConfig(pipeline_parallel_size=2)
            config = ExecutorConfig(backend=backend, parallel=layout, worker_cls="aexec.testing.faulty:FaultyWorker")
            async with open_executor(config) as executor:
                await executor.execute_model(ExecuteModel(StepId(1)))
                result = await executor.sample_tokens(StepId(1))
                return tuple(result.output)[:2], await executor.collective_rpc("pid")

        async def pid(self):
            return os.getpid()

    service = ray.remote(Service).options(num_cpus=0).remote()
    try:
        output, pids = ray.get(service.use.remote(backend), timeout=50)
        assert tuple(output) == (1, 1)
        assert ray.get(service.pid.remote(), timeout=10) not in pids
        with ProcessWatch(pids) as watch:
            assert watch.alive(5.0) == []
    finally:
        ray.kill(service)


JOINING = """
def make_on_ray(plane, **settings):
    settings = {"ray_address": sys.argv[1], "ray_step_plane": plane, "backend": "ray"} | settings
    return make(**settings)

async def step(executor, number):
    from aexec import ExecuteModel
    await executor.execute_model(ExecuteModel(number))
    return (await executor.sample_tokens(number)).step
"""


@pytest.mark.parametrize("ending", ["close", "forget"])
def test_a_program_that_joins_ends(start, ray_cluster, plane, ending):
    """G44, G27: ``asyncio.run`` returns whether the executor was closed or forgotten, and no actor is left."""
    closing = "await executor.close()" if ending == "close" else "pass"
    program = start(
        JOINING
        + f"""
async def main():
    executor = await make_on_ray({plane!r})
    say(*await asyncio.gather(*(step(executor, number) for number in (1, 2, 3))))
    {closing}

asyncio.run(main())
say("over")
""",
        arguments=[ray_cluster.address],
    )
    output, errors, code = program.finish()
    assert (output, code) == ("1 2 3\nover\n", 0), errors
    assert "Traceback" not in errors


BUSY = """
async def main():
    async with make_on_ray("channel") as executor:
        call = asyncio.ensure_future(executor.collective_rpc("native_sleep", (60.0,)))
        await asyncio.sleep(0.3)
        say(*(info.pid for info in executor.ranks))
        await call

asyncio.run(main())
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_workers_end_with_their_driver(start, ray_cluster, number):
    """G18, G19, G48: killed, or interrupted from the terminal: workers in native code are gone soon, and no actor is left."""
    program = start(JOINING + BUSY, arguments=[ray_cluster.address])
    with ProcessWatch(int(pid) for pid in program.line().split()) as watch:
        if number is signal.SIGINT:
            program.interrupt_all()
            _, errors, code = program.finish()
            assert code in (130, -signal.SIGINT)
            assert errors.count("Traceback") <= 2  # the program's own, of its cancellation and KeyboardInterrupt
        else:
            program.kill(number)
            program.finish()
        assert watch.alive(5.0) == []
