from __future__ import annotations

import asyncio

import anyio
import pytest

from aexec import ExecutorConfig, ParallelConfig, Restart, open_executor
from aexec.errors import CallTimeout, ExecutorClosed, ProtocolError, WorkerDied
from aexec.executor import WorkerGroup, generation
from aexec.executor.collective import Lane
from aexec.messages.control import CallMethod, Dump, Hello, Ping, Pong, Revoke
from aexec.messages.lifecycle import SlowCall

pytestmark = pytest.mark.anyio


class ScriptedGroup(WorkerGroup):
    """Two ranks that answer what a test has set: by rank, by type of message; the rest is silence."""

    backend = "scripted"
    made: list[ScriptedGroup]

    def __init__(self, plan):
        super().__init__(plan)
        self.sent, self.stopped = [], 0
        self.answers = {
            (0, Ping): Pong(rank=0, phase="idle", step=None, age=1.0),
            (0, Dump): "thread of rank 0 is idle",
        }
        type(self).made.append(self)

    async def start(self):
        methods = {"work": False, "wait": True}
        return [Hello(rank=rank, pid=100 + rank, node="here", worker="W", methods=methods) for rank in range(2)]

    def send(self, call, message, ranks):
        self.sent.append((type(message), call, tuple(ranks)))
        for rank in ranks:
            if (rank, type(message)) in self.answers:
                answer = self.answers[rank, type(message)]
                asyncio.get_running_loop().call_soon(self.plan.sink.replied, call, rank, answer)

    async def stop(self, grace):
        self.stopped += 1
        return []

    def sent_of(self, kind):
        return [(call, ranks) for sent, call, ranks in self.sent if sent is kind]


@pytest.fixture
def backend():
    return type("Scripted", (ScriptedGroup,), {"made": []})


def scripted(backend, **settings):
    layout = ParallelConfig(tensor_parallel_size=2)
    return open_executor(ExecutorConfig(backend=backend, parallel=layout, **settings))


async def test_a_rank_that_gives_no_answer_is_named(backend):
    """G02, G45: who had answered, who had not, and what is known of each."""
    async with scripted(backend) as executor:
        backend.made[0].answers[0, CallMethod] = "done"
        with pytest.raises(CallTimeout, match=r"work on ranks 0, 1 passed its limit of 0\.05 s") as caught:
            await executor.collective_rpc("work", timeout=0.05)
        assert caught.value.started
        assert caught.value.__notes__[:2] == ["rank 0: answered", "rank 1: gives no answer"]


async def test_a_call_on_several_ranks_is_never_taken_back_from_some(backend):
    """A rank that ran it alone would wait for the others in a collective."""
    async with scripted(backend) as executor:
        group = backend.made[0]
        with pytest.raises(CallTimeout):
            await executor.collective_rpc("work", timeout=0.02)
        assert group.sent_of(Revoke) == []


async def test_a_call_on_one_rank_is_taken_back(backend):
    """And if the rank says that it never ran, so does the error."""
    async with scripted(backend) as executor:
        group = backend.made[0]
        group.answers[0, Revoke] = True
        with pytest.raises(CallTimeout) as caught:
            await executor.collective_rpc("work", timeout=0.02, ranks=[0])
        assert not caught.value.started
        group.answers[0, Revoke] = False
        group.plan.sink.replied(group.sent_of(CallMethod)[0][0], 0, None)
        with pytest.raises(CallTimeout) as caught:
            await executor.collective_rpc("work", timeout=0.02, ranks=[0])
        assert caught.value.started


async def test_a_cancelled_async_call_is_taken_back_from_all_ranks(backend):
    """A coroutine can be cancelled wherever it is."""
    async with scripted(backend) as executor:
        waiting = asyncio.ensure_future(executor.collective_rpc("wait"))
        await asyncio.sleep(0.01)
        waiting.cancel()
        await asyncio.wait([waiting])
        ((call, ranks),) = backend.made[0].sent_of(CallMethod)
        assert [ranks for _, ranks in backend.made[0].sent_of(Revoke)] == [ranks]
        assert call


async def test_health_of_a_silent_rank_is_stuck(backend):
    """Within the time that was given; the other rank is alive."""
    async with scripted(backend) as executor:
        report = await executor.check_health(timeout=0.05)
        assert [rank.state for rank in report.ranks] == ["alive", "stuck"]
        assert report.ranks[1].phase == "gives no answer"
        assert [rank.state for rank in executor.ranks] == ["ready", "stuck"]
        backend.made[0].answers[1, Ping] = Pong(rank=1, phase="work", step=2, age=0.1)
        assert await executor.check_health(timeout=0.05)
        assert [rank.state for rank in executor.ranks] == ["ready", "ready"]


