"""What the actor core costs beside bare asyncio, measured in the same run; prints JSON.

Each figure stands beside what asyncio takes for the least that could do the same: two
tasks that hand a future to and fro for an ask, an ``asyncio.Queue`` and a task that reads
it for a tell, a spawn and an idle actor. Rounds of both sides alternate, since this
machine's speed drifts by more than what is measured.

``python benches/bench_actor.py [--rounds 15] [--loops asyncio,uvloop] [--check]``; with
``--check`` it exits with 1 when a figure misses its goal.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import platform
import statistics
import sys
import tracemalloc
from collections.abc import Awaitable, Callable
from time import perf_counter
from typing import Any

from aexec.actor import Actor, ActorSystem, Message, Ref, handles

MAX_ASK_RATIO = 3.0  # of a bare future round trip, at the median
MAX_IDLE_BYTES = 4096
CALLERS = 100


class Add(Message[int], frozen=True):
    """Answered by a plain handler."""

    by: int = 1


class AddAsync(Message[int], frozen=True):
    """Answered by an async def that does not wait."""

    by: int = 1


class Counter(Actor):
    """As little as an actor can do."""

    def __init__(self) -> None:
        self.count = 0

    @handles(Add)
    def add(self, message: Add) -> int:
        """Count."""
        self.count += message.by
        return self.count

    @handles(AddAsync)
    async def add_async(self, message: AddAsync) -> int:
        """Count."""
        self.count += message.by
        return self.count


class Bare:
    """Two tasks and the futures that they hand each other."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.wanted: list[asyncio.Future[int]] = []
        self.wake = self.loop.create_future()
        self.task = self.loop.create_task(self.serve())

    async def serve(self) -> None:
        """Answer all that is wanted, then wait."""
        count = 0
        while True:
            await self.wake
            self.wake = self.loop.create_future()
            wanted, self.wanted = self.wanted, []
            for future in wanted:
                count += 1
                future.set_result(count)

    async def ask(self) -> int:
        """One round trip."""
        reply = self.loop.create_future()
        self.wanted.append(reply)
        if not self.wake.done():
            self.wake.set_result(None)
        return await reply


async def latencies(ask: Callable[[], Awaitable[int]], number: int) -> list[float]:
    """Microseconds of round trips, one after the other."""
    taken: list[float] = []
    for _ in range(number):
        start = perf_counter()
        await ask()
        taken.append((perf_counter() - start) * 1e6)
    return taken


