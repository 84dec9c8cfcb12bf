from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
from pathlib import Path

import anyio
import pytest

from aexec.actor import Actor, ActorSystem
from aexec.testing import LeakCheck, Leaked

pytestmark = pytest.mark.anyio


class Idle(Actor):
    """Does nothing."""


async def test_what_ends_in_time_is_no_leak():
    """Actors, tasks, threads and descriptors that are gone at the end, or soon after."""
    gone = threading.Event()
    async with LeakCheck():
        async with ActorSystem() as system:
            await system.spawn(Idle)
        threading.Thread(target=gone.wait).start()
        threading.Timer(0.05, gone.set).start()
        os.close(os.open(os.devnull, os.O_RDONLY))


async def test_an_actor_and_its_system_are_named():
    """The failure says which actor, in which state, of which system."""
    system = ActorSystem(name="lost")
    check = await LeakCheck(patience=0.0).__aenter__()
    await system.open()
    await system.using(name="orphan").spawn(Idle)
    with pytest.raises(Leaked) as caught:
        await check.__aexit__(None)
    await system.aclose()
    text = str(caught.value)
    assert "  actor orphan: 0/256 queued, running, in system lost" in text
    assert "  actor system lost, open on" in text


async def test_a_task_is_named():
    """The tasks of the loop count in an ``async with`` block."""

    async def straggler() -> None:
        await anyio.sleep_forever()

    async with anyio.create_task_group() as tasks:
        with pytest.raises(Leaked, match="straggler"):
            async with LeakCheck(patience=0.05):
                tasks.start_soon(straggler)
        tasks.cancel_scope.cancel()


def test_a_thread_a_process_and_a_descriptor_are_named():
    """The plain ``with`` block is for code that has no loop."""
    gone = threading.Event()
    thread = threading.Thread(target=gone.wait, name="straggler")
    check = LeakCheck(patience=0.05).__enter__()
    thread.start()
    descriptor = os.open(os.devnull, os.O_RDONLY)
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    with pytest.raises(Leaked) as caught:
        check.__exit__(None)
    gone.set()
    thread.join()
    os.close(descriptor)
    child.communicate(b"\n")
    text = str(caught.value)
    assert "  thread straggler" in text
    assert f"  process {child.pid}: {sys.executable} -c input()" in text
    assert f"  fd {descriptor} to /dev/null" in text


def test_shared_memory_of_ours_is_named():
    """A name that begins with ``aexec`` in /dev/shm."""
    path = Path("/dev/shm/aexec-of-a-test")
    with pytest.raises(Leaked, match="shared memory aexec-of-a-test"), LeakCheck(patience=0.0):
        path.touch()
    path.unlink()


def test_what_is_ignored_is_not_reported():
    """``ignore`` has pieces of the lines."""
    descriptor = -1
    with LeakCheck(patience=0.0, ignore=["/dev/null"]):
        descriptor = os.open(os.devnull, os.O_RDONLY)
    os.close(descriptor)


def test_a_block_that_fails_is_not_looked_at():
    """Its own error is what matters."""
    check = LeakCheck(patience=0.0).__enter__()
    descriptor = os.open(os.devnull, os.O_RDONLY)
    check.__exit__(ValueError)
    os.close(descriptor)


def test_what_is_gone_in_a_moment_costs_no_collection(monkeypatch):
    """Beside torch and its like each takes a third of a second: only what stays has to be kept alive by a cycle."""
    collections = []
    monkeypatch.setattr(gc, "collect", lambda: collections.append(None))
    check, left = LeakCheck(), {"thread": "thread straggler"}
    looks = iter([left, {}])
    assert list(check._looks(lambda: next(looks))) == [0.01]
    assert collections == []
    looks = iter([left] * 6 + [{}])
    assert list(check._looks(lambda: next(looks))) == [0.01, 0.02, 0.04, 0.08, 0.1, 0.1]
    assert len(collections) == 5
