"""A leader and followers of it, for tests of lines between nodes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

from aexec.transport import Kind
from aexec.transport.curve import CurveListener, NodeKey, dial_leader

PATIENCE = 30.0  # seconds in which anything at all has to happen, a process's coming alive in a crowd of them too


class Side:
    """A line, with what came through it."""

    def __init__(self, link):
        self.link, self.frames = link, asyncio.Queue()
        self.gone = asyncio.get_running_loop().create_future()
        link.open(self.frames.put_nowait, self.gone.set_result)

    async def next(self):
        async with asyncio.timeout(PATIENCE):  # wait_for() of Python 3.11 loses a cancellation now and then
            return await self.frames.get()

    async def ask(self, value, call=1):
        self.link.send(Kind.MESSAGE, call, value)
        return (await self.next()).value

    async def end(self):
        return await asyncio.wait_for(asyncio.shield(self.gone), PATIENCE)


class Leader:
    """Accepts whoever has the key, and is told to."""

    def __init__(self, host="127.0.0.1", port=0, *, accept=True, answer=b"welcome", **options):
        self.key = NodeKey.random()
        self.hellos, self.sides = [], asyncio.Queue()
        self.accept, self.answer = accept, answer
        self.listener = CurveListener(host, port, self.key, self.hello, self.line, **options)

    def hello(self, address, hello):
        self.hellos.append((address, hello))
        return self.accept, self.answer

    def line(self, link, _):
        self.sides.put_nowait(Side(link))

    async def follower(self, **options):
        """Both ends of a new line."""
        options = {"timeout": PATIENCE, **options}
        self.answered, link = await dial_leader(*self.listener.address, self.key, b"hello", **options)
        return await asyncio.wait_for(self.sides.get(), PATIENCE), Side(link)

    async def process(self, started, node_timeout=3.0):
        """A follower in a process of its own, and this end of the line to it; it is in ``started`` from the first."""
        script = Path(__file__).with_name("curve_peers.py")
        command = [sys.executable, str(script), "follow", *map(str, self.listener.address), self.key.secret.hex()]
        child = subprocess.Popen([*command, str(node_timeout)])  # noqa: ASYNC220 - it is quick
        started.append(child)
        return await asyncio.wait_for(self.sides.get(), PATIENCE), child


@contextlib.asynccontextmanager
async def leader(host="127.0.0.1", **options):
    """A leader that listens; all that it has started ends with it."""
    made = Leader(host, **options)
    made.listener.open()
    started, process = [], made.process
    followed, follower = [], made.follower

    async def starting(**settings):
        return await process(started, **settings)

    async def following(**settings):
        sides = await follower(**settings)
        followed.append(sides[1].link)
        return sides

    made.process, made.follower = starting, following
    try:
        yield made
    finally:
        for child in started:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child.pid, signal.SIGKILL)
            await asyncio.to_thread(child.wait)
        for link in followed:
            link.close()
        await made.listener.aclose()
        for link in followed:
            await link.closed()
