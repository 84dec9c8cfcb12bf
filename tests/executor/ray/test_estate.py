from __future__ import annotations

import pytest

from aexec.config import ExecutorConfig
from aexec.executor.ray import estate as module
from aexec.executor.ray.estate import Estate

pytestmark = pytest.mark.anyio


class Thing:
    """A cluster, or a placement group."""

    def __init__(self, log, name):
        self.log, self.name, self.whole = log, name, True

    async def is_whole(self):
        return self.whole

    async def release(self):
        self.log.append(f"release {self.name}")

    async def leave(self):
        self.log.append(f"leave {self.name}")


@pytest.fixture
def log(monkeypatch):
    log = []

    async def join(config):
        log.append("join")
        return Thing(log, "cluster")

    async def acquire(config, cluster, report):
        log.append("acquire")
        return Thing(log, f"group {log.count('acquire')}")

    monkeypatch.setattr(module, "join", join)
    monkeypatch.setattr(module, "acquire", acquire)
    return log


async def settle(estate):
    return await estate.settle(ExecutorConfig(), lambda *_: None)


async def test_a_generation_takes_over_what_is_whole(log):
    """Both are made once, however many generations settle there."""
    estate = Estate()
    first = await settle(estate)
    assert await settle(estate) == first
    assert log == ["join", "acquire"]


async def test_bundles_that_are_lost_are_made_anew(log):
    """A node has gone: the old group is given back before the new one is asked for."""
    estate = Estate()
    _, placement = await settle(estate)
    placement.whole = False
    await settle(estate)
    assert log == ["join", "acquire", "release group 1", "acquire"]


async def test_all_is_given_back_once(log):
    """The placement group first, for the cluster may end with us."""
    estate = Estate()
    await settle(estate)
    await estate.give_back()
    await estate.give_back()
    assert log == ["join", "acquire", "release group 1", "leave cluster"]
    await Estate().give_back()
