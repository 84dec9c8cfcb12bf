"""Two ends of a line between nodes, both here: for tests, and to measure."""

from __future__ import annotations

import asyncio

from aexec.transport.curve.dialer import dial_leader
from aexec.transport.curve.end import CurveEnd
from aexec.transport.curve.key import NodeKey
from aexec.transport.curve.link import NodeLink
from aexec.transport.curve.listener import CurveListener

__all__ = ("curve_pair",)

_PATIENCE = 10.0  # seconds for a line within this node


async def curve_pair(host: str = "127.0.0.1") -> tuple[CurveEnd, CurveEnd]:
    """The leader's end and the follower's; with both closed, nothing is left.

    Args:
        host: An address of this machine.
    """
    key = NodeKey.random()
    there: asyncio.Future[NodeLink] = asyncio.get_running_loop().create_future()
    listener = CurveListener(host, 0, key, _anybody, lambda link, _: there.set_result(link))
    listener.open()
    try:
        _, link = await dial_leader(*listener.address, key, b"", timeout=_PATIENCE)
        end = (await there).end
    except BaseException:
        listener.close(0.0)
        raise
    end.when_closed(listener.close)
    return end, link.end


def _anybody(address: str, hello: bytes) -> tuple[bool, bytes]:
    _ = address, hello
    return True, b""
