from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
import threading

import anyio
import anyio.to_thread
import pytest
import structlog

from aexec.actor import Actor, ActorSystem, DeadLetterCounts, Exit, handles
from aexec.errors import ActorStopped, CallCycle, ConfigError, WrongLoop
from aexec.messages.base import Message

pytestmark = pytest.mark.anyio


class Ping(Message[str], frozen=True):
    pass


class Hold(Message[str], frozen=True):
    pass


class Pinged(Actor):
    def __init__(self, events: list[str] | None = None) -> None:
        self.events = [] if events is None else events

    @handles(Ping)
    def ping(self, message: Ping) -> str:
        return "pong"

    @handles(Hold)
    async def hold(self, message: Hold) -> str:
        await anyio.sleep_forever()
        return ""

    async def on_stop(self, reason: Exit) -> None:
        await anyio.sleep(0.001)
        self.events.append(reason.kind)


async def test_a_system_is_opened_and_closed_by_different_tasks():
    """open() in one task, use in a second, aclose() in a third, as with fixtures and notebook cells."""
    system = ActorSystem()
    replies: list[str] = []

    async def use() -> None:
        ref = await system.spawn(Pinged)
        replies.append(await ref.ask(Ping()))

    for step in (system.open, use, system.aclose):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(step)
    assert replies == ["pong"]
    assert "0 actors, closed" in repr(system)


async def test_actors_outlive_the_task_that_spawned_them(system):
    """An actor belongs to its system, not to the task or the scope in which it was spawned."""
    with anyio.CancelScope() as scope:
        ref = await system.spawn(Pinged)
        scope.cancel()
    assert await ref.ask(Ping()) == "pong"


async def test_several_systems_live_side_by_side():
    """Actors of two systems have the same name, ask each other, and share nothing."""
    async with ActorSystem(name="one") as one, ActorSystem(name="two") as two:
        first, second = await one.spawn(Pinged), await two.spawn(Pinged)
        assert first.name == second.name
        assert first.address != second.address

        class Forward(Actor):
            @handles(Ping)
            async def ping(self, message: Ping) -> str:
                return await second.ask(message)

        forward = await one.using(name="forward").spawn(Forward)
        assert await forward.ask(Ping()) == "pong"
        assert (one.statistics().sent, two.statistics().sent) == (1, 1)


async def test_closing_ends_all_actors(system):
    """aclose() returns when every on_stop has run; it may be called twice, and at once."""
    events: list[str] = []
    for _ in range(3):
        await system.spawn(Pinged, events)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(system.aclose)
        tasks.start_soon(system.aclose)
    assert events == ["stopped"] * 3
    await system.aclose()
    assert system.statistics().state == "closed"


async def test_no_handler_closes_its_own_system(system):
    """A handler that waits for the end of its own system is told so at once."""

    class Closing(Actor):
        @handles(Ping)
        async def ping(self, message: Ping) -> str:
            await self.context.system.aclose()
            return "never"

    ref = await system.spawn(Closing)
    with pytest.raises(CallCycle):
        await ref.ask(Ping())
    assert system.statistics().state == "open"


async def test_asks_end_when_their_system_is_closed():
    """An ask that waits is answered by the end of its actor, within the time to stop."""
    async with ActorSystem(stop_timeout=0.05) as system:
        ref = await system.spawn(Pinged)
        other = await system.spawn(Pinged)
        async with anyio.create_task_group() as tasks:

            async def ask() -> None:
                with pytest.raises(Exception, match="its time to stop was up"):
                    await ref.ask(Hold())

            tasks.start_soon(ask)
            await anyio.wait_all_tasks_blocked()
            await system.aclose()
        with pytest.raises(ActorStopped, match="system actors was closed"):
            await other.ask(Ping())


async def test_leaving_with_an_error_does_not_wait_for_handlers():
    """When the body of `async with` raises, running handlers are cancelled at once; on_stop still runs."""
    events: list[str] = []

    async def body() -> None:
        async with ActorSystem(stop_timeout=60.0) as system:
            ref = await system.spawn(Pinged, events)
            ref.tell_nowait(Hold())
            await anyio.wait_all_tasks_blocked()
            raise ValueError("body")

    with anyio.fail_after(5), pytest.raises(ValueError, match="body"):
        await body()
    assert events == ["killed"]


