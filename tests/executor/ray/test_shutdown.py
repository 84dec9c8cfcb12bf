"""How Ray-placed workers are brought to their end, without Ray."""

from __future__ import annotations

import asyncio

import pytest

from aexec.executor.ray.rank import RayRank
from aexec.executor.ray.rerank import NodeFacts
from aexec.executor.ray.shutdown import bring_down
from aexec.executor.ray.worker_actor import ActorFacts

pytestmark = pytest.mark.anyio


async def test_one_that_was_not_told_yet_to_be_a_worker_is_not_waited_for():
    """A start that is given up before: nothing would tell of its end, and the close would take all its time."""
    place = NodeFacts(node_id="a", node_ip="10.0.0.1", pid=1)
    facts = ActorFacts(place=place, host="one", log="", log_start=0, python="3.11.7", aexec="0", ray=None)
    worker = RayRank(0, None, facts, is_here=False, on_death=print, on_refusal=print)
    assert await asyncio.wait_for(bring_down([worker], 60.0, 60.0, print), 5.0) == []
    worker.close()
