"""What a lockstep call costs among the ranks of ``external_launcher``; prints JSON.

For 2 and 4 ranks, each a process of its own, with and without the comparison of calls: every
rank makes the same call and answers it at once, and makes the next when it has the answers of
all. That is the control plane alone: no executor, no worker. ``step`` is two calls, a launch
that nobody answers and a sampling that one rank does, and ``agree`` the round in which ranks
say what they have. ``digest_us`` is what a comparison costs before anything is sent, for a
batch of 64 requests. ``tcp`` has the ranks meet by TCP, as on different nodes.

``python benches/bench_external.py [--rounds 5] [--ranks 2,4] [--calls 2000]``
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

import msgspec

from aexec.executor.external.digest import describe, digest
from aexec.executor.external.peers import Answer, Peers
from aexec.messages.base import Message
from aexec.messages.batch import CachedRequestData, SchedulerOutput
from aexec.messages.control import CallMethod
from aexec.messages.step import ExecuteModel, SampleTokens, StepId
from aexec.parallel.layout import RankLayout
from measure import machine

LIMIT = 120.0
REQUESTS = 64


class Folder:
    """A store: a file for each key; of ranks that meet by TCP they know nothing else."""

    def __init__(self, path: Path, *, tcp: bool) -> None:
        self._path, self._tcp = path, tcp

    async def tell(self, key: str, value: bytes, timeout: float) -> None:  # noqa: ARG002 - it is quick
        """Give a value."""
        secret, local, remote = msgspec.msgpack.decode(value)
        part = self._path / f"{key}.part"
        part.write_bytes(msgspec.msgpack.encode((secret, "" if self._tcp else local, remote)))
        part.rename(self._path / key)

    async def learn(self, key: str, timeout: float) -> bytes:
        """Wait for it."""
        async with asyncio.timeout(timeout):
            while not (self._path / key).exists():  # noqa: ASYNC110 - another process makes it
                await asyncio.sleep(0.01)
        return (self._path / key).read_bytes()

    def close(self) -> None:
        """Nothing is held."""


@dataclass(frozen=True)
class Place:
    """One rank."""

    rank: int
    world_size: int


class Counting:
    """A sink that wakes its rank when so many replies of a call are there."""

    def __init__(self) -> None:
        self._left: dict[int, int] = {}
        self._done: dict[int, asyncio.Future[None]] = {}

    def expect(self, seq: int, replies: int) -> asyncio.Future[None]:
        """What is done when they are there."""
        self._left[seq] = replies
        done = self._done[seq] = asyncio.get_running_loop().create_future()
        return done

    def replied(self, seq: int, rank: int, value: Any) -> None:  # noqa: ARG002 - they are counted
        """One more."""
        self._left[seq] -= 1
        if not self._left[seq]:
            del self._left[seq]
            self._done.pop(seq).set_result(None)

    def failed(self, seq: int, rank: int, error: BaseException) -> None:  # noqa: ARG002
        """Never here."""
        raise error

    def died(self, error: BaseException, *, here: bool) -> None:  # noqa: ARG002
        """Never here."""
        raise error

    def diverged(self, error: BaseException) -> None:
        """Never here."""
        raise error

    def asked(self, source: int, message: Message[Any], answer: Answer) -> None:
        """Never here."""

    def answered(self, call: int, rank: int, value: Any) -> None:
        """Never here."""

    def refused(self, call: int, rank: int, error: BaseException) -> None:
        """Never here."""


def batch(step: int) -> ExecuteModel:
    """A decode step of 64 requests."""
    names = [f"request-{number}" for number in range(REQUESTS)]
    cached = CachedRequestData(
        request_ids=names,
        new_token_ids=[[step + number] for number in range(REQUESTS)],
        new_block_ids=[[] for _ in names],
        num_computed_tokens=[100 + step] * REQUESTS,
    )
    output = SchedulerOutput(cached=cached, num_scheduled_tokens=dict.fromkeys(names, 1))
    return ExecuteModel(StepId(step), output, REQUESTS)


class Rank:
    """One rank that measures."""

    def __init__(self, rank: int, ranks: int, folder: Path, *, check: bool, tcp: bool) -> None:
        self._rank, self._ranks = rank, range(ranks)
        self._sink = Counting()
        self.peers = Peers(
            Place(rank, ranks),
            RankLayout(ranks),
            self._sink,
            store=Folder(folder, tcp=tcp),
            check=check,
            timeout=LIMIT,
            host="127.0.0.1" if tcp else None,
        )
        self._step = 0

    async def call(self) -> None:
        """All answer."""
        seq = self.peers.called(CallMethod(call=0, method="add", args=(1, 2)), self._ranks)
        done = self._sink.expect(seq, len(self._ranks))
        self.peers.replied(seq, 3)
        await done

    async def step(self) -> None:
        """The first one answers the second half."""
        self._step += 1
        self.peers.called(batch(self._step), ())
        seq = self.peers.called(SampleTokens(StepId(self._step)), (0,))
        done = self._sink.expect(seq, 1)
        if self._rank == 0:
            self.peers.replied(seq, [list(range(REQUESTS))])
        await done

    async def agree(self) -> None:
        """Nobody has anything."""
        await self.peers.agree([])


async def one_rank(rank: int, ranks: int, folder: Path, rounds: int, calls: int, *, check: bool, tcp: bool) -> None:
    """Measure on rank 0; the others do the same."""
    one = Rank(rank, ranks, folder, check=check, tcp=tcp)
    await one.peers.connect()
    found: dict[str, list[float]] = {}
    for _ in range(rounds):
        for name in ("call", "step", "agree"):
            ask = getattr(one, name)
            start, cpu = perf_counter(), process_time()
            for _ in range(calls):
                await ask()
            found.setdefault(f"{name}_us", []).append((perf_counter() - start) / calls * 1e6)
            found.setdefault(f"{name}_cpu_us_rank_0", []).append((process_time() - cpu) / calls * 1e6)
    await one.peers.close(LIMIT)
    if rank == 0:
        medians = {name: round(statistics.median(values), 1) for name, values in found.items()}
        sys.stdout.write(json.dumps({**medians, "call_us_best": round(min(found["call_us"]), 1)}))


def measure(ranks: int, rounds: int, calls: int, *, check: bool, tcp: bool = False) -> dict[str, float]:
    """Let so many processes do it."""
    with tempfile.TemporaryDirectory() as folder:
        common = [str(ranks), folder, str(rounds), str(calls), str(int(check)), str(int(tcp))]
        started = [
            subprocess.Popen([sys.executable, __file__, "--rank", str(rank), *common], stdout=subprocess.PIPE)
            for rank in range(ranks)
        ]
        out = [process.communicate(timeout=LIMIT)[0] for process in started]
    found: dict[str, float] = json.loads(out[0])
    return found


def digests(number: int) -> dict[str, float]:
    """Microseconds of a digest and its text."""
    messages = {"batch_of_64": batch(1), "small_call": CallMethod(call=0, method="add", args=(1, 2))}
    found: dict[str, float] = {}
    for name, message in messages.items():
        start = perf_counter()
        for _ in range(number):
            digest(message, (0, 1))
            describe(message)
        found[name] = round((perf_counter() - start) / number * 1e6, 1)
    return found


def be_rank(rank: str, ranks: str, folder: str, rounds: str, calls: str, check: str, tcp: str) -> None:
    """One of the processes that :func:`measure` starts."""
    asyncio.run(
        one_rank(int(rank), int(ranks), Path(folder), int(rounds), int(calls), check=check == "1", tcp=tcp == "1")
    )


def main() -> None:
    """Measure all of it, or be one of the ranks."""
    if sys.argv[1:2] == ["--rank"]:
        be_rank(*sys.argv[2:])
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ranks", default="2,4")
    parser.add_argument("--calls", type=int, default=2000)
    options = parser.parse_args()
    report: dict[str, Any] = {"machine": machine(), "digest_us": digests(options.calls)}
    for ranks in map(int, options.ranks.split(",")):
        for check in (True, False):
            name = f"{ranks}_ranks_check_{'on' if check else 'off'}"
            report[name] = measure(ranks, options.rounds, options.calls, check=check)
    report["2_ranks_check_on_tcp"] = measure(2, options.rounds, options.calls, check=True, tcp=True)
    sys.stdout.write(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
