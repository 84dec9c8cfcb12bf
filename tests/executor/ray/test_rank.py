"""What is said of a Ray-placed worker that has ended, without Ray."""

from __future__ import annotations

import asyncio
import signal
import socket
import subprocess
import sys

import pytest

from aexec.executor.ray import rank as module
from aexec.executor.ray.health import Ending, exit_status, open_pidfd
from aexec.executor.ray.rank import RayRank
from aexec.executor.ray.rerank import NodeFacts
from aexec.executor.ray.worker_actor import ActorFacts

pytestmark = pytest.mark.anyio


async def test_how_it_ended_is_asked_again_once_it_was_reaped(monkeypatch):
    """The kernel tells how only after that; whose child it was may take a moment."""
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)  # noqa: ASYNC220
    watch = open_pidfd(child.pid)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    told = asyncio.get_running_loop().create_future()
    facts = ActorFacts(
        place=NodeFacts(node_id="a", node_ip="127.0.0.1", pid=child.pid), host="one", log="", log_start=0,
        python="3.11.7", aexec="0", ray=None,
    )  # fmt: skip
    worker = RayRank(0, None, facts, is_here=True, on_death=told.set_result, on_refusal=print)
    monkeypatch.setattr(module, "peer_pidfd", lambda _: open_pidfd(child.pid))
    with ours, theirs:
        worker.meet(ours)
        child.send_signal(signal.SIGKILL)
        await asyncio.wait_for(worker.gone.wait(), 5.0)
        assert exit_status(watch) == Ending()  # a zombie
        child.communicate()
        error = await asyncio.wait_for(told, 5.0)
        assert Ending(error.exit_code, error.signal) == exit_status(watch)  # nothing, where the kernel never tells
        worker.close()
    module.os.close(watch)
