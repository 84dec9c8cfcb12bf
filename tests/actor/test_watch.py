from __future__ import annotations

import anyio
import anyio.lowlevel
import pytest

from aexec.actor import Actor, Backoff, Supervision, Terminated, handles
from aexec.actor.absent import find_cell
from aexec.errors import UnhandledMessage
from aexec.messages.base import Message

pytestmark = pytest.mark.anyio


class Break(Message[None], frozen=True):
    pass


class Count(Message[int], frozen=True):
    pass


class Mortal(Actor):
    @handles(Break)
    def fail(self, message: Break) -> None:
        raise ValueError("broken")


class Watcher(Actor):
    """Writes down who has ended."""

    def __init__(self, ended: list[tuple[str, str]]) -> None:
        self.ended = ended

    @handles(Terminated)
    def note(self, message: Terminated) -> None:
        self.ended.append((message.ref.name, message.exit.kind))

    @handles(Break)
    def fail(self, message: Break) -> None:
        raise ValueError("broken")

    @handles(Count)
    def count(self, message: Count) -> int:
        return len(self.ended)


@pytest.fixture
async def watching(system):
    """A watcher and what it wrote down."""
    made: list[Watcher] = []
    ended: list[tuple[str, str]] = []
    ref = await system.using(name="watcher").spawn(lambda: made.append(Watcher(ended)) or made[-1])
    return ref, made[0], ended


async def until(condition) -> None:
    with anyio.fail_after(5):
        while not condition():
            await anyio.lowlevel.checkpoint()


async def test_a_watcher_is_told_of_the_end_once(system, watching):
    """However often it watches, one Terminated comes, with the ref and the reason."""
    _, watcher, ended = watching
    first, second = [await system.using(name=name).spawn(Mortal) for name in ("a", "b")]
    for ref in (first, first, second):
        watcher.context.watch(ref)
    await first.stop()
    await until(lambda: ended)
    assert ended == [("a", "stopped")]
    assert second.is_alive


async def test_watching_the_dead_delivers_at_once(system, watching):
    """A ref to an actor that has ended long ago is no trap."""
    ref, watcher, ended = watching
    mortal = await system.using(name="a").spawn(Mortal)
    await mortal.stop()
    watcher.context.watch(mortal)
    assert await ref.ask(Count()) == 1
    assert ended == [("a", "stopped")]


async def test_who_does_not_watch_any_longer_is_not_told(system, watching):
    """unwatch() takes it back, also when nobody was watched."""
    ref, watcher, _ = watching
    mortal = await system.spawn(Mortal)
    watcher.context.watch(mortal)
    watcher.context.unwatch(mortal)
    watcher.context.unwatch(mortal)
    await mortal.stop()
    assert await ref.ask(Count()) == 0


async def test_watching_without_a_handler_is_an_error_at_once(system):
    """An actor that could not be told is not let believe that it will be."""

    class Deaf(Actor):
        async def on_start(self) -> None:
            self.context.watch(other)

    other = await system.spawn(Mortal)
    with pytest.raises(UnhandledMessage, match=r"has no handler for Terminated, which watch\(\) sends"):
        await system.spawn(Deaf)


async def test_nobody_watches_itself(watching):
    """An actor is over before it could be told."""
    ref, watcher, _ = watching
    with pytest.raises(ValueError, match="watcher watches itself"):
        watcher.context.watch(ref)


async def test_a_restart_is_no_end(system, watching):
    """A watcher hears of the last incarnation only."""
    ref, watcher, ended = watching
    supervised = system.using(name="a", supervision=Supervision(max_restarts=1, backoff=Backoff(0.0, 0.0, 0.0)))
    mortal = await supervised.spawn(Mortal)
    watcher.context.watch(mortal)
    await mortal.tell(Break())
    await until(lambda: mortal.statistics().generation == 2)
    assert await ref.ask(Count()) == 0
    await mortal.tell(Break())
    await until(lambda: ended)
    assert ended == [("a", "failed")]


async def test_a_full_mailbox_loses_no_end(system):
    """A Terminated that finds no room comes as soon as there is some."""
    ended: list[tuple[str, str]] = []
    made: list[Watcher] = []
    ref = await system.using(mailbox=1).spawn(lambda: made.append(Watcher(ended)) or made[-1])
    mortals = [await system.spawn(Mortal) for _ in range(20)]
    for mortal in mortals:
        made[0].context.watch(mortal)
    async with anyio.create_task_group() as tasks:
        for mortal in mortals:
            tasks.start_soon(mortal.stop)
    await until(lambda: len(ended) == 20)
    assert ref.is_alive


async def test_an_end_of_the_watcher_ends_its_watching(system, watching):
    """The watched actor holds on to no watcher that has ended or was restarted."""
    ref, watcher, _ = watching
    mortal = await system.spawn(Mortal)
    watcher.context.watch(mortal)
    cell = find_cell(mortal.address)
    assert len(cell._observers) == 1
    await ref.stop()
    assert not cell._observers


async def test_any_number_may_wait_for_the_end(system):
    """closed() returns the reason to all who wait, and does not bring the end about."""
    mortal = await system.spawn(Mortal)
    ends: list[str] = []

    async def wait() -> None:
        ends.append((await mortal.closed()).reason)

    async with anyio.create_task_group() as tasks:
        for _ in range(10):
            tasks.start_soon(wait)
        with anyio.move_on_after(0.01):
            await mortal.closed()
        assert mortal.is_alive
        await mortal.stop()
    assert ends == ["it was told to stop"] * 10
    assert (await mortal.closed()).kind == "stopped"
