"""Steps of workers that Ray has placed, on both planes: in flight, given up, late, idle."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import random
import threading
import time

import anyio
import pytest

from aexec import ExecuteModel
from aexec.errors import AexecError, CallTimeout, MessageTooLarge
from aexec.messages.step import ForwardLaunched, StepId
from aexec.testing.processes import cpu_seconds

pytestmark = [pytest.mark.anyio, pytest.mark.ray]

IDLE = 0.02  # of a processor: what aexec may add to what Ray takes


@pytest.fixture
def steps(on_ray):
    """Numbers of steps that the shared executor has not seen."""
    return numbers(on_ray)


def numbers(executor):
    """An executor's next step ids."""
    executor.last_step = getattr(executor, "last_step", 0)
    while True:
        executor.last_step += 1
        yield StepId(executor.last_step)


async def run(executor, step, payload=None):
    """A step from its forward pass to its result."""
    assert await executor.execute_model(ExecuteModel(step, payload)) == ForwardLaunched(step)
    result = await executor.sample_tokens(step)
    assert (result.step, *tuple(result.output)[:2]) == (step, step, executor.output_rank)
    return result


def processor_times(*groups):
    """Of the processes of each group, together."""
    return [sum(map(cpu_seconds, pids)) for pids in groups]


async def test_steps_that_are_given_up_give_their_places_back(on_ray, steps):
    """G28, G29, G44: a hundred awaits in a row, cancelled or timed out: no slot is lost, and the next step is right."""
    for turn, step in zip(range(100), steps, strict=False):
        await on_ray.execute_model(ExecuteModel(step, {"seconds": 0.002}))
        sampling = asyncio.ensure_future(on_ray.sample_tokens(step))
        if turn % 2:
            await asyncio.sleep(0)
            sampling.cancel()
            await asyncio.wait([sampling])
        else:
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(asyncio.shield(sampling), 0.0001)
            sampling.cancel()
        del sampling
    gc.collect()
    limit = on_ray.describe()["max_concurrent_steps"].value
    many = [asyncio.ensure_future(run(on_ray, next(steps))) for _ in range(2 * limit)]
    await asyncio.wait_for(asyncio.gather(*many), 20.0)
    assert f"steps: 0 of {limit} in flight, 0 waiting" in on_ray.dump()


async def test_steps_beyond_the_bound_wait_their_turn(on_ray, steps):
    """G43: fifty at once, whatever the graph's own bound: none is refused, all are right, in their order."""
    ends = []

    async def one(step):
        await run(on_ray, step)
        ends.append(step)

    wanted = [next(steps) for _ in range(50)]
    await asyncio.wait_for(asyncio.gather(*map(one, wanted)), 30.0)
    assert ends == wanted


async def test_results_are_plain_values(on_ray, steps):
    """G44: gathered, awaited twice, kept for long: as many as one likes, whatever buffers the graph has."""
    kept = []
    for _ in range(30):
        step = next(steps)
        await on_ray.execute_model(ExecuteModel(step))
        sampling = asyncio.ensure_future(on_ray.sample_tokens(step))
        first, second = await asyncio.gather(sampling, asyncio.shield(sampling))
        assert first is second
        kept.append(await sampling)
    assert len({result.step for result in kept}) == 30


async def test_all_ranks_see_one_order_of_steps_and_calls(on_ray, steps):
    """G60: steps and plain calls travel on two roads, and run on all ranks in the order in which they were sent."""
    chance = random.Random(60)
    wanted, waiting = [], []
    await on_ray.collective_rpc(lambda worker: worker.log.clear())
    for _ in range(60):
        if chance.random() < 0.5:
            step = next(steps)
            await on_ray.execute_model(ExecuteModel(step, {"seconds": chance.random() * 0.003}))
            waiting.append(asyncio.ensure_future(on_ray.sample_tokens(step)))
            wanted += [("execute", step), ("executed", step), ("sample", step)]
        else:
            note = f"note {chance.random()}"
            waiting.append(asyncio.ensure_future(on_ray.collective_rpc("note", (note,))))
            wanted.append(note)
        await asyncio.sleep(0)  # it is sent
    await asyncio.wait_for(asyncio.gather(*waiting), 30.0)
    for log in await on_ray.collective_rpc("read_log"):
        assert [entry if isinstance(entry, str) else tuple(entry) for entry in log] == wanted


async def test_stages_work_at_the_same_time(on_ray, steps):
    """G61: three stages of 50 ms, some steps in flight: near the ideal rate, not a third of it.

    The best of three: a machine that stands still for a moment makes one of them slow.
    """
    await run(on_ray, next(steps))  # the graph may have been released
    shares = []
    while len(shares) < 3 and min(shares, default=2.0) >= 2.0:
        began, wanted = time.monotonic(), [next(steps) for _ in range(16)]
        await asyncio.gather(*(run(on_ray, step, {"seconds": 0.05}) for step in wanted))
        shares.append((time.monotonic() - began) / (16 * 0.05))
    assert 1.0 <= min(shares) < 2.0


