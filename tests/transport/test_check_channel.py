from __future__ import annotations

import pytest

from aexec.testing import CHANNEL_CHECKS
from aexec.transport import memory_pair, seqpacket_pair, stream_pair
from aexec.transport.curve import curve_pair
from aexec.transport.tcp import tcp_pair

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("make", [memory_pair, seqpacket_pair, stream_pair, tcp_pair, curve_pair])
@pytest.mark.parametrize("check", CHANNEL_CHECKS, ids=lambda check: check.__name__)
async def test_every_line_keeps_every_promise(check, make):
    """Memory, datagrams, streams within a node and between nodes, and ZMQ are the same to whoever uses them, on both loops."""
    await check(make)