async def test_a_cancelled_owner_still_closes():
    """A system whose `async with` is cancelled ends its actors properly, on_stop's awaits included."""
    events: list[str] = []
    with anyio.CancelScope() as scope:
        async with ActorSystem() as system:
            await system.spawn(Pinged, events)
            scope.cancel()
            await anyio.sleep_forever()
    assert events == ["stopped"]
    assert system.statistics().state == "closed"


async def test_a_system_is_opened_once(system):
    """A second open() is refused, also after the end; closing what was never opened is fine."""
    with pytest.raises(ConfigError, match="actor system test is open: open a new one"):
        await system.open()
    unopened = ActorSystem()
    await unopened.aclose()
    with pytest.raises(ConfigError, match="is closed"):
        await unopened.open()


@pytest.mark.parametrize(
    "settings", [{"mailbox": 0}, {"timeout": 0.0}, {"timeout": float("nan")}, {"stop_timeout": -1.0}]
)
def test_senseless_settings_are_refused(settings):
    """A setting that is not positive is refused by name and value."""
    (name,) = settings
    with pytest.raises(ConfigError, match=f"{name} "):
        ActorSystem(**settings)


async def test_another_loop_is_refused_by_name(system):
    """Every verb of a ref raises WrongLoop on another loop, and the text names both loops."""
    ref = await system.spawn(Pinged)
    texts: list[str] = []

    async def misuse() -> None:
        for verb in (ref.ask, ref.tell):
            with pytest.raises(WrongLoop) as caught:
                await verb(Ping())
        for verb in (ref.stop, system.aclose, lambda: system.spawn(Pinged)):
            with pytest.raises(WrongLoop):
                await verb()
        with pytest.raises(WrongLoop):
            ref.tell_nowait(Ping())
        texts.append(str(caught.value))
        texts.append(f"{id(asyncio.get_running_loop()):#x}")

    await anyio.to_thread.run_sync(asyncio.run, misuse())
    text, other = texts
    assert f"actor system test belongs to {system._core.runtime}" in text
    assert f"was used from asyncio _UnixSelectorEventLoop {other}" in text


async def test_a_thread_without_a_loop_is_refused_by_name(system):
    """The text says that the thread runs no loop."""
    ref = await system.spawn(Pinged)

    def misuse() -> None:
        with pytest.raises(WrongLoop, match="used from thread 'lonely', which runs no loop"):
            ref.tell_nowait(Ping())

    thread = threading.Thread(target=misuse, name="lonely")
    thread.start()
    await anyio.to_thread.run_sync(thread.join)


def test_a_system_needs_a_loop():
    """Without a running loop open() says so."""
    coroutine = ActorSystem().open()
    with pytest.raises(RuntimeError, match="no event loop runs here"):
        coroutine.send(None)


async def test_a_thread_reaches_the_loop(system):
    """call_soon_threadsafe runs a function on the loop; what it raises is logged and ends nothing."""
    called = anyio.Event()
    loop_thread = threading.get_ident()
    threads: list[int] = []

    def on_loop(text: str) -> None:
        threads.append(threading.get_ident())
        called.set()
        raise ValueError(text)

    with structlog.testing.capture_logs() as logs:
        await anyio.to_thread.run_sync(system.call_soon_threadsafe, on_loop, "no harm")
        await called.wait()
        await anyio.wait_all_tasks_blocked()
    assert threads == [loop_thread]
    assert [line["event"] for line in logs] == ["call_soon_threadsafe failed"]
    with pytest.raises(ConfigError, match="is not open"):
        ActorSystem().call_soon_threadsafe(print)


