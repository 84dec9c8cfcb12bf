"""What steps cost with workers that Ray has placed, on both step planes; prints JSON.

Two ranks of one stage: a two-phase step by ``channel``, by ``compiled_graph``, and by the same
graph on the same actors driven without asyncio (``execute`` and ``get``), in turns, as absolute
times mean little on a shared machine. Two stages of two: the same step with hidden states of
8 KB, 1 MB and 8 MB. Then the CPU of idle executors (and of actors that do nothing), the first step after the graph was
released, and how soon a killed worker is an error.

``python benches/bench_ray.py [--rounds 5] [--steps 200] [--sizes-kb 8,1024,8192] [--seconds 5]
[--check]``; with ``--check`` it exits with 1 when a goal is missed.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import logging
import os
import signal
import sys
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from time import perf_counter
from typing import Any

import ray

from aexec import ExecuteModel, ExecutorConfig, ParallelConfig, SampleTokens, StepId, WorkerDied, open_executor
from aexec.executor.base import Executor
from aexec.executor.ray.graph.build import build_graph
from aexec.executor.ray.graph.plane import GraphPlane
from aexec.worker.roads import step_message
from bench_executor import cpu_seconds, percentiles
from measure import Goal, machine, rounded, spread
from ray_subjects import StageSubject

IDLE = 0.3  # seconds after which the graph is released here
PATIENCE = 30.0


class Steps:
    """Two-phase steps of one executor, with ids that increase."""

    def __init__(self, executor: Executor) -> None:
        self.executor, self.ids = executor, itertools.count(1)

    async def one(self, payload: Any = None) -> float:
        """Microseconds of one step."""
        begin, step = perf_counter(), StepId(next(self.ids))
        await self.executor.execute_model(ExecuteModel(step, payload, 1))
        await self.executor.sample_tokens(step)
        return (perf_counter() - begin) * 1e6

    async def some(self, number: int, payload: Any = None) -> list[float]:
        """Microseconds of steps, one after the other."""
        return [await self.one(payload) for _ in range(number)]


@asynccontextmanager
async def opening(plane: str, tensor: int = 2, pipeline: int = 1, **settings: Any) -> AsyncGenerator[Executor]:
    """An executor."""
    layout = ParallelConfig(tensor_parallel_size=tensor, pipeline_parallel_size=pipeline)
    config = ExecutorConfig(
        backend="ray", parallel=layout, worker_cls=StageSubject, ray_step_plane=plane, ray_resource="CPU",
        ray_resource_per_worker=0.5, graph_idle_release=IDLE, **settings,
    )  # fmt: skip
    async with open_executor(config) as executor:
        yield executor


def plane_of(executor: Any) -> GraphPlane:
    """Its graph."""
    plane: GraphPlane = executor._board.group._plane  # noqa: SLF001 - a bench may look
    return plane


async def released(executor: Executor) -> None:
    """Wait until its graph is taken down."""
    plane, until = plane_of(executor), perf_counter() + PATIENCE
    while plane.statistics()["state"] != "released":
        assert perf_counter() < until, f"not released after {PATIENCE} s: {plane}"
        await asyncio.sleep(0.02)


def sync_steps(plane: Any, ids: Callable[[], int], number: int) -> list[float]:
    """Microseconds of steps on the actors of a plane that has no graph now, by a graph driven as Ray has it."""
    graph = build_graph(plane._actors, plane._layout, plane._buffers, tensors=None, overlap=False)  # noqa: SLF001
    compiled: Any = graph._compiled  # noqa: SLF001
    before, limit, taken = [0] * len(plane._actors), plane._buffers.size, list[float]()  # noqa: SLF001
    for _ in range(number + number // 10):
        begin, step = perf_counter(), StepId(ids())
        halves = (ExecuteModel(step, None, 1), SampleTokens(step))
        refs = [compiled.execute(step_message(step, half, before, limit)) for half in halves]
        for ref in (ref for outputs in refs for ref in outputs):
            ref.get()
        taken.append((perf_counter() - begin) * 1e6)
    graph.take_down()
    return taken[number // 10 :]


async def small(rounds: int, number: int) -> dict[str, Any]:
    """Microseconds of a step of two ranks, by the three ways in turns."""
    taken: dict[str, list[float]] = {"sync_graph": [], "compiled_graph": [], "channel": []}
    first: list[float] = []
    async with opening("channel") as channel, opening("compiled_graph") as graph:
        by_channel, by_graph = Steps(channel), Steps(graph)
        for _ in range(rounds):
            await released(graph)
            taken["channel"] += (await by_channel.some(number + 10))[10:]
            first.append(await by_graph.one() / 1e3)
            taken["compiled_graph"] += (await by_graph.some(number + 10))[10:]
            await released(graph)
            ids = by_graph.ids
            taken["sync_graph"] += await asyncio.to_thread(sync_steps, plane_of(graph), ids.__next__, number)
    steps = {name: percentiles(values) for name, values in taken.items()}
    ratio = steps["compiled_graph"]["p50"] / steps["sync_graph"]["p50"]
    return {"step_us": steps, "graph_to_sync": ratio, "first_after_release_ms": spread(first)}


async def staged(plane: str, sizes: list[int], number: int) -> dict[str, Any]:
    """Microseconds of a step of two stages of two ranks, by the kilobytes that it hands on."""
    found: dict[str, Any] = {}
    async with opening(plane, 2, 2, graph_buffer_bytes=(max(sizes) + 64) << 10) as executor:
        await executor.collective_rpc("meet")
        steps = Steps(executor)
        for size in sizes:
            await steps.some(5, size << 10)
            found[f"{size}_kb"] = percentiles(await steps.some(number, size << 10))
    return found


async def idle(plane: str, seconds: float) -> float:
    """Percent of a core that driver and workers take together while nobody asks for anything."""
    async with opening(plane) as executor:
        everyone = [*await executor.collective_rpc("pid"), os.getpid()]
        await Steps(executor).some(10)
        if plane == "compiled_graph":
            await released(executor)
        begin = cpu_seconds(everyone)
        await asyncio.sleep(seconds)
        return 100 * (cpu_seconds(everyone) - begin) / seconds


class Nobody:
    """An actor that does nothing."""

    def pid(self) -> int:
        """Whom to measure."""
        return os.getpid()


async def floor(seconds: float) -> float:
    """The same of this process and two actors of Ray's that do nothing."""
    actors = [ray.remote(num_cpus=0)(Nobody).remote() for _ in range(2)]
    everyone = [*await asyncio.gather(*(actor.pid.remote() for actor in actors)), os.getpid()]
    begin = cpu_seconds(everyone)
    await asyncio.sleep(seconds)
    return 100 * (cpu_seconds(everyone) - begin) / seconds