async def test_any_size_arrives(on_ray, steps, plane):
    """G15: there and back, and in a step's payload; only the graph has a bound, which its error names."""
    for size in (1, 1 << 16, 10_000_000, 40 << 20):
        data = bytes(size)
        assert await on_ray.collective_rpc("echo", (data,), timeout=30.0) == [data] * 3
    for size in (1, 1 << 16, 2_000_000):
        await run(on_ray, next(steps), {"data": bytes(size)})
    step = next(steps)
    if plane == "compiled_graph":
        with pytest.raises(MessageTooLarge, match="graph_buffer_bytes"):
            await on_ray.execute_model(ExecuteModel(step, {"data": bytes(20_000_000)}))
        await run(on_ray, step)
    else:
        await run(on_ray, step, {"data": bytes(20_000_000)})


async def test_what_cannot_travel_is_an_error_of_that_call_alone(on_ray, steps):
    """G51: an argument, an answer, a step's payload; and both roads go on."""
    with pytest.raises(AexecError, match="lock"):
        await on_ray.collective_rpc("echo", (threading.Lock(),), timeout=5.0)
    with pytest.raises(AexecError, match="lock"):
        await on_ray.collective_rpc("unportable", timeout=5.0)
    step = next(steps)
    with pytest.raises(AexecError, match="lock"):
        await on_ray.execute_model(ExecuteModel(step, {"value": threading.Lock()}))
    await run(on_ray, step)
    assert await on_ray.collective_rpc("echo", (1,), timeout=5.0) == [1, 1, 1]


async def test_large_messages_do_not_hold_up_the_loop(on_ray):
    """G09: a ticker beside calls with 5 MB: what the loop computes at a time stays small."""
    data, turns = bytes(5_000_000), []
    calls = [asyncio.ensure_future(on_ray.collective_rpc("length", (data,), ranks=[0])) for _ in range(40)]
    while not all(call.done() for call in calls):
        before = time.thread_time()
        await asyncio.sleep(0)
        turns.append(time.thread_time() - before)
        await asyncio.sleep(0.001)
    assert await asyncio.gather(*calls) == [[5_000_000]] * 40
    assert max(turns) < 0.04


async def test_idle_is_silent(on_ray, steps, plane):
    """G13, G11: workers that wait use no processor: on the graph plane once the graph was released.

    Ray's own threads take nearly 1 % for each process on a slow machine, whatever runs there: as many bare actors
    of the same cluster show how much it is at the same time.
    """
    await run(on_ray, next(steps))
    # The graph is released after half a second, and Ray takes a while for it.
    await anyio.sleep(3.0 if plane == "compiled_graph" else 0.5)
    async with bare_actors(len(on_ray.ranks)) as pids:
        await anyio.sleep(1.0)  # they have started
        own = [info.pid for info in on_ray.ranks]
        before, bare_before = await asyncio.to_thread(processor_times, own, pids)
        ours, began = time.process_time(), time.monotonic()
        await anyio.sleep(6.0)
        seconds, ours = time.monotonic() - began, time.process_time() - ours
        after, bare_after = await asyncio.to_thread(processor_times, own, pids)
    used, bare = after - before + ours, bare_after - bare_before
    assert used <= bare + IDLE * seconds + 0.02, (used, bare)  # the clock has steps of 0.01
    await run(on_ray, next(steps))


@contextlib.asynccontextmanager
async def bare_actors(number):
    """Pids of actors that do nothing at all."""
    import ray

    class Bare:
        def pid(self):
            return os.getpid()

    actors = [ray.remote(num_cpus=0)(Bare).remote() for _ in range(number)]
    try:
        yield await asyncio.gather(*(asyncio.wrap_future(each.pid.remote().future()) for each in actors))
    finally:
        for each in actors:
            await asyncio.to_thread(ray.kill, each)


async def test_a_late_stage_is_named_and_fails_the_group_once(open_on_ray):
    """G45, G46: its step ends at the limit that was set, with who has not answered and where it stands; one failure."""
    heard = []
    settings = {"step_timeout": 1.0, "on_timeout": "fail_executor", "close_grace": 0.5}
    async with open_on_ray(**settings) as executor:
        executor.add_failure_callback(heard.append)
        assert executor.describe()["step_timeout"] == ("step_timeout", 1.0, "argument")
        await run(executor, StepId(1))
        await executor.collective_rpc(hang_from_now_on, ranks=[1])
        began = time.monotonic()
        await executor.execute_model(ExecuteModel(StepId(2)))
        await executor.execute_model(ExecuteModel(StepId(3)))
        both = [asyncio.ensure_future(executor.sample_tokens(StepId(number))) for number in (2, 3)]
        late, other = await asyncio.gather(*both, return_exceptions=True)
        assert 0.9 < time.monotonic() - began < 3.0
        assert isinstance(late, CallTimeout)
        assert isinstance(other, CallTimeout)
        notes = "\n".join(late.__notes__)
        assert "rank 1" in notes
        assert "in hang" in notes
        assert "rank 0: answered" in notes
        with pytest.raises(CallTimeout, match="step"):
            await executor.execute_model(ExecuteModel(StepId(4)))
        await anyio.sleep(0.2)
    assert len(heard) == 1


def hang_from_now_on(worker):
    """The next forward pass of a rank does not end."""

    def hang(step):
        worker.native_sleep(30.0)

    worker.execute_model = hang