async def test_statistics_of_a_system(system):
    """A new system has zeroes; an open one counts its actors, messages and dead letters."""
    assert ActorSystem(name="new").statistics() == ("new", "new", 0, 0, 0, 0, 0, DeadLetterCounts())
    ref = await system.spawn(Pinged)
    await ref.ask(Ping())
    await ref.stop()
    await ref.tell(Ping())
    now = system.statistics()
    assert (now.state, now.actors, now.spawned, now.sent, now.deadlines) == ("open", 0, 1, 2, 0)
    assert now.dead_letters.closed == 1
    assert repr(system._core.dead_letters) == "<DeadLetters test: 1 closed>"


async def test_a_system_prints_its_state(system):
    """Its repr has name, number of actors, state and loop."""
    await system.spawn(Pinged)
    assert repr(system) == f"<ActorSystem test: 1 actors, open, {system._core.runtime}>"
    assert repr(ActorSystem(name="x")) == "<ActorSystem x: new>"


# ---------------------------------------------------------------- programs


def run(program: str, *options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *options, "-c", program], capture_output=True, text=True, timeout=30, check=False
    )


PROGRAM = """
import asyncio, signal, threading
from aexec.actor import Actor, ActorSystem, Message, handles

class Ping(Message[str], frozen=True):
    pass

class Pinged(Actor):
    @handles(Ping)
    async def ping(self, message: Ping) -> str:
        return "pong"

    async def on_stop(self, reason) -> None:
        print("stopped:", reason.kind)

async def use(system):
    ref = await system.spawn(Pinged)
    print(await ref.ask(Ping()))
"""


def test_a_program_that_forgets_to_close_ends():
    """G27: it ends by itself, its actors are ended, and a ResourceWarning tells of it."""
    program = PROGRAM + "async def main():\n    await use(await ActorSystem(name='lost').open())\nasyncio.run(main())"
    done = run(program, "-W", "always::ResourceWarning")
    assert done.returncode == 0
    assert done.stdout == "pong\nstopped: killed\n"
    assert "ResourceWarning" in done.stderr
    assert "ActorSystem lost" in done.stderr
    assert "never closed" in done.stderr
    assert "never awaited" not in done.stderr
    assert "Traceback" not in done.stderr


def test_a_loop_that_is_thrown_away_does_no_harm():
    """A loop that is closed with its tasks pending leaves an actor in the middle of its life, quietly."""
    program = PROGRAM + (
        "async def main():\n    await use(await ActorSystem().open())\n"
        "loop = asyncio.new_event_loop()\nloop.run_until_complete(main())\nloop.close()"
    )
    done = run(program)
    assert (done.returncode, done.stdout) == (0, "pong\n")
    assert "ignored GeneratorExit" not in done.stderr
    assert "loop is closed" not in done.stderr


def test_a_process_may_run_many_systems_one_after_the_other():
    """G26, G20: ten loops leave no thread behind, and no signal handler is touched."""
    program = PROGRAM + (
        "async def main():\n    async with ActorSystem() as system:\n        await use(system)\n"
        "before = [signal.getsignal(number) for number in signal.valid_signals()]\n"
        "for _ in range(10):\n    asyncio.run(main())\n"
        "assert threading.active_count() == 1\n"
        "assert before == [signal.getsignal(number) for number in signal.valid_signals()]"
    )
    done = run(program, "-W", "error")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "pong\nstopped: stopped\n" * 10


def test_the_core_loads_neither_torch_nor_a_loop_that_does_not_run():
    """Using actors on asyncio imports no torch, ray, zmq, uvloop or trio."""
    program = PROGRAM + (
        "async def main():\n    async with ActorSystem() as system:\n        await use(system)\n"
        "asyncio.run(main())\nimport sys\n"
        "print({'torch', 'ray', 'zmq', 'uvloop', 'trio', 'transformers', 'numpy'} & set(sys.modules))"
    )
    done = run(program)
    assert done.stdout.splitlines()[-1] == "set()", done.stderr


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_no_task_is_left():
    """After aclose the loop has the tasks that it had before."""
    before = asyncio.all_tasks()
    async with ActorSystem() as system:
        ref = await system.spawn(Pinged)
        with anyio.move_on_after(0.01):
            await ref.ask(Hold())
    gc.collect()
    assert asyncio.all_tasks() == before
