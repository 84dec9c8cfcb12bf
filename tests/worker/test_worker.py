from __future__ import annotations

import asyncio
import threading

import anyio
import anyio.lowlevel
import pytest

from aexec.actor import ActorSystem
from aexec.config import ExecutorConfig
from aexec.errors import ActorStopped, ConfigError, RemoteError, UnknownMethod, WorkerDied
from aexec.messages.control import CallMethod, Dump, Greet, Ping, Revoke, Shutdown
from aexec.messages.step import ExecuteModel, SampleTokens
from aexec.worker import cancelled
from aexec.worker.context import place_worker
from aexec.worker.worker import WorkerActor

pytestmark = pytest.mark.anyio


async def settle():
    """Let the actor take in what was sent."""
    for _ in range(10):
        await asyncio.sleep(0)


class Gated:
    """A worker that blocks where a test wants it to, and goes on when it says so."""

    def __init__(self, context, *, fail=None):
        self.gate = threading.Event()
        self.log = []
        if fail is not None:
            raise fail

    def look(self):
        self.log.append("look")
        while not cancelled() and not self.gate.wait(0.005):
            pass
        return cancelled()

    def hold(self):
        self.log.append("hold")
        assert self.gate.wait(10)
        self.log.append("held")

    def note(self, entry):
        self.log.append(entry)
        return entry

    async def wait(self, entry="waited"):
        self.log.append(entry)
        await anyio.lowlevel.checkpoint()
        return entry

    async def hang(self):
        try:
            await anyio.sleep(30)
        finally:
            self.log.append("hang ended")

    def begin_to_hang(self):
        self.log.append("taken")
        return self.hang()

    def coroutine(self):
        return self.wait("from a plain method")

    def leave(self):
        raise SystemExit(3)

    async def leave_async(self):
        raise SystemExit

    def fail(self):
        raise ValueError("bad")

    def execute_model(self, step):
        self.log.append(("execute", step.step))
        assert self.gate.wait(10)
        self.log.append(("executed", step.step))

    def sample_tokens(self, step_id, grammar):
        return f"tokens {step_id}"

    def shutdown(self):
        self.log.append("shutdown")


class Hosted:
    """A worker actor with what it reports, and what a test needs of its insides."""

    def __init__(self, system, **settings):
        config = ExecutorConfig(worker_cls=Gated, close_grace=2.0, **settings)
        place = place_worker(0, config, generation=1, local_rank=0, node_id="here", node_ip="127.0.0.1")
        self.phases, self.deaths = [], []
        self.actor = WorkerActor(place, self.phases.append, self.deaths.append)
        self.calls = 0
        self._system = system

    async def start(self):
        self.ref = await self._system.spawn(lambda: self.actor)
        await self.ref.ask(Greet())
        self.worker = self.actor.host._worker
        return self

    async def call(self, method, *args):
        """Send a call, and let the actor take it in."""
        self.calls += 1
        message = CallMethod(call=self.calls, method=method, args=args)
        task = asyncio.ensure_future(self.ref.ask(message, timeout=10))
        await settle()
        return task

    async def reaches(self, entry):
        with anyio.fail_after(10):
            while entry not in self.worker.log:
                await asyncio.to_thread(threading.Event().wait, 0.001)


@pytest.fixture
async def system():
    async with ActorSystem(timeout=10.0) as system:
        yield system


@pytest.fixture
async def hosted(system):
    hosted = await Hosted(system).start()
    yield hosted
    hosted.worker.gate.set()


async def test_a_worker_is_constructed_when_it_is_greeted(system):
    """In phases, on its compute thread; and it says who it is."""
    hosted = Hosted(system)
    ref = await system.spawn(lambda: hosted.actor)
    assert hosted.actor.host.worker_name == ""
    hello = await ref.ask(Greet())
    assert (hello.rank, hello.worker, hello.methods["wait"], hello.methods["note"]) == (0, "Gated", True, False)
    assert hosted.phases == ["worker_init", "__init__"]
    assert await ref.ask(Greet()) == hello
    assert repr(hosted.actor).startswith("<WorkerActor rank 0: Gated, <ComputeThread aexec-worker-0: idle")