async def time_to_error(plane: str) -> float:
    """Milliseconds from a worker's SIGKILL to the errors of three steps that are in flight."""
    async with opening(plane) as executor:
        pids, steps = await executor.collective_rpc("pid"), Steps(executor)
        await steps.one()
        flying = [asyncio.ensure_future(steps.one("hang")) for _ in range(3)]
        await asyncio.sleep(0.1)
        begin = perf_counter()
        os.kill(pids[1], signal.SIGKILL)
        ends = await asyncio.gather(*flying, return_exceptions=True)
        assert all(isinstance(end, WorkerDied) for end in ends), ends
        return (perf_counter() - begin) * 1e3


async def bench(arguments: argparse.Namespace) -> dict[str, Any]:
    """All of it."""
    planes, sizes = ("channel", "compiled_graph"), [int(size) for size in arguments.sizes_kb.split(",")]
    found = await small(arguments.rounds, arguments.steps)
    found["stages_us"] = {plane: await staged(plane, sizes, max(arguments.steps // 5, 10)) for plane in planes}
    found["idle_cpu_percent"] = {plane: await idle(plane, arguments.seconds) for plane in planes}
    found["idle_cpu_percent"]["bare_actors"] = await floor(arguments.seconds)
    found["death_to_error_ms"] = {
        plane: spread([await time_to_error(plane) for _ in range(min(arguments.rounds, 3))]) for plane in planes
    }
    return found


def goals(found: dict[str, Any]) -> list[Goal]:
    """What issue 6 asks for."""
    idle_cpu, death = found["idle_cpu_percent"], found["death_to_error_ms"]
    return [
        Goal("step by channel, 2 ranks, us", found["step_us"]["channel"]["p50"], at_most=300),
        Goal("step by the graph, times that of the graph without asyncio", found["graph_to_sync"], at_most=1.5),
        Goal("CPU while idle, channel, percent of a core", idle_cpu["channel"], at_most=3),
        Goal("CPU while idle, graph released, percent of a core", idle_cpu["compiled_graph"], at_most=3),
        *(Goal(f"from SIGKILL to errors, {plane}, ms", death[plane]["median"], at_most=200) for plane in death),
    ]


def main() -> int:
    """Measure, print, and check when asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--sizes-kb", default="8,1024,8192")
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--check", action="store_true")
    arguments = parser.parse_args()
    for name in ("RAY_USAGE_STATS_ENABLED", "RAY_worker_niceness"):  # nothing goes out; nobody is nicer than the driver
        os.environ.setdefault(name, "0")
    ray.init(
        address="local", num_cpus=4, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR,
        object_store_memory=4 << 30,  # above 70 % of it Ray has all processes collect garbage: that is not idle
    )  # fmt: skip
    with contextlib.redirect_stdout(sys.stderr):  # where Ray puts what it has to say, to its very end
        try:
            found = asyncio.run(bench(arguments))
        finally:
            ray.shutdown()
    reached = goals(found)
    report = {"machine": machine(["ray"]), "goals": [goal.as_json() for goal in reached], **found}
    print(json.dumps(rounded(report), indent=1))
    return int(arguments.check and not all(goal.is_met for goal in reached))


if __name__ == "__main__":
    sys.exit(main())
