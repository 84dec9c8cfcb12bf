from __future__ import annotations

import anyio
import pytest

from aexec.observe.hub import MAX_EVENTS, EventHub

pytestmark = pytest.mark.anyio


async def test_a_slow_listener_loses_the_oldest_and_can_tell() -> None:
    """A stream is bounded."""
    hub = EventHub[int]()
    stream = hub.listen()
    for number in range(MAX_EVENTS + 2):
        hub.emit(number)
    hub.close()
    assert stream.lost == 2
    assert await anext(stream) == 2


async def test_a_listener_waits_for_news() -> None:
    """An event that comes later is given to who waits; closing ends the wait."""
    hub = EventHub[str]()
    stream = hub.listen()
    seen: list[str] = []

    async def listen() -> None:
        seen.extend([event async for event in stream])

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(listen)
        await anyio.wait_all_tasks_blocked()
        hub.emit("one")
        await anyio.wait_all_tasks_blocked()
        hub.emit("two")
        await anyio.wait_all_tasks_blocked()
        hub.close()
    assert seen == ["one", "two"]


async def test_who_does_not_listen_is_told_nothing() -> None:
    """A closed stream takes no more events, and one that was dropped is forgotten."""
    hub = EventHub[int]()
    stream = hub.listen()
    await stream.aclose()
    hub.emit(1)
    assert [event async for event in stream] == []
    assert repr(stream) == f"<EventStream: 0/{MAX_EVENTS} waiting, 0 lost>"
    del stream
    assert repr(hub) == "<EventHub: 0 listeners>"


async def test_every_listener_hears_what_happens_from_now_on() -> None:
    """Not what was before."""
    hub = EventHub[int]()
    early = hub.listen()
    hub.emit(0)
    late = hub.listen()
    hub.emit(1)
    hub.close()
    assert [event async for event in early] == [0, 1]
    assert [event async for event in late] == [1]


async def test_a_listener_that_comes_after_the_end_hears_nothing() -> None:
    """And does not wait for ever."""
    hub = EventHub[int]()
    hub.close()
    assert [event async for event in hub.listen()] == []
