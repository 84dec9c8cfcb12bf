"""What has to be heard while a large frame is under way between nodes."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent))
from curve_nodes import leader

from aexec.errors import ChannelClosed
from aexec.transport import Kind

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("downwards", [True, False])
async def test_what_is_urgent_passes_large_frames_and_those_that_wait(downwards):
    """In either direction; what it passes arrives whole, and in its order."""
    async with leader() as node:
        here, there = await node.follower()
        sender, receiver = (here, there) if downwards else (there, here)
        large = np.arange(6 << 20, dtype=np.int32)
        for call in (1, 2):
            sender.link.send(Kind.MESSAGE, call, large + call)
        sender.link.send(Kind.MESSAGE, 3, "small")
        for call in range(100, 120):
            sender.link.send(Kind.MESSAGE, call, "how are you", urgent=True)
        frames = [await receiver.next() for _ in range(23)]
        assert [frame.call for frame in frames if frame.call >= 100] == list(range(100, 120))
        assert [frame.call for frame in frames if frame.call < 100] == [1, 2, 3]
        assert [frame.call for frame in frames][-1] == 3
        assert all(np.array_equal(frame.value, large + frame.call) for frame in frames if frame.call in (1, 2))
        sender.link.send(Kind.MESSAGE, 4, "goes on")
        assert (await receiver.next()).call == 4


async def test_what_is_large_is_never_urgent():
    """It takes its turn, and arrives."""
    async with leader() as node:
        here, there = await node.follower()
        here.link.send(Kind.MESSAGE, 1, np.zeros(1 << 20), urgent=True)
        here.link.send(Kind.MESSAGE, 2, "urgent", urgent=True)
        assert sorted([(await there.next()).call for _ in range(2)]) == [1, 2]


async def test_nothing_urgent_goes_down_a_closed_line():
    """As for anything else."""
    async with leader() as node:
        here, _ = await node.follower()
        here.link.close()
        with pytest.raises(ChannelClosed):
            here.link.send(Kind.MESSAGE, 1, "urgent", urgent=True)
