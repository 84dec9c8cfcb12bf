"""What a frame costs between processes of a node; prints JSON.

A small message to 1, 2 and 4 processes and an answer from each (``rtt``, microseconds), an
array to 1, 2 and 4 of them (``bulk``, milliseconds), each in turns with what it is compared
with: a bare pickle over a SEQPACKET socket through the same loop, and
``multiprocessing.Pipe``. Then what processes cost that wait. Absolute times mean little on
a shared machine: look at the ratios.

``python benches/bench_transport.py [--rounds 3] [--calls 500] [--loop asyncio|uvloop]
[--sizes-mb 1,10,30] [--seconds 3] [--spin-us 0] [--hot-us 0]``
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import multiprocessing
import pickle
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import uvloop

from aexec.transport import Frame, HotWindow, Kind, LoopChannel, Writer, seqpacket_pair
from measure import latencies_of, machine, rounded, spread

MIB = 1 << 20
SMALL = ("execute_model", 7, b"x" * 100)
RANKS = (1, 2, 4)


def start(how: str, fd: int, spin_us: float = 0.0) -> subprocess.Popen[bytes]:
    """The other process."""
    script = Path(__file__).with_name("transport_peer.py")
    return subprocess.Popen([sys.executable, str(script), how, str(fd), "-1", str(spin_us)], pass_fds=[fd])


class Ours:
    """Channels to so many processes."""

    name = "transport"

    def __init__(self, ranks: int, *, spin_us: float, hot_us: float) -> None:
        self.writer = Writer()
        self.hot = HotWindow(hot_us * 1e-6)
        self.channels: list[LoopChannel] = []
        self.processes: list[subprocess.Popen[bytes]] = []
        self.left = 0
        for _ in range(ranks):
            ours, theirs = seqpacket_pair()
            self.processes.append(start("transport", theirs.fileno(), spin_us))
            theirs.close()
            self.channels.append(LoopChannel(ours, self.writer, self.on_frame, print, hot=self.hot))
            self.channels[-1].open()

    def on_frame(self, _: Frame) -> None:
        """An answer."""
        self.left -= 1
        if not self.left:
            self.done.set_result(None)

    async def ask(self, value: Any) -> None:
        """One round trip to all."""
        self.done = asyncio.get_running_loop().create_future()
        self.left = len(self.channels)
        self.writer.send(self.channels, Kind.MESSAGE, 1, value)
        await self.done

    def close(self) -> None:
        """End them."""
        for channel in self.channels:
            channel.close()
        self.writer.close()


class Bare:
    """A pickle in a datagram, through the same loop: nothing around it, and no bulk."""

    name = "bare"

    def __init__(self, ranks: int) -> None:
        self.sockets: list[socket.socket] = []
        self.processes: list[subprocess.Popen[bytes]] = []
        self.left = 0
        for _ in range(ranks):
            ours, theirs = seqpacket_pair()
            self.processes.append(start("raw", theirs.fileno()))
            theirs.close()
            ours.setblocking(False)
            asyncio.get_running_loop().add_reader(ours.fileno(), self.on_data, ours)
            self.sockets.append(ours)

    def on_data(self, sock: socket.socket) -> None:
        """An answer."""
        pickle.loads(sock.recv(1 << 16))
        self.left -= 1
        if not self.left:
            self.done.set_result(None)

    async def ask(self, value: Any) -> None:
        """One round trip to all."""
        self.done = asyncio.get_running_loop().create_future()
        self.left = len(self.sockets)
        data = pickle.dumps(value, 5)
        for sock in self.sockets:
            sock.send(data)
        await self.done

    def close(self) -> None:
        """End them."""
        for sock in self.sockets:
            asyncio.get_running_loop().remove_reader(sock.fileno())
            sock.close()


class Pipes:
    """``multiprocessing.Pipe``, which blocks: a reference, not a rival, for a loop."""

    name = "mp_pipe"

    def __init__(self, ranks: int) -> None:
        self.pipes: list[Any] = []
        self.processes: list[subprocess.Popen[bytes]] = []
        for _ in range(ranks):
            ours, theirs = multiprocessing.Pipe()
            self.processes.append(start("pipe", theirs.fileno()))
            theirs.close()
            self.pipes.append(ours)

    async def ask(self, value: Any) -> None:
        """One round trip to all."""
        for pipe in self.pipes:
            pipe.send(value)
        for pipe in self.pipes:
            pipe.recv()

    def close(self) -> None:
        """End them."""
        for pipe in self.pipes:
            pipe.close()


async def in_turns(makers: list[Callable[[], Any]], value: Any, rounds: int, calls: int) -> dict[str, Any]:
    """Medians of each side, microseconds, and what each is to the first."""
    sides = [make() for make in makers]
    medians: dict[str, list[float]] = {side.name: [] for side in sides}
    least: dict[str, float] = {}
    for turn in range(rounds + 1):
        for side in sides:
            taken = await latencies_of(lambda side=side: side.ask(value), calls)
            if turn:  # the first warms up
                medians[side.name].append(statistics.median(taken))
                least[side.name] = min(least.get(side.name, 1e9), *taken)
    for side in sides:
        side.close()
        for process in side.processes:
            process.wait(10)
    ours = statistics.median(medians[sides[0].name])
    found: dict[str, Any] = {name: {**spread(values), "min": least[name]} for name, values in medians.items()}
    found["ratio_to"] = {
        name: ours / statistics.median(values) for name, values in medians.items() if name != "transport"
    }
    return found


async def idle(ranks: int, seconds: float, spin_us: float) -> dict[str, float]:
    """CPU of processes that wait, and of this one, milliseconds."""
    side = Ours(ranks, spin_us=spin_us, hot_us=0)
    for _ in range(200):
        await side.ask(SMALL)
    await asyncio.sleep(0.2)

    def spent() -> float:
        files = [Path(f"/proc/{process.pid}/schedstat") for process in side.processes]
        return sum(int(file.read_text().split()[0]) for file in files) / 1e6

    theirs, ours = spent(), time.process_time()
    await asyncio.sleep(seconds)
    cost = {"seconds": seconds, "workers_ms": spent() - theirs, "driver_ms": (time.process_time() - ours) * 1e3}
    side.close()
    for process in side.processes:
        process.wait(10)
    return cost


async def main(options: argparse.Namespace) -> None:
    gc.freeze()
    report: dict[str, Any] = {
        "machine": machine(["numpy", "uvloop"]),
        "loop": options.loop,
        "rtt_us": {},
        "bulk_ms": {},
    }
    for ranks in RANKS:
        makers = [lambda ranks=ranks: Ours(ranks, spin_us=options.spin_us, hot_us=options.hot_us)]
        makers += [lambda ranks=ranks: Bare(ranks), lambda ranks=ranks: Pipes(ranks)]
        report["rtt_us"][ranks] = await in_turns(makers, SMALL, options.rounds, options.calls)
        for size in map(float, options.sizes_mb.split(",")):
            array = np.ones(int(size * MIB), np.uint8)
            makers = [lambda ranks=ranks: Ours(ranks, spin_us=0, hot_us=0), lambda ranks=ranks: Pipes(ranks)]
            found = await in_turns(makers, array, 2, max(3, int(60 / size)))
            report["bulk_ms"][f"{size:g} MB x {ranks}"] = {
                name: value if name == "ratio_to" else value["median"] / 1e3 for name, value in found.items()
            }
    report["idle"] = await idle(max(RANKS), options.seconds, options.spin_us)
    print(json.dumps(rounded(report), indent=2))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--calls", type=int, default=500)
    parser.add_argument("--loop", choices=["asyncio", "uvloop"], default="asyncio")
    parser.add_argument("--sizes-mb", default="1,10,30")
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--spin-us", type=float, default=0.0)
    parser.add_argument("--hot-us", type=float, default=0.0)
    chosen = parser.parse_args()
    (uvloop.run if chosen.loop == "uvloop" else asyncio.run)(main(chosen))
