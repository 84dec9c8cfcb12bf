"""How ranks find each other: torch's stores, off the loop."""

from __future__ import annotations

import asyncio
import socket
import sys
import threading
import time
from datetime import timedelta
from types import SimpleNamespace

import pytest

from aexec.errors import ConfigError, MissingExtra, RanksMissing
from aexec.executor.external.peers import Peers
from aexec.executor.external.store import PAUSE, LauncherStore, TrainerStore, off_loop
from aexec.parallel.layout import RankLayout

pytestmark = pytest.mark.anyio

PATIENCE = 20.0


@pytest.fixture(scope="module", autouse=True)
def libuv_of_torch_has_its_pipe():
    """It opens one with the first store of a process that listens, for good."""
    from torch import distributed

    distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=5))


@pytest.fixture
def port():
    """One that nobody has; torch binds with SO_REUSEADDR as well."""
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        yield held.getsockname()[1]


def stores(port, *, attempt=0, ranks=2):
    return [
        LauncherStore("127.0.0.1", port, rank=rank, world_size=ranks, serve=True, attempt=attempt)
        for rank in range(ranks)
    ]


async def test_what_rank_0_tells_the_others_learn(port):
    """Whoever comes first waits; rank 0 makes the store where the launcher has none."""
    first, other = stores(port)
    learning = asyncio.ensure_future(other.learn("key", PATIENCE))
    await asyncio.sleep(0)
    await first.tell("key", b"place", PATIENCE)
    assert await learning == b"place"
    await first.tell("key", b"another", PATIENCE)
    assert await other.learn("key", PATIENCE) == b"another"
    assert repr(other) == f"<LauncherStore 127.0.0.1:{port}, aexec/2/0: open>"
    for store in (first, other):
        store.close()
        store.close()


def test_who_waits_looks_often_enough_for_a_start_that_has_little_time():
    """A rank that came first sees the one that comes late, and a long wait costs four looks a second."""
    waited, looks = 0.0, 0
    while waited < 10.0:
        looks += 1
        pause = PAUSE(SimpleNamespace(attempt_number=looks))
        assert 0.01 <= pause <= min(0.25, 0.01 + waited / 5 + 1e-9)
        waited += pause
    assert looks < 60


async def test_without_torch_every_rank_names_the_extra(port, monkeypatch):
    """Not rank 0 alone, for which the others would wait as long as a start may take."""
    monkeypatch.setitem(sys.modules, "torch", None)
    for store in stores(port):
        with pytest.raises(MissingExtra, match=r"needs the extra 'models' \(torch is not installed"):
            await store.learn("key", PATIENCE)


async def test_a_launcher_that_keeps_a_store_is_its_host(port):
    """As torchrun's agent does: no rank serves."""
    from torch import distributed

    agent = distributed.TCPStore(
        "127.0.0.1", port, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=5)
    )  # fmt: skip
    ranks = [LauncherStore("127.0.0.1", port, rank=rank, world_size=2, serve=False) for rank in range(2)]
    await ranks[0].tell("key", b"place", PATIENCE)
    assert await ranks[1].learn("key", PATIENCE) == b"place"
    for store in ranks:
        store.close()
    del agent


async def test_what_an_earlier_attempt_has_told_is_not_learnt(port):
    """The agent of torchrun keeps its store when it restarts the ranks."""
    first, other = stores(port)
    _, later = stores(port, attempt=1)
    await first.tell("key", b"old", PATIENCE)
    assert await other.learn("key", PATIENCE) == b"old"
    with pytest.raises(TimeoutError):
        await later.learn("key", 0.2)
    for store in (first, other, later):
        store.close()


async def test_a_wait_ends_with_its_limit_and_writes_nothing(port, capfd):
    """Nobody listens there: torch would complain on stderr each time it tries."""
    _, other = stores(port)
    began = time.monotonic()
    with pytest.raises(TimeoutError):
        await other.learn("key", 0.2)
    assert time.monotonic() - began < 5
    assert capfd.readouterr().err == ""


async def test_a_store_that_cannot_be_reached_is_why_ranks_do_not_meet(port):
    """A slip in MASTER_ADDR would else look as if rank 0 were late."""
    store = stores(port)[1]
    place = SimpleNamespace(rank=1, world_size=2)
    peers = Peers(place, RankLayout(2), SimpleNamespace(), store=store, timeout=1.0)
    with pytest.raises(
        RanksMissing, match=rf"127.0.0.1:{port} \(MASTER_ADDR, MASTER_PORT\) does not answer: .*Connect call failed"
    ):
        await peers.connect()
    await peers.close(0.1)


async def test_a_port_that_somebody_else_has_is_named():
    """With the variables that it comes from."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        first, _ = stores(port)
        with pytest.raises(ConfigError, match=rf"127.0.0.1:{port} \(MASTER_ADDR, MASTER_PORT\) cannot be made"):
            await first.tell("key", b"place", PATIENCE)


async def test_the_trainers_world_has_a_store(tmp_path):
    """It is taken as it is, and left as it was."""
    from torch import distributed

    distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1, timeout=timedelta(seconds=5)
    )  # fmt: skip
    try:
        store = TrainerStore()
        await store.tell("key", b"place", PATIENCE)
        assert await TrainerStore().learn("key", PATIENCE) == b"place"
        store.close()
    finally:
        distributed.destroy_process_group()


async def test_a_thread_that_nobody_waits_for_lets_go_of_what_it_gets():
    """A cancelled start leaves no socket behind, and waits for no thread."""
    go, dropped = threading.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()

    def act():
        go.wait(PATIENCE)
        return "socket"

    waiting = asyncio.ensure_future(off_loop(act, "test", unwanted=lambda _: loop.call_soon(dropped.set)))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    go.set()
    async with asyncio.timeout(PATIENCE):
        await dropped.wait()


async def test_what_comes_as_its_caller_is_cancelled_is_let_go_of():
    """In the same turn of the loop: it is there, and nobody takes it."""
    dropped = []
    waiting = asyncio.ensure_future(off_loop(lambda: "socket", "test", unwanted=dropped.append))
    loop = asyncio.get_running_loop()
    act_is_over = asyncio.Event()

    def cancel_in_time():
        # Whatever the thread posts is run in the turn after the one that it wakes.
        if not waiting.done() and not any(thread.name == "aexec-test" for thread in threading.enumerate()):
            waiting.cancel()
        if waiting.done():
            act_is_over.set()
        else:
            loop.call_soon(cancel_in_time)

    loop.call_soon(cancel_in_time)
    async with asyncio.timeout(PATIENCE):
        await act_is_over.wait()
    assert waiting.cancelled() == (dropped == ["socket"])


async def test_what_a_thread_raises_reaches_its_caller():
    """As it is."""
    with pytest.raises(ZeroDivisionError):
        await off_loop(lambda: 1 // 0, "test")
