"""Ranks as processes: one is killed, stopped, busy; strangers come to where they meet."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import pickle
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest
import ray_namespaces
from external_ranks import ranks

pytestmark = pytest.mark.anyio

PROGRAM = Path(__file__).with_name("rank_process.py")
APART = os.environ.get("AEXEC_TEST_NAMESPACES") == "1"
QUIET = (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT, socket.TCP_USER_TIMEOUT)
PATIENCE = 30.0
AT_ONCE = 2.0


class RankProcess:
    """A rank in a process of its own."""

    def __init__(self, process):
        self.process, self.pid = process, process.pid

    async def hear(self, event):
        """What it says next of this kind."""
        async with asyncio.timeout(PATIENCE):
            while True:
                line = await self.process.stdout.readline()
                assert line, f"it has ended with {await self.process.wait()}"
                facts = json.loads(line)
                if facts["event"] == event:
                    return facts

    def tell(self, **order):
        """Give it something to do."""
        self.process.stdin.write(json.dumps(order).encode() + b"\n")

    async def end(self):
        """Leave nothing of it."""
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()
        await self.process.wait()
        self.process.stdin.close()
        self.process._transport.close()


async def start(rank, tensor, data, folder, host, within=()):
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2] / "plugins")}
    command = [*within, sys.executable, str(PROGRAM), *map(str, (rank, tensor, data, folder, host))]
    return RankProcess(
        await asyncio.create_subprocess_exec(
            *command, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, env=environment
        )
    )


@contextlib.asynccontextmanager
async def processes(folder, tensor, data=1, host=""):
    """All ranks of a layout, met."""
    async with contextlib.AsyncExitStack() as stack:
        several = []
        for rank in range(tensor * data):
            several.append(await start(rank, tensor, data, folder, host))
            stack.push_async_callback(several[-1].end)
        for one in several:
            await one.hear("open")
        yield several


async def one_call(several, *args):
    """All make it; what each hears of it."""
    for one in several:
        one.tell(do="call", args=args)
    for one in several:
        await one.hear("called")
        heard = [await one.hear("replied") for _ in several]
        assert sorted(facts["rank"] for facts in heard) == list(range(len(several)))


async def test_the_kernel_watches_the_quiet_line():
    """Between nodes: it asks each second, and ends the line after three without an answer, whatever a loop does."""
    async with ranks(2, remote_only=True) as world:
        for line in (*world.peers[0]._standing._lines(), *world.peers[1]._standing._lines()):
            control, work = line.control._link.sock, line.work._link.sock
            found = [control.getsockopt(socket.IPPROTO_TCP, name) for name in QUIET]
            assert found == [1, 1, 2, 3000]
            assert work.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 0  # its window may be full for long


def take_down(namespace):
    """Its interface."""
    subprocess.run(["ip", "-n", namespace, "link", "set", "eth0", "down"], check=True, timeout=PATIENCE)


if APART:

    @pytest.mark.parametrize("asking", [False, True])
    async def test_a_cut_link_is_a_death_within_seconds(tmp_path, asking):
        """Two network namespaces: the interface of one goes down, in silence or while something is on its way."""
        async with contextlib.AsyncExitStack() as stack:
            made = stack.enter_context(ray_namespaces.namespaces())
            pair = []
            for rank, (name, address) in enumerate(made.items()):
                pair.append(await start(rank, 2, 1, tmp_path, address, ray_namespaces.within(name)))
                stack.push_async_callback(pair[-1].end)
            for one in pair:
                await one.hear("open")
            await one_call(pair, 1)
            far = list(made)[1]
            take_down(far)
            cut = time.monotonic()
            for rank, one in enumerate(pair):
                if asking:
                    one.tell(do="call", args=[2])
                facts = await one.hear("died")
                assert facts["rank"] == 1 - rank
                assert facts["at"] - cut < 4.5


@pytest.mark.parametrize("dead", [0, 1, 2])
async def test_a_killed_rank_is_known_to_all_at_once(tmp_path, dead):
    """G62: whoever waits for it, and whoever does not: within 2 s, with its rank and process."""
    async with processes(tmp_path, 3) as several:
        await one_call(several, 1)
        for one in several:
            one.tell(do="call", args=[2], reply=False)
            await one.hear("called")
        killed = time.monotonic()
        os.kill(several[dead].pid, signal.SIGKILL)
        for one in several:
            if one is not several[dead]:
                facts = await one.hear("died")
                assert facts["at"] - killed < AT_ONCE
                assert (facts["rank"], facts["pid"]) == (dead, several[dead].pid)


async def test_a_killed_rank_of_another_replica_is_known_as_well(tmp_path):
    """All replicas end together, as the launcher would have it."""
    async with processes(tmp_path, 2, 2) as several:
        killed = time.monotonic()
        os.kill(several[3].pid, signal.SIGKILL)
        for one in several[:3]:
            facts = await one.hear("died")
            assert facts["at"] - killed < AT_ONCE
            assert (facts["rank"], facts["here"]) == ((1, True) if one is several[2] else (3, False))


async def test_ranks_that_differ_fail_within_two_seconds(tmp_path):
    """G53: real processes, another argument in rank 1."""
    async with processes(tmp_path, 2) as several:
        await one_call(several, 1)
        began = time.monotonic()
        for rank, one in enumerate(several):
            one.tell(do="call", args=[2 + rank])
        for one in several:
            facts = await one.hear("diverged")
            assert facts["at"] - began < AT_ONCE
            assert "rank 0 asked for add(2); rank 1 asked for add(3)" in facts["text"]
            one.tell(do="call", args=[7])
            assert "rank 1 does not ask for what the others ask for (call 2)" in (await one.hear("refused"))["text"]


async def test_a_rank_that_is_busy_or_stopped_is_not_dead(tmp_path):
    """A trainer's step blocks a loop, or SIGSTOP a process, for longer than a cut link takes to be seen (3 s)."""
    async with processes(tmp_path, 3, host="127.0.0.1") as several:
        os.kill(several[2].pid, signal.SIGSTOP)
        for one in several[:2]:
            one.tell(do="call", args=[1])
            await one.hear("called")
            one.tell(do="block", seconds=4.5)
        for one in several[:2]:
            await one.hear("blocked")
        os.kill(several[2].pid, signal.SIGCONT)
        several[2].tell(do="call", args=[1])
        for one in several:
            assert sorted([(await one.hear("replied"))["rank"] for _ in several]) == [0, 1, 2]
            one.tell(do="close", grace=PATIENCE)
        for one in several:
            await one.hear("closed")
            assert await one.process.wait() == 0