async def test_a_slow_call_names_the_ranks_that_are_missing(backend):
    """G01: and what they say they do."""
    async with scripted(backend, slow_call=0.05) as executor:
        group = backend.made[0]
        group.answers[0, CallMethod] = None
        group.answers[1, Ping] = Pong(rank=1, phase="all_reduce", step=2, age=0.1)
        events = executor.events()
        call = asyncio.ensure_future(executor.collective_rpc("work"))
        with anyio.fail_after(5):
            event = await anext(events)
        assert isinstance(event, SlowCall)
        assert (event.method, event.missing) == ("work", {1: "all_reduce"})
        assert "work on ranks 0, 1, sent" in executor.dump()
        assert [rank.phase for rank in executor.ranks] == ["idle", "work"]
        call.cancel()
        await asyncio.wait([call])


async def test_a_death_ends_calls_before_anything_is_cleaned_up(backend):
    """Promise 3: with what was known of the other rank."""
    async with scripted(backend) as executor:
        group = backend.made[0]
        group.answers[0, CallMethod] = "done"
        stopped_at_death = []

        async def work():
            try:
                await executor.collective_rpc("work")
            finally:
                stopped_at_death.append(group.stopped)

        call = asyncio.ensure_future(work())
        await asyncio.sleep(0.01)
        group.plan.sink.died(WorkerDied(1, 101, None, "SIGKILL", "work"))
        with pytest.raises(WorkerDied, match=r"rank 1 \(pid 101\) ended by SIGKILL during work") as caught:
            await call
        assert caught.value.__notes__[:2] == ["while work on ranks 0, 1 was pending", "rank 0: answered"]
        assert stopped_at_death == [0]
        assert executor.ranks[1].state == "dead"
    assert group.stopped == 1


async def test_the_second_death_of_a_group_is_an_event_and_no_more(backend):
    """The root cause is the earliest."""
    async with scripted(backend) as executor:
        events, sink = executor.events(), backend.made[0].plan.sink
        for rank in (1, 0):
            sink.died(WorkerDied(rank, 100 + rank, 1))
        assert [(await anext(events)).rank for _ in range(2)] == [1, 0]
        with pytest.raises(WorkerDied, match="rank 1"):
            await executor.collective_rpc("work")
        report = await executor.check_health(timeout=0.05)
        assert [rank.state for rank in report.ranks] == ["dead", "dead"]


async def test_a_backend_that_cannot_start_is_stopped_and_its_error_raised(backend):
    """Whatever it raises."""

    async def start(self):
        raise OSError("no such device")

    backend.start = start
    with pytest.raises(OSError, match="no such device"):
        await scripted(backend)
    assert [group.stopped for group in backend.made] == [1]


async def test_a_backend_that_breaks_during_a_restart_is_final(backend):
    """Its error is wrapped, so that callers can tell whose fault it was."""
    async with scripted(backend, on_failure=Restart(max_restarts=1, backoff=0.0)) as executor:

        async def start(self):
            raise OSError("no such device")

        failed = asyncio.Event()
        executor.add_failure_callback(lambda _: failed.set())
        backend.start = start
        backend.made[0].plan.sink.died(WorkerDied(0, 100, 1))
        with anyio.fail_after(5):
            await failed.wait()
        with pytest.raises(ProtocolError, match="the backend raised OSError"):
            await executor.collective_rpc("work")


async def test_a_backend_that_does_not_stop_is_left(backend, monkeypatch):
    """Promise 8: close keeps its budget."""
    monkeypatch.setattr(generation, "_SLACK", 0.05)

    async def stop(self, grace):
        await anyio.sleep(30)

    executor = await scripted(backend, close_grace=0.05, term_grace=0.01, kill_grace=0.01)
    backend.stop = stop
    with anyio.fail_after(5):
        await executor.close()
    with pytest.raises(ExecutorClosed):
        await executor.collective_rpc("work")


async def test_a_group_that_has_ended_is_asked_nothing_more(backend):
    """Its timer may be the next group's by now: a question would have no answer and no end."""
    async with scripted(backend) as executor:
        fanout = executor._board.fanout
        fanout.fail_all(lambda _: ExecutorClosed("it has ended"))
        asked = len(backend.made[0].sent)
        assert await fanout.ask("ping", lambda _: Ping(), lane=Lane.LIVENESS, timeout=60.0) == {}
        assert len(backend.made[0].sent) == asked
