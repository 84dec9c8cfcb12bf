"""What calls to worker processes cost on ``mp``; prints JSON.

For 1, 2 and 4 ranks: a small ``collective_rpc``, a two-phase step (and its CPU), and the bytes that
travel to all ranks (``send``), from all ranks (``make``) and both ways (``echo``). Then
what an idle executor and one with a call every 50 ms cost, the first call after idleness,
a start, a close, and how soon a killed worker is an error. ``floor_us`` is a bare
SEQPACKET round trip to one process through asyncio, measured in turns with the rest:
absolute times mean little on a shared machine.

``python benches/bench_executor.py [--rounds 5] [--ranks 1,2,4] [--sizes-mb 0.1,1,10,30,200]
[--loops asyncio,uvloop] [--seconds 5] [--check]``; with ``--check`` it exits with 1 when a
goal is missed on asyncio's own loop.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

from aexec import ExecuteModel, ExecutorConfig, ParallelConfig, StepId, WorkerDied, open_executor
from aexec.executor.base import Executor
from executor_subjects import Subject
from measure import Goal, latencies_of, machine, rounded, spread

CALLS = 300
TICKS = os.sysconf("SC_CLK_TCK")


def opening(ranks: int) -> Any:
    """An executor of so many ranks."""
    layout = ParallelConfig(pipeline_parallel_size=ranks)
    return open_executor(ExecutorConfig(backend="mp", parallel=layout, worker_cls=Subject))


def percentiles(taken: list[float]) -> dict[str, float]:
    """The middle one, the worst of a hundred, the best of ten, the least."""
    ordered = sorted(taken)
    p10, p99 = (ordered[int(len(ordered) * part)] for part in (0.1, 0.99))
    return {"p50": statistics.median(ordered), "p99": p99, "p10": p10, "min": ordered[0]}


@asynccontextmanager
async def bare_echo() -> AsyncGenerator[Callable[[], Awaitable[object]]]:
    """A round trip to a process without anything around it."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    script = Path(__file__).with_name("executor_subjects.py")
    process = subprocess.Popen([sys.executable, script, str(theirs.fileno())], pass_fds=[theirs.fileno()])  # noqa: ASYNC220
    theirs.close()
    ours.setblocking(False)
    loop = asyncio.get_running_loop()
    waiting: list[asyncio.Future[bytes]] = []
    loop.add_reader(ours.fileno(), lambda: waiting.pop().set_result(ours.recv(1 << 16)))

    async def ask() -> bytes:
        waiting.append(loop.create_future())
        future = waiting[0]
        ours.send(b"x" * 64)
        return await future

    try:
        await ask()
        yield ask
    finally:
        loop.remove_reader(ours.fileno())
        ours.close()
        process.wait(5)


def stepper(executor: Executor) -> Callable[[], Awaitable[object]]:
    """A two-phase step, with the next id."""
    ids = itertools.count(1)

    async def step() -> object:
        number = StepId(next(ids))
        await executor.execute_model(ExecuteModel(number, None, 1))
        return await executor.sample_tokens(number)

    return step


async def small(executor: Executor, rounds: int) -> dict[str, Any]:
    """Microseconds of small round trips, in turns with the bare one."""
    step = stepper(executor)
    async with bare_echo() as bare:
        sides = {"floor_us": bare, "rpc_us": lambda: executor.collective_rpc("rank_of"), "step_us": step}
        taken: dict[str, list[float]] = {name: [] for name in sides}
        for _ in range(rounds):
            for name, ask in sides.items():
                taken[name] += await latencies_of(ask, CALLS)
    return {name: percentiles(values) for name, values in taken.items()} | {"step_cpu_us": await cpu_of(executor, step)}


async def cpu_of(executor: Executor, step: Callable[[], Awaitable[object]]) -> dict[str, float]:
    """Microseconds of CPU that a step takes: what it costs where driver and workers share one."""
    before, begin = await executor.collective_rpc("cpu"), time.process_time()
    await latencies_of(step, CALLS)
    driver, after = time.process_time() - begin, await executor.collective_rpc("cpu")
    workers = [end - start for start, end in zip(before, after, strict=True)]
    return {"driver": driver / CALLS * 1e6, "each_worker": sum(workers) / len(workers) / CALLS * 1e6}


async def bulk(executor: Executor, megabytes: float, rounds: int) -> dict[str, Any]:
    """Milliseconds of moving bytes."""
    size = int(megabytes * 2**20)
    data = np.ones(size, dtype=np.uint8)
    calls = {"send": ("take", data), "make": ("make", size), "echo": ("echo", data)}
    taken: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds + 1):  # the first touch of memory is another thing: it is left out
        for name, (method, argument) in calls.items():
            begin = perf_counter()
            await executor.collective_rpc(method, (argument,))
            taken[name].append((perf_counter() - begin) * 1e3)
    return {f"{name}_ms": spread(values[1:]) for name, values in taken.items()}


def cpu_seconds(pids: list[int]) -> float:
    """What processes have used so far."""
    fields = [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split() for pid in pids]
    return sum(int(each[11]) + int(each[12]) for each in fields) / TICKS