async def test_a_greeter_whose_turn_never_comes_is_told_so(system):
    """A worker that is shut down before it was constructed leaves nobody waiting for its thread."""
    hosted, gate = Hosted(system), threading.Event()
    ref = await system.spawn(lambda: hosted.actor)
    hosted.actor.thread.submit("busy", gate.wait, lambda *_: None)
    told = []

    async def greet():
        with pytest.raises(ActorStopped, match="the worker was shut down") as caught:
            await ref.ask(Greet())
        told.append(caught.value)

    with anyio.fail_after(5):
        async with anyio.create_task_group() as group:
            group.start_soon(greet)
            while not hosted.phases or hosted.actor.thread.pulse.phase != "busy":
                await anyio.lowlevel.checkpoint()
            assert await ref.ask(Shutdown(0.05)) is False
        assert len(told) == 1
    gate.set()


async def test_a_failed_construction_is_the_greeters(system):
    """With its type, and wrong arguments as a ConfigError."""
    failing = Hosted(system, worker_kwargs={"fail": KeyError("k")})
    ref = await system.spawn(lambda: failing.actor)
    with pytest.raises(KeyError) as caught:
        await ref.ask(Greet())
    assert isinstance(caught.value, RemoteError)
    assert caught.value.method == "__init__ of Gated"
    ref = await system.spawn(lambda: Hosted(system, worker_kwargs={"nope": 1}).actor)
    with pytest.raises(ConfigError, match=r"its signature is Gated\(context, \*, fail=None\)"):
        await ref.ask(Greet())


async def test_plain_methods_run_in_order_with_the_steps(hosted):
    """One after the other, on one thread."""
    await hosted.ref.ask(ExecuteModel(1))
    noted = await hosted.call("note", "after step 1")
    await hosted.ref.ask(ExecuteModel(2))
    last = await hosted.call("note", "after step 2")
    hosted.worker.gate.set()
    await asyncio.gather(noted, last)
    steps = [("execute", 1), ("executed", 1), "after step 1", ("execute", 2), ("executed", 2), "after step 2"]
    assert hosted.worker.log == steps
    assert (await hosted.ref.ask(SampleTokens(1))).output == "tokens 1"


async def test_async_methods_run_beside_plain_ones(hosted):
    """The loop is free while the compute thread is held."""
    held = await hosted.call("hold")
    assert await (await hosted.call("wait")) == "waited"
    assert not held.done()
    hosted.worker.gate.set()
    await held


async def test_async_methods_wait_for_the_steps_before_them(hosted):
    """Never ahead of an accepted step."""
    await hosted.ref.ask(ExecuteModel(1))
    waiting = await hosted.call("wait")
    await hosted.reaches(("execute", 1))
    assert "waited" not in hosted.worker.log
    hosted.worker.gate.set()
    await waiting
    assert hosted.worker.log == [("execute", 1), ("executed", 1), "waited"]


async def test_a_coroutine_from_a_plain_method_is_awaited(hosted):
    """On the loop, as if the method had been async."""
    assert await (await hosted.call("coroutine")) == "from a plain method"


async def test_errors_name_their_rank_and_method(hosted):
    """As the caller is to see them."""
    failing = await hosted.call("fail")
    with pytest.raises(ValueError, match="rank 0, fail: ValueError: bad") as caught:
        await failing
    assert isinstance(caught.value, RemoteError)
    unknown = await hosted.call("nope")
    with pytest.raises(UnknownMethod, match="Gated has no method 'nope'"):
        await unknown


async def test_the_liveness_lane_answers_while_the_thread_is_held(hosted):
    """Phase, step, queue and stack."""
    await hosted.ref.ask(ExecuteModel(7))
    queued = await hosted.call("note", 1)
    hanging = await hosted.call(lambda worker: worker.begin_to_hang())
    await hosted.reaches(("execute", 7))
    pong = await hosted.ref.ask(Ping())
    assert (pong.phase, pong.step, pong.queued) == ("execute_model", 7, 2)
    assert "in execute_model" in await hosted.ref.ask(Dump())
    hosted.worker.gate.set()
    await queued
    await hosted.reaches("taken")
    pong = await hosted.ref.ask(Ping())
    assert (pong.step, pong.queued) == (7, 0)
    hanging.cancel()