async def rate(ask: Callable[[], Awaitable[int]], callers: int, number: int) -> float:
    """Round trips per second of so many callers."""

    async def call() -> None:
        for _ in range(number // callers):
            await ask()

    start = perf_counter()
    await asyncio.gather(*[call() for _ in range(callers)])
    return number / (perf_counter() - start)


async def bench_asks(ref: Ref[Counter], rounds: int) -> dict[str, Any]:
    """Asks of plain and of async handlers beside the bare round trip."""
    bare = Bare()
    sides: dict[str, Callable[[], Awaitable[int]]] = {
        "bare": bare.ask,
        "ask": lambda: ref.ask(Add()),
        "ask_async_def": lambda: ref.ask(AddAsync()),
    }
    taken: dict[str, list[float]] = {name: [] for name in sides}
    medians: dict[str, list[float]] = {name: [] for name in sides}
    rates: dict[str, dict[int, list[float]]] = {name: {1: [], CALLERS: []} for name in sides}
    for _ in range(rounds):
        for name, ask in sides.items():
            this = await latencies(ask, 500)
            taken[name] += this
            medians[name].append(statistics.median(this))
            for callers, found in rates[name].items():
                found.append(await rate(ask, callers, 2000))
    bare.task.cancel()
    return {
        name: {
            "p50_us": statistics.median(taken[name]),
            "p99_us": statistics.quantiles(taken[name], n=100)[98],
            "ratio_p50": statistics.median(a / b for a, b in zip(medians[name], medians["bare"], strict=True)),
            "per_s_1_caller": statistics.median(rates[name][1]),
            f"per_s_{CALLERS}_callers": statistics.median(rates[name][CALLERS]),
        }
        for name in sides
    }


async def bench_tells(ref: Ref[Counter], rounds: int) -> dict[str, float]:
    """Messages per second that are sent and handled, beside a queue of the same bound."""
    number, ours, theirs = 5000, [], []
    queue: asyncio.Queue[int] = asyncio.Queue(256)

    async def read() -> None:
        while True:
            await queue.get()
            queue.task_done()

    reader = asyncio.create_task(read())
    for _ in range(rounds):
        start = perf_counter()
        for _ in range(number):
            await ref.tell(Add())
        await ref.ask(Add())
        ours.append(number / (perf_counter() - start))
        start = perf_counter()
        for _ in range(number):
            await queue.put(1)
        await queue.join()
        theirs.append(number / (perf_counter() - start))
    reader.cancel()
    return {"per_s": statistics.median(ours), "queue_per_s": statistics.median(theirs)}


async def spawn_bare(number: int) -> list[asyncio.Task[int]]:
    """Tasks that each wait on a queue of their own."""
    tasks: list[asyncio.Task[int]] = []
    for _ in range(number):
        queue: asyncio.Queue[int] = asyncio.Queue(256)
        tasks.append(asyncio.create_task(queue.get()))
        await asyncio.sleep(0)
    return tasks


async def end_bare(tasks: list[asyncio.Task[int]]) -> None:
    """End such tasks."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def bench_spawns(rounds: int) -> dict[str, float]:
    """Microseconds to spawn and to stop an actor, and the bytes of an idle one."""
    number, spawns, stops, bare = 500, [], [], []
    for _ in range(rounds):
        async with ActorSystem() as system:
            start = perf_counter()
            refs = [await system.spawn(Counter) for _ in range(number)]
            spawns.append((perf_counter() - start) / number * 1e6)
            start = perf_counter()
            for ref in refs:
                await ref.stop()
            stops.append((perf_counter() - start) / number * 1e6)
        start = perf_counter()
        tasks = await spawn_bare(number)
        bare.append((perf_counter() - start) / number * 1e6)
        await end_bare(tasks)
    return {
        "spawn_us": statistics.median(spawns),
        "stop_us": statistics.median(stops),
        "bare_spawn_us": statistics.median(bare),
        "idle_bytes": await idle_bytes(),
        "bare_idle_bytes": await bare_idle_bytes(),
    }


async def idle_bytes(number: int = 2000) -> float:
    """Bytes that Python has allocated for an actor that has answered once and waits."""
    async with ActorSystem() as system:
        refs = [await system.spawn(Counter)]
        gc.collect()
        tracemalloc.start()
        before, _ = tracemalloc.get_traced_memory()
        refs += [await system.spawn(Counter) for _ in range(number)]
        for ref in refs:
            await ref.ask(Add())
        gc.collect()
        after, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    return (after - before) / number


async def bare_idle_bytes(number: int = 2000) -> float:
    """The same for a task and its queue."""
    gc.collect()
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    tasks = await spawn_bare(number)
    gc.collect()
    after, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    await end_bare(tasks)
    return (after - before) / number


async def bench(rounds: int) -> dict[str, Any]:
    """All figures on the loop that runs."""
    async with ActorSystem() as system:
        ref = await system.spawn(Counter)
        await bench_asks(ref, 2)  # warm
        asks = await bench_asks(ref, rounds)
        tells = await bench_tells(ref, rounds)
    return {"asks": asks, "tells": tells, "actors": await bench_spawns(rounds)}


def misses(figures: dict[str, Any]) -> list[str]:
    """The goals that asyncio's figures miss."""
    ratio, size = figures["asks"]["ask"]["ratio_p50"], figures["actors"]["idle_bytes"]
    return [
        *([f"ask is {ratio:.2f} times a bare round trip, above {MAX_ASK_RATIO}"] if ratio > MAX_ASK_RATIO else []),
        *([f"an idle actor takes {size:.0f} bytes, above {MAX_IDLE_BYTES}"] if size > MAX_IDLE_BYTES else []),
    ]


def rounded(figures: Any) -> Any:
    """Three significant decimals are more than this machine can tell apart."""
    if isinstance(figures, dict):
        return {name: rounded(value) for name, value in figures.items()}
    return round(figures, 3) if isinstance(figures, float) else figures


def main() -> int:
    """Measure, print, and check when asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--loops", default="asyncio,uvloop")
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    found: dict[str, Any] = {}
    for loop in options.loops.split(","):
        if loop == "uvloop":
            import uvloop

            found[loop] = uvloop.run(bench(options.rounds))
        else:
            found[loop] = asyncio.run(bench(options.rounds))
    missed = misses(found["asyncio"]) if "asyncio" in found else []
    machine = {"python": platform.python_version(), "cpus": os.cpu_count(), "load": os.getloadavg()[0]}
    print(json.dumps(rounded({"bench": "actor", "machine": machine, **found, "missed": missed}), indent=2))
    return 1 if options.check and missed else 0


if __name__ == "__main__":
    sys.exit(main())
