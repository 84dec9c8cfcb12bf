"""Who attaches the ranks, when they cannot be attached, and what is flushed at the end."""

from __future__ import annotations

from contextlib import asynccontextmanager
from types import SimpleNamespace

import anyio
import pytest

from aexec.actor import ActorSystem
from aexec.config import Offload
from aexec.engine.connector import host
from aexec.engine.connector.calls import FlushConnector
from aexec.engine.connector.host import ConnectorHost
from aexec.engine.connector.offload import OffloadConnector
from aexec.errors import ExecutorUnavailable
from aexec.executor.lifecycle import ExecutorState
from aexec.messages.kv import KVHoldings
from aexec.messages.step import StepId

pytestmark = pytest.mark.anyio

KEY = bytes(40)


class Ranks:
    """Two of them, of which ``errors`` come before an answer; each attachment is seen."""

    def __init__(self):
        self.errors: list[Exception] = []
        self.state = ExecutorState.READY
        self.asked: list[bool] = []
        self.attached: list[tuple[int, list[bytes]]] = []
        self.steps = []
        self.changed = anyio.Event()
        self.before_answer = lambda: None

    async def collective_rpc(self, method, args=(), kwargs=None, *, timeout):
        if method == "kv_identity":
            self.asked.append(kwargs["afresh"])
            if self.errors:
                raise self.errors.pop()
            return [b"one", b"two"]
        self.attached.append(args)
        self.before_answer()
        self.changed.set()
        return [KVHoldings(keys=[KEY], capacity=9), KVHoldings(keys=[KEY], capacity=7)]

    async def execute_model(self, message):
        self.steps.append(message)

    async def next(self):
        await self.changed.wait()
        self.changed = anyio.Event()


class Host(ConnectorHost):
    def __init__(self, executor, scheduler):
        super().__init__(executor, scheduler)
        self._step = StepId(4)


@asynccontextmanager
async def hosted(connector, ranks, cached=()):
    scheduler = SimpleNamespace(connector=connector, cached_blocks=lambda: list(cached))
    async with ActorSystem(name="test") as system:
        yield await system.spawn(Host, ranks, scheduler)


@pytest.fixture
def connector(tmp_path):
    return OffloadConnector(Offload(directory=tmp_path), b"sess")


async def settled(connector, epoch):
    with anyio.fail_after(10):
        while not connector.statistics().is_attached:
            await anyio.lowlevel.checkpoint()
    assert connector.epoch == epoch


async def test_the_ranks_are_attached_before_anything_else(connector):
    """Each is told who all of them are; the least of them is the measure."""
    ranks = Ranks()
    async with hosted(connector, ranks):
        assert ranks.attached == [(0, [b"one", b"two"])]
        assert connector.statistics()[:3] == (True, 1, 7)


async def test_it_fails_to_start_where_the_ranks_fail(connector):
    """Whoever opens an engine hears of it."""
    ranks = Ranks()
    ranks.errors = [ExecutorUnavailable("rank 1 is gone", None)]
    with pytest.raises(ExecutorUnavailable, match="rank 1 is gone"):
        async with hosted(connector, ranks):
            pass


async def test_whoever_detaches_it_has_the_ranks_attached_once(connector):
    """However often that was at a time; and they look at their weights again if anybody wants it."""
    ranks = Ranks()
    async with hosted(connector, ranks):
        await ranks.next()
        connector.detach()
        connector.detach(afresh=True)
        connector.detach()
        await settled(connector, 3)
        assert ([epoch for epoch, _ in ranks.attached], ranks.asked) == ([0, 3], [False, True])
        connector.detach()
        await settled(connector, 4)
        assert ranks.asked == [False, True, False]


async def test_an_attachment_that_is_overtaken_is_made_again(connector):
    """What was told of an older epoch is not believed."""
    ranks = Ranks()
    async with hosted(connector, ranks):
        again = [connector.detach]
        ranks.before_answer = lambda: again and again.pop()()
        connector.detach()
        await settled(connector, 2)
        assert [epoch for epoch, _ in ranks.attached] == [0, 1, 2]


async def test_ranks_that_are_away_are_asked_again(connector, monkeypatch):
    """After a while that grows, until they answer."""
    monkeypatch.setattr(host, "_RETRY_SECONDS", 0.001)
    ranks = Ranks()
    async with hosted(connector, ranks):
        ranks.errors = [ExecutorUnavailable("its workers are starting", None)] * 3
        connector.detach()
        await settled(connector, 1)
        assert len(ranks.asked) == 5


async def test_ranks_that_are_gone_for_good_are_asked_once_more(connector, monkeypatch):
    """And then never again."""
    monkeypatch.setattr(host, "_RETRY_SECONDS", 0.0)
    ranks = Ranks()
    async with hosted(connector, ranks) as ref:
        ranks.state, ranks.errors = ExecutorState.FAILED, [ExecutorUnavailable("rank 1 is gone", None)] * 9
        connector.detach()
        for _ in range(9):
            await ref.ask(FlushConnector())
            await anyio.wait_all_tasks_blocked()
        assert (len(ranks.errors), len(ranks.asked)) == (8, 2)
        assert ref.is_alive


async def test_a_flush_is_steps_without_tokens(connector):
    """Of what the cache holds and the ranks do not yet; their ids go on from the driver's."""
    ranks = Ranks()
    cached = [(block, bytes([block]) * 32) for block in (1, 2, 3)]
    async with hosted(connector, ranks, cached) as ref:
        assert await ref.ask(FlushConnector()) == 3
        (step,) = ranks.steps
        assert (step.step, step.num_tokens, step.payload.kv_transfer.store_block_ids) == (5, 0, [1, 2, 3])
        assert await ref.ask(FlushConnector()) == 0


async def test_without_a_connector_there_is_nothing_to_do():
    """Nobody is asked anything."""
    ranks = Ranks()
    async with hosted(None, ranks) as ref:
        assert await ref.ask(FlushConnector()) == 0
        assert (ranks.asked, ranks.steps) == ([], [])
