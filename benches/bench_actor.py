"""What the actor core costs beside bare asyncio and beside its peers, in the same run; prints JSON.

Each figure stands beside what asyncio takes for the least that could do the same: two
tasks that hand a future to and fro for an ask, an ``asyncio.Queue`` and a task that reads
it for a tell, a spawn and an idle actor. The peers, Pykka and xoscar, are asked if they
are installed: ``nox -s bench -- actor`` sees to that. Rounds of all sides alternate, since
a machine's speed drifts by more than what is measured; of the rounds the median and the
range are given. ``ratios`` are medians of the ratios of neighbouring rounds.

With ``in_flight`` one caller has so many asks under way at a time, and waits for all.

``python benches/bench_actor.py [--rounds 15] [--loops asyncio,uvloop] [--check]``; with
``--check`` it exits with 1 unless each goal is met on asyncio's own loop.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from time import perf_counter
from typing import Any

from actor_peers import PEERS, open_peers
from actor_subjects import Add, AddAsync, Bare, Counter, bare_idle_bytes, end_bare, idle_bytes, spawn_bare
from aexec.actor import ActorSystem, Ref
from measure import AsyncSide, Goal, Side, machine, rate_name, rounded, spread

CALLERS = 100
ASKS = 3000  # in a round of one side, at each number of callers
ONE, MANY = rate_name(1), rate_name(CALLERS)
CROWD = Path(__file__).with_name("actor_crowd.py")
CROWD_SIZE = 100_000

Rounds = dict[str, list[float]]


async def bench_asks(ref: Ref[Counter], peers: dict[str, Side], rounds: int) -> dict[str, Any]:
    """Asks of plain and of async handlers beside the bare round trip and the peers."""
    bare = Bare()
    sides: dict[str, Side] = {
        "bare": AsyncSide(bare.ask),
        "ask": AsyncSide(lambda: ref.ask(Add())),
        "ask_async_def": AsyncSide(lambda: ref.ask(AddAsync())),
        **peers,
    }
    taken: Rounds = {name: [] for name in sides}
    found: dict[str, Rounds] = {name: {} for name in sides}
    for _ in range(rounds):
        for name, side in sides.items():
            this = await side.latencies(500)
            taken[name] += this
            figures = {"p50_us": statistics.median(this)}
            for callers in (1, CALLERS):
                figures |= await side.rates(callers, ASKS)
            for figure, value in figures.items():
                found[name].setdefault(figure, []).append(value)
    bare.task.cancel()
    return {name: {**describe(found[name]), "p99_us": percentile(taken[name])} for name in sides} | {
        "ratios": ratios(found)
    }


def describe(rounds: Rounds) -> dict[str, Any]:
    """The spread of each figure."""
    return {figure: spread(values) for figure, values in rounds.items()}


def percentile(values: list[float]) -> float:
    """The value that one in a hundred exceeds."""
    return statistics.quantiles(values, n=100)[98]


def ratios(found: dict[str, Rounds]) -> dict[str, float]:
    """An ask beside the bare round trip in time, and beside each peer in asks per second."""
    ask = found["ask"]
    beside = {f"{name}_p50_to_bare": ratio(found[name]["p50_us"], found["bare"]["p50_us"]) for name in found}
    for peer in [name for name in found if name in PEERS]:
        beside |= {
            f"{figure}_to_{peer}": ratio(ask[figure], found[peer][figure]) for figure in ask if "per_s" in figure
        }
    return beside


def ratio(ours: list[float], theirs: list[float]) -> float:
    """The median of the ratios of each round."""
    return statistics.median(a / b for a, b in zip(ours, theirs, strict=True))


async def bench_tells(ref: Ref[Counter], rounds: int) -> dict[str, Any]:
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
    return {"per_s": spread(ours), "bare_queue_per_s": spread(theirs)}


async def bench_spawns(rounds: int) -> dict[str, Any]:
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
        "spawn_us": spread(spawns),
        "bare_spawn_us": spread(bare),
        "stop_us": spread(stops),
        "idle_bytes": await idle_bytes(),
        "bare_idle_bytes": await bare_idle_bytes(),
    }


async def bench(rounds: int) -> dict[str, Any]:
    """All figures on the loop that runs."""
    async with ActorSystem() as system, open_peers(CALLERS) as peers:
        ref = await system.spawn(Counter)
        await bench_asks(ref, peers, 1)  # warm
        asks = await bench_asks(ref, peers, rounds)
        tells = await bench_tells(ref, rounds)
    return {"asks": asks, "tells": tells, "actors": await bench_spawns(rounds)}


def bench_crowd() -> dict[str, Any]:
    """Many actors at once, in a process of their own."""
    command = [sys.executable, str(CROWD), "--number", str(CROWD_SIZE)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    crowd: dict[str, Any] = json.loads(done.stdout)
    return crowd


def goals(figures: dict[str, Any], crowd: dict[str, Any]) -> list[Goal]:
    """What the figures of asyncio's loop have to reach."""
    beside = figures["asks"]["ratios"]
    return [
        Goal("ask, in bare round trips", beside["ask_p50_to_bare"], at_most=3.0),
        Goal("asks/s beside Pykka, 1 caller", beside.get(f"{ONE}_to_pykka"), at_least=1.5),
        Goal(f"asks/s beside Pykka, {CALLERS} callers", beside.get(f"{MANY}_to_pykka"), at_least=3.0),
        Goal("asks/s beside xoscar, 1 caller", beside.get(f"{ONE}_to_xoscar"), at_least=5.0),
        Goal(f"asks/s beside xoscar, {CALLERS} callers", beside.get(f"{MANY}_to_xoscar"), at_least=5.0),
        Goal("bytes of an idle actor", figures["actors"]["idle_bytes"], at_most=4096),
        Goal("actors alive at once in one process", crowd["actors"], at_least=CROWD_SIZE),
        Goal("of them left at the end", crowd["left"], at_most=0),
    ]


def run(loop: str, rounds: int) -> dict[str, Any]:
    """All figures on one kind of loop."""
    if loop == "uvloop":
        import uvloop

        return uvloop.run(bench(rounds))
    return asyncio.run(bench(rounds))


def main() -> int:
    """Measure, print, and check when asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--loops", default="asyncio,uvloop")
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    here = machine([peer for peer in PEERS if find_spec(peer) is not None])
    found = {loop: run(loop, options.rounds) for loop in options.loops.split(",")}
    crowd = bench_crowd()
    reached = goals(found["asyncio"], crowd) if "asyncio" in found else []
    report = {
        "bench": "actor",
        "machine": here,
        "goals": [goal.as_json() for goal in reached],
        **found,
        "crowd": crowd,
        "missed": [goal.what for goal in reached if not goal.is_met],
    }
    print(json.dumps(rounded(report), indent=2))
    return 1 if options.check and report["missed"] else 0


if __name__ == "__main__":
    sys.exit(main())
