from __future__ import annotations

import anyio
import pytest

from aexec.executor import events
from aexec.executor.events import EventHub
from aexec.messages.lifecycle import WorkerStarted

pytestmark = pytest.mark.anyio


def started(rank):
    return WorkerStarted(rank=rank, pid=1, generation=1)


async def test_every_listener_hears_what_happens_from_now_on():
    """Not what was before."""
    hub = EventHub()
    early = hub.listen()
    hub.emit(started(0))
    late = hub.listen()
    hub.emit(started(1))
    hub.close()
    assert [event.rank async for event in early] == [0, 1]
    assert [event.rank async for event in late] == [1]


async def test_a_listener_waits_for_news():
    """An event that comes later wakes it."""
    hub = EventHub()
    stream = hub.listen()
    heard = []

    async def listen():
        heard.append((await anext(stream)).rank)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(listen)
        await anyio.wait_all_tasks_blocked()
        assert heard == []
        hub.emit(started(1))
    assert heard == [1]


async def test_a_slow_listener_loses_the_oldest_events(monkeypatch):
    """It is bounded, holds nobody up, and can tell."""
    monkeypatch.setattr(events, "MAX_EVENTS", 2)
    hub = EventHub()
    stream = hub.listen()
    for rank in range(5):
        hub.emit(started(rank))
    assert repr(stream) == "<EventStream: 2/2 waiting, 3 lost>"
    assert [(await anext(stream)).rank for _ in range(2)] == [3, 4]


async def test_a_listener_that_comes_after_the_end_hears_nothing():
    """And does not wait for ever."""
    hub = EventHub()
    hub.close()
    assert [event async for event in hub.listen()] == []


async def test_a_listener_that_is_dropped_is_forgotten():
    """Leaving the loop over events is enough."""
    hub = EventHub()
    stream = hub.listen()
    assert repr(hub) == "<EventHub: 1 listeners>"
    await stream.aclose()
    hub.emit(started(0))
    assert [event async for event in stream] == []
    del stream
    assert repr(hub) == "<EventHub: 0 listeners>"