class Trap:
    """Touches a file when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


async def stranger(host, port, data):
    """A connection that says this, and waits."""
    sock, loop = socket.socket(), asyncio.get_running_loop()
    sock.setblocking(False)
    try:
        await loop.sock_connect(sock, (host, port))
        await loop.sock_sendall(sock, data)
    except OSError:
        sock.close()
        raise
    return sock


async def test_strangers_do_no_harm(tmp_path):
    """G50: garbage, a pickle that would touch a file, and hundreds that say nothing: nothing runs, the ranks meet."""
    trap = tmp_path / "trap"
    async with contextlib.AsyncExitStack() as stack:
        first = await start(0, 2, 1, tmp_path, "127.0.0.1")
        stack.push_async_callback(first.end)
        place = tmp_path / "meeting-0"
        async with asyncio.timeout(PATIENCE):
            while not place.exists():  # noqa: ASYNC110 - another process makes it
                await asyncio.sleep(0.01)
        _, _, (host, port) = msgspec.msgpack.decode(place.read_bytes())
        for data in (b"GET / HTTP/1.1\r\n\r\n" * 50, pickle.dumps(Trap(trap)) * 20, b"\0" * 4096, *[b""] * 300):
            stack.callback((await stranger(host, port, data)).close)
        second = await start(1, 2, 1, tmp_path, "127.0.0.1")
        stack.push_async_callback(second.end)
        for one in (first, second):
            await one.hear("open")
        await one_call([first, second], 1)
        assert not trap.exists()
        with pytest.raises(ConnectionRefusedError):  # all have met: nobody can come any more
            (await stranger(host, port, b"late")).close()
