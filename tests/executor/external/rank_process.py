"""One rank as a process: ``rank_process.py RANK TENSOR DATA FOLDER HOST``; does what it is told, a line at a time.

What it is told by others it prints, a line of JSON each. Ranks find each other in a folder.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import threading
import time
from pathlib import Path

import msgspec
from external_ranks import Place, Sink, call, hello_of

from aexec.errors import AexecError
from aexec.executor.external.peers import Peers
from aexec.parallel.layout import RankLayout


class FolderStore:
    """A file for each key; of a rank that has an address the others know that alone, as from another node."""

    problem = ""

    def __init__(self, folder, host):
        self._folder, self._host = Path(folder), host

    async def tell(self, key, value, timeout):
        """Give a value."""
        secret, local, remote = msgspec.msgpack.decode(value)
        value = msgspec.msgpack.encode((secret, "" if self._host else local, remote))
        part = self._folder / f"{key}.part"
        part.write_bytes(value)
        part.rename(self._folder / key)

    async def learn(self, key, timeout):
        """Wait for it."""
        async with asyncio.timeout(timeout):
            while not (self._folder / key).exists():  # noqa: ASYNC110 - another process makes it
                await asyncio.sleep(0.01)
        return (self._folder / key).read_bytes()

    def close(self):
        """Nothing is held."""


def say(**facts):
    """Print a line."""
    sys.stdout.write(json.dumps(facts) + "\n")
    sys.stdout.flush()


class SayingSink(Sink):
    """Prints what it is told."""

    def replied(self, seq, rank, value):
        say(event="replied", seq=seq, rank=rank, value=value)

    def failed(self, seq, rank, error):
        say(event="failed", seq=seq, rank=rank, text=str(error), kind=type(error).__name__)

    def died(self, error, *, here):
        say(event="died", rank=error.rank, pid=error.pid, text=str(error), here=here, at=time.monotonic())

    def diverged(self, error):
        say(event="diverged", rank=error.rank, step=error.step, text=str(error), at=time.monotonic())


async def main(rank, tensor, data, folder, host):
    """Meet the others, then do what stdin says."""
    layout = RankLayout(tensor, 1, data)
    place = Place(rank, layout.size)
    peers = Peers(place, layout, SayingSink(), store=FolderStore(folder, host), host=host or None, timeout=30.0)
    await peers.connect(os.getpid())
    hello = hello_of(rank % tensor)
    await peers.open(type(hello)(rank=hello.rank, pid=os.getpid(), node="here", worker="W", methods={}))
    say(event="open", pid=os.getpid())
    loop, lines = asyncio.get_running_loop(), asyncio.Queue()

    def read():
        for line in sys.stdin:
            loop.call_soon_threadsafe(lines.put_nowait, json.loads(line))

    threading.Thread(target=read, daemon=True).start()
    while True:
        order = await lines.get()
        if order["do"] == "call":
            try:
                seq = peers.called(call("add", *order["args"]), range(tensor))
            except AexecError as error:
                say(event="refused", text=str(error))
            else:
                say(event="called", seq=seq)
                if order.get("reply", True):
                    peers.replied(seq, rank)
        elif order["do"] == "block":
            say(event="blocks")
            time.sleep(order["seconds"])  # noqa: ASYNC251 - as a trainer does
            say(event="blocked")
        elif order["do"] == "close":
            await peers.close(order["grace"])
            say(event="closed")
            return


if __name__ == "__main__":
    number, tensors, replicas, where, address = sys.argv[1:]
    asyncio.run(main(int(number), int(tensors), int(replicas), where, address))
