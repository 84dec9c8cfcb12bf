from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
import threading
from pathlib import Path

import anyio
import pytest
from stopwatch import Stopwatch

from aexec.executor.multiproc.output import WorkerOutput
from aexec.executor.multiproc.spawn import Exit, ForkServerProcess, Recipe

pytestmark = pytest.mark.anyio

WORKER = """
import os, signal, socket, sys, time

def serve(fd):
    with socket.socket(fileno=fd) as sock:
        sock.send(" ".join([os.environ["RANK"], str(os.getpid()), str(os.getppid())]).encode())
        order = sock.recv(100).decode()
    if order == "open files":
        return len(os.listdir("/proc/self/fd"))
    if order == "exit":
        sys.exit(7)
    if order == "raise":
        raise ValueError("in the worker")
    if order == "kill":
        os.kill(os.getpid(), signal.SIGSEGV)
    if order == "sleep":
        time.sleep(60)
    return 0
"""


def state_of(pid):
    """As in ``ps``; empty: it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return ""


class Told:
    """Keeps what the server tells."""

    def __init__(self):
        self.events, self.news = [], anyio.Event()

    def __getattr__(self, name):
        def tell(*facts):
            self.events.append((name, *facts))
            if name == "worker_started":
                os.close(facts[1].pidfd)
            self.news.set()

        return tell

    async def until(self, name, rank=None):
        with anyio.fail_after(20):
            while True:
                for event in self.events:
                    if event[0] == name and (rank is None or event[1] == rank):
                        return event
                self.news = anyio.Event()
                await self.news.wait()


class Server:
    def __init__(self, **recipe):
        self.told = Told()
        self.output = WorkerOutput("server", lambda label, line: None)
        defaults = {"entry": "a_worker:serve", "command": (), "preload": (), "env": dict(os.environ)}
        self.process = ForkServerProcess(Recipe(**{**defaults, **recipe}), self.told)
        self.process.launch(self.output.write_end)
        self.output.close_write_end()
        self.socks = {}

    async def start(self, rank):
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        with theirs:
            null = os.open(os.devnull, os.O_WRONLY)
            self.process.start(rank, {"RANK": str(rank)}, theirs.fileno(), null)
            os.close(null)
        self.socks[rank] = ours
        hello = await asyncio.wait_for(asyncio.get_running_loop().sock_recv(ours, 100), 20)
        return [int(word) for word in hello.split()]

    async def close(self):
        for sock in self.socks.values():
            sock.close()
        ended = await self.process.close(5)
        self.output.close()
        return ended


@pytest.fixture
async def server(tmp_path, monkeypatch, leak_check):
    (tmp_path / "a_worker.py").write_text(WORKER)
    monkeypatch.syspath_prepend(tmp_path)
    server = Server()
    yield server
    await server.close()


async def test_workers_are_children_of_the_server(server):
    """The driver is not forked, and has one child only."""
    ranks = [await server.start(rank) for rank in range(2)]
    assert [rank for rank, _, _ in ranks] == [0, 1]
    assert {parent for _, _, parent in ranks} == {server.process.pid}
    assert (await server.told.until("worker_started", 1))[2].pid == ranks[1][1]


@pytest.mark.parametrize(
    ("order", "how"),
    [("exit", Exit(7, None)), ("return", Exit(0, None)), ("raise", Exit(1, None)), ("kill", Exit(None, "SIGSEGV"))],
)
async def test_each_end_is_told_as_what_it_is(server, order, how):
    """G30: exit code or signal, of a process that is not our child."""
    await server.start(3)
    server.socks[3].send(order.encode())
    assert await server.told.until("worker_ended") == ("worker_ended", 3, how)


async def test_a_worker_inherits_nothing_but_its_line(server):
    """Its socket, and the standard three: nothing of its siblings', so that each line breaks when it should."""
    await server.start(0)
    await server.start(1)
    server.socks[1].send(b"open files")
    told = await server.told.until("worker_ended")
    assert told[2].code - 1 == 3  # the directory that was listed, and standard input, output and error


async def test_closing_ends_workers_that_sleep(server):
    """Promise 5: killed, and waited for."""
    pids = [(await server.start(rank))[1] for rank in range(2)]
    server.socks[0].send(b"sleep")
    assert await server.close()
    assert not [pid for pid in pids if state_of(pid)]


async def test_a_server_that_hangs_is_killed_and_its_workers_with_it(server):
    """Whatever holds it."""
    await server.told.until("server_ready")
    os.kill(server.process.pid, signal.SIGSTOP)
    assert not await server.process.close(0.05)