async def test_a_dump_shows_running_coroutines(hosted):
    """G69: where they are, beside the compute thread."""
    hanging = await hosted.call("hang")
    dump = await hosted.ref.ask(Dump())
    assert "thread aexec-worker-0 is idle\nasync hang:\n" in dump
    assert "await anyio.sleep(30)" in dump
    assert await hosted.ref.ask(Revoke(1)) is False
    with pytest.raises(ActorStopped):
        await hanging


async def test_a_revoked_call_that_has_not_begun_never_runs(hosted):
    """G29: whether it waits for the thread, for a step, or has not even come."""
    await hosted.ref.ask(ExecuteModel(1))
    plain, waiting = await hosted.call("note", "never"), await hosted.call("wait", "never")
    assert await hosted.ref.ask(Revoke(1)) is True
    assert await hosted.ref.ask(Revoke(2)) is True
    assert await hosted.ref.ask(Revoke(3)) is True
    late = await hosted.call("note", "never")
    hosted.worker.gate.set()
    for call in (plain, waiting, late):
        with pytest.raises(ActorStopped):
            await call
    assert await (await hosted.call("note", "next")) == "next"
    assert "never" not in hosted.worker.log


async def test_a_revoked_call_that_runs_is_told(hosted):
    """An async one is cancelled; a plain one goes on to its end."""
    held, hanging = await hosted.call("hold"), await hosted.call("hang")
    await hosted.reaches("hold")
    assert await hosted.ref.ask(Revoke(1)) is False
    assert await hosted.ref.ask(Revoke(2)) is False
    with pytest.raises(ActorStopped):
        await hanging
    hosted.worker.gate.set()
    await held
    assert "hang ended" in hosted.worker.log
    assert await hosted.ref.ask(Revoke(1)) is False


@pytest.mark.parametrize(("method", "code"), [("leave", 3), ("leave_async", 0)])
async def test_sys_exit_is_a_death(hosted, method, code):
    """G30: exit code 0 counts as one too; it is reported, and later work never runs."""
    leaving = await hosted.call(method)
    with pytest.raises(ActorStopped):
        await leaving
    (death,) = hosted.deaths
    assert isinstance(death, WorkerDied)
    assert (death.rank, death.exit_code, death.phase) == (0, code, method)


async def test_a_shutdown_gives_up_what_is_queued_and_runs_the_hook(hosted):
    """Promise 8: within its grace; the thread is gone."""
    held = await hosted.call("hold")
    await hosted.reaches("hold")
    queued, hanging = await hosted.call("note", "never"), await hosted.call("hang")
    ending = asyncio.ensure_future(hosted.ref.ask(Shutdown(5.0)))
    await settle()
    hosted.worker.gate.set()
    assert await ending is True
    assert set(hosted.worker.log) == {"hold", "hang ended", "held", "shutdown"}
    assert hosted.worker.log[-1] == "shutdown"
    assert not hosted.actor.thread.is_alive
    assert await hosted.ref.ask(Shutdown(5.0)) is True
    await hosted.ref.stop()
    for call in (queued, hanging):
        with pytest.raises(ActorStopped):
            await call
    await held


async def test_a_shutdown_tells_the_method_that_runs(hosted):
    """A long one that looks for it ends early, well within the grace."""
    looking = await hosted.call("look")
    await hosted.reaches("look")
    assert await hosted.ref.ask(Shutdown(10.0)) is True
    assert await looking is True


async def test_a_shutdown_that_takes_too_long_says_so(hosted):
    """The thread is left behind, and ends as soon as it is back from C; whoever waits for the call is told."""
    held = await hosted.call("hold")
    await hosted.reaches("hold")
    assert await hosted.ref.ask(Shutdown(0.05)) is False
    hosted.worker.gate.set()
    with pytest.raises(TimeoutError, match="hold took longer than the grace of its thread's end"):
        await held


async def test_a_failed_shutdown_hook_does_not_keep_the_worker(hosted):
    """It is logged, and the thread ends all the same."""
    hosted.worker.shutdown = lambda: 1 // 0
    assert await hosted.ref.ask(Shutdown(5.0)) is True


async def test_a_stopped_actor_ends_its_thread(system):
    """Also when nobody asked for a shutdown."""
    hosted = await Hosted(system).start()
    await hosted.ref.stop()
    assert hosted.worker.log == ["shutdown"]
    assert not hosted.actor.thread.is_alive
