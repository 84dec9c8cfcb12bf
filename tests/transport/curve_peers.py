"""A node in a process of its own: it echoes what it is sent, or does what it is told."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time

from aexec.transport import Kind
from aexec.transport.curve import CurveListener, NodeKey, dial_leader


def answer(link, frame):
    """Do what is asked, and echo it; True: that was all."""
    match frame.value:
        case "block", seconds:
            time.sleep(seconds)
        case "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "exit":
            os._exit(3)
        case "close":
            link.close()
            return
    link.send(Kind.REPLY, frame.call, frame.value)


async def follow(host: str, port: str, secret: str, node_timeout: str) -> None:
    """Serve until the leader goes."""
    over = asyncio.get_running_loop().create_future()
    key, hello = NodeKey(bytes.fromhex(secret)), str(os.getpid()).encode()
    _, link = await dial_leader(host, int(port), key, hello, timeout=30, node_timeout=float(node_timeout))
    link.open(lambda frame: answer(link, frame), over.set_result)
    await over
    await link.closed()


async def lead(secret: str, node_timeout: str) -> None:
    """Serve followers; prints the port first."""

    def line(link, _):
        link.open(lambda frame: answer(link, frame), print)

    key = NodeKey(bytes.fromhex(secret))
    listener = CurveListener("127.0.0.1", 0, key, lambda *_: (True, b""), line, node_timeout=float(node_timeout))
    listener.open()
    print(listener.address[1], flush=True)  # noqa: T201 - to the test
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run({"follow": follow, "lead": lead}[sys.argv[1]](*sys.argv[2:]))
