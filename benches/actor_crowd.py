"""100 000 actors spawn, answer once, and stop in one process; prints JSON.

``python benches/actor_crowd.py [--number 100000]``; ``bench_actor.py`` runs it as a process
of its own, so that its peak memory is its own.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import resource
import sys
from time import perf_counter
from typing import Any

from actor_subjects import Add, Counter
from aexec.actor import ActorSystem

MIB = 1024 if sys.platform != "darwin" else 1024 * 1024  # Linux says kibibytes, macOS bytes


def peak_mib() -> float:
    """The most memory that this process has had, interpreter and libraries included."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / MIB


async def crowd(number: int) -> dict[str, Any]:
    """Seconds of each part, the peak of memory, and how many were there and are left."""
    start = perf_counter()
    async with ActorSystem() as system:
        refs = [await system.spawn(Counter) for _ in range(number)]
        spawned = perf_counter()
        answers = sum([await ref.ask(Add()) for ref in refs])
        answered, alive = perf_counter(), system.statistics().actors
    stopped = perf_counter()
    return {
        "actors": alive,
        "answers": answers,
        "left": system.statistics().actors,
        "spawn_s": spawned - start,
        "ask_each_s": answered - spawned,
        "stop_s": stopped - answered,
        "peak_mib": peak_mib(),
    }


def main() -> None:
    """Run it and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--number", type=int, default=100_000)
    print(json.dumps(asyncio.run(crowd(parser.parse_args().number))))


if __name__ == "__main__":
    main()