async def quiet(executor: Executor, seconds: float) -> dict[str, Any]:
    """CPU of an idle executor and of one with a call every 50 ms; the first call after 2 s."""
    workers: list[int] = await executor.collective_rpc("pid")
    everyone = [*workers, os.getpid()]
    begin = cpu_seconds(everyone)
    await asyncio.sleep(seconds)
    idle = (cpu_seconds(everyone) - begin) / seconds
    begin = cpu_seconds(workers)
    for _ in range(int(seconds / 0.05)):
        await executor.collective_rpc("rank_of")
        await asyncio.sleep(0.05)
    rhythm = (cpu_seconds(workers) - begin) / seconds / len(workers)
    first: list[float] = []
    for _ in range(3):
        await asyncio.sleep(2)
        first += await latencies_of(lambda: executor.collective_rpc("rank_of"), 1)
    return {
        "idle_cpu_percent": 100 * idle,
        "rhythm_cpu_percent_per_worker": 100 * rhythm,
        "first_after_idle_ms": spread([each / 1e3 for each in first]),
    }


async def lives(rounds: int) -> dict[str, Any]:
    """Start and close of two ranks, and the time from SIGKILL to the error of a pending call."""
    starts: list[float] = []
    closes: list[float] = []
    errors: list[float] = []
    for _ in range(rounds):
        begin = perf_counter()
        executor = await opening(2)
        starts.append(perf_counter() - begin)
        begin = perf_counter()
        await executor.close()
        closes.append(perf_counter() - begin)
        errors.append(await time_to_error())
    return {"start_s": spread(starts), "close_s": spread(closes), "time_to_error_ms": spread(errors)}


async def time_to_error() -> float:
    """Milliseconds from a worker's SIGKILL to the error of a call that is pending there."""
    async with opening(2) as executor:
        pids: list[int] = await executor.collective_rpc("pid")
        pending = asyncio.ensure_future(executor.collective_rpc(hang))
        await asyncio.sleep(0.1)
        begin = perf_counter()
        os.kill(pids[1], signal.SIGKILL)
        try:
            await pending
        except WorkerDied:
            return (perf_counter() - begin) * 1e3
    raise AssertionError("the call went on without its worker")


def hang(_worker: Subject) -> None:
    """A call that only a signal ends."""
    signal.pause()


async def bench(arguments: argparse.Namespace) -> dict[str, Any]:
    """All of it, on the loop that runs."""
    found: dict[str, Any] = {"ranks": {}}
    for ranks in map(int, arguments.ranks.split(",")):
        async with opening(ranks) as executor:
            figures = found["ranks"][ranks] = await small(executor, arguments.rounds)
            for megabytes in map(float, arguments.sizes_mb.split(",")):
                figures[f"{megabytes:g}_mb"] = await bulk(executor, megabytes, arguments.rounds)
    async with opening(2) as executor:
        found |= await quiet(executor, arguments.seconds)
    return found | await lives(arguments.rounds)


def goals(found: dict[str, Any]) -> list[Goal]:
    """What issue and design ask for; upstream's figures are in shared/reference/vllm-peer.md."""
    ranks = found["ranks"]

    def figure(*path: Any) -> float | None:
        value: Any = ranks
        for key in path:
            value = value.get(key) if isinstance(value, dict) else None
        return value

    return [
        Goal("two-phase step, 2 ranks, us", figure(2, "step_us", "p50"), at_most=120),
        Goal("30 MB to 4 ranks, ms", figure(4, "30_mb", "send_ms", "median"), at_most=6),
        Goal("start of 2 ranks, warm, s", found["start_s"]["median"], at_most=1.5),
        Goal("CPU while idle, percent of a core, all processes", found["idle_cpu_percent"], at_most=2),
        Goal("CPU of a worker with a call every 50 ms, percent", found["rhythm_cpu_percent_per_worker"], at_most=15),
        Goal("first call after 2 s of idleness, ms", found["first_after_idle_ms"]["median"], at_most=5),
        Goal("from SIGKILL to the error of a pending call, ms", found["time_to_error_ms"]["median"], at_most=100),
    ]


def main() -> int:
    """Measure, print, and check when asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ranks", default="1,2,4")
    parser.add_argument("--sizes-mb", default="0.1,1,10,30,200")
    parser.add_argument("--loops", default="asyncio")
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--check", action="store_true")
    arguments = parser.parse_args()
    found: dict[str, Any] = {}
    for name in arguments.loops.split(","):
        if name == "uvloop":
            import uvloop

            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                found[name] = runner.run(bench(arguments))
        else:
            found[name] = asyncio.run(bench(arguments))
    reached = goals(found.get("asyncio") or next(iter(found.values())))
    report = {"machine": machine(), "goals": [goal.as_json() for goal in reached], **found}
    print(json.dumps(rounded(report), indent=1))
    return int(arguments.check and not all(goal.is_met for goal in reached))


if __name__ == "__main__":
    sys.exit(main())