async def too_many_at_once(server):
    """Workers that are asked for while the server does not listen; there is no room for all requests."""
    server.process._sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
    os.kill(server.process.pid, signal.SIGSTOP)
    starting = [asyncio.ensure_future(server.start(rank)) for rank in range(12)]
    await asyncio.sleep(0)
    assert " requests wait>" in repr(server.process)
    return starting


async def test_more_workers_than_there_is_room_for_are_asked_for_in_turn(server):
    """The loop is not held up, and each gets its own line, though the caller has closed its copies."""
    starting = await too_many_at_once(server)
    os.kill(server.process.pid, signal.SIGCONT)
    assert [rank for rank, _, _ in await asyncio.gather(*starting)] == list(range(12))
    assert repr(server.process).endswith(": up>")


async def test_requests_that_still_wait_go_with_the_server(server):
    """Their descriptors are closed."""
    starting = await too_many_at_once(server)
    for each in starting:
        each.cancel()
    await asyncio.wait(starting)
    await server.process.close(0.1)
    assert repr(server.process).endswith(": gone>")


async def test_a_server_that_is_killed_is_told(server):
    """It has not ended because we asked."""
    os.kill(server.process.pid, signal.SIGKILL)
    assert await server.told.until("server_lost")


async def test_signals_to_the_whole_process_group_do_not_end_it(server):
    """Ctrl-C means the driver, which ends it in its own time (G19)."""
    await server.start(0)
    for number in (signal.SIGINT, signal.SIGTERM):
        os.kill(server.process.pid, number)
    assert (await server.start(1))[0] == 1


async def test_what_cannot_be_preloaded_is_told(tmp_path, monkeypatch):
    """And everything else goes on."""
    (tmp_path / "a_worker.py").write_text(WORKER)
    monkeypatch.syspath_prepend(tmp_path)
    server = Server(preload=("no_such_module", "json"))
    _, failed = await server.told.until("server_ready")
    assert failed == {"no_such_module": "ModuleNotFoundError: No module named 'no_such_module'"}
    assert (await server.start(0))[0] == 0
    await server.close()


@pytest.mark.parametrize("hang", ["import time; time.sleep(60)", "import ctypes; ctypes.PyDLL(None).sleep(60)"])
async def test_a_close_in_the_middle_of_an_import_does_not_wait_for_it(hang, tmp_path, monkeypatch):
    """A start that is cancelled while torch loads is over at once, if native code holds the interpreter too."""
    (tmp_path / "slow_module.py").write_text(f"print('importing', flush=True); {hang}")
    monkeypatch.syspath_prepend(tmp_path)
    seen = anyio.Event()
    server = Server(preload=("slow_module",))
    server.output._forward = lambda label, line: seen.set()
    with anyio.fail_after(20):
        await seen.wait()
    with Stopwatch() as watch, anyio.fail_after(20):
        assert await server.close()
    assert watch.seconds < 2


async def test_a_fresh_interpreter_gets_the_same(tmp_path):
    """Method spawn: one descriptor, its own variables, its end told."""
    (tmp_path / "a_worker.py").write_text(WORKER)
    command = (sys.executable, "-c", "import sys, a_worker; sys.exit(a_worker.serve(int(sys.argv[1])))")
    server = Server(command=command, env={**os.environ, "PYTHONPATH": str(tmp_path)})
    assert (await server.start(5))[0] == 5
    server.socks[5].send(b"exit")
    assert await server.told.until("worker_ended") == ("worker_ended", 5, Exit(7, None))
    await server.close()


async def test_the_thread_that_started_it_may_end(tmp_path, monkeypatch):
    """The kernel ties a death signal to the thread that made a child: here that is the server's own."""
    (tmp_path / "a_worker.py").write_text(WORKER)
    monkeypatch.syspath_prepend(tmp_path)
    loop = asyncio.new_event_loop()
    made = {}

    async def start():
        made["server"] = Server()
        made["rank"] = await made["server"].start(0)

    thread = threading.Thread(target=lambda: loop.run_until_complete(start()))
    thread.start()
    await asyncio.to_thread(thread.join)
    try:
        pid = made["rank"][1]
        assert state_of(pid) in ("R", "S")
        assert await asyncio.to_thread(lambda: loop.run_until_complete(made["server"].start(1)))
    finally:
        await asyncio.to_thread(lambda: loop.run_until_complete(made["server"].close()))
        loop.close()
