"""The agent of a node, over a line within one process: this test is the leader."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket

import pytest

from aexec import ExecutorConfig, ParallelConfig
from aexec.actor import ActorSystem
from aexec.errors import ActorDied, ChannelClosed, LeaderLost, RemoteError
from aexec.executor.multiproc.nodes.agent import EndNode, NodeAgent, WaitForEnd
from aexec.executor.multiproc.nodes.hosted import NodePlace
from aexec.messages.control import CallMethod, Ping
from aexec.messages.nodes import (
    Answers,
    Begin,
    Begun,
    Chosen,
    Died,
    Dismissed,
    Failed,
    Leaving,
    NotBegun,
    RankPhase,
    RankProgress,
    Stop,
    Stopped,
)
from aexec.testing.faulty import FaultyWorker
from aexec.testing.processes import ProcessWatch
from aexec.transport import Kind, LoopChannel, Writer, stream_pair
from aexec.transport.pickling import pickled

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(60)]

FAULTY = "aexec.testing.faulty:FaultyWorker"
PLACE = NodePlace(1, 2, "a-host", "127.0.0.1")
PATIENCE = 20.0


class ChattyWorker(FaultyWorker):
    """Says a thousand times how far it has come."""

    def __init__(self, context):
        super().__init__(context)
        for number in range(1000):
            context.progress("weights", number + 1, 1000)


class Line:
    """A line of this process as an agent wants it."""

    def __init__(self, sock: socket.socket):
        self._sock, self._writer = sock, Writer()

    def open(self, on_frame, on_gone):
        self._channel = LoopChannel(self._sock, self._writer, on_frame, on_gone)
        self._channel.open()

    def send(self, kind, call, value=None, *, urgent=False):
        self._writer.send([self._channel], kind, call, value)

    def limit_to(self, limit):
        self._writer.limit_to(limit)

    async def flushed(self, timeout):
        await self._channel.flushed(timeout)

    def close(self):
        self._channel.close()
        self._writer.close()

    async def closed(self):
        pass


class Leader:
    """What a leader does, by hand."""

    def __init__(self, line, agent, watcher):
        self._line, self.agent, self.watcher = line, agent, watcher
        self._frames = asyncio.Queue()
        self._calls = 0
        self.heard = []
        line.open(self._frames.put_nowait, self._frames.put_nowait)

    async def hear(self, kind):
        """The next value of a type; what comes before it is left out."""
        async with asyncio.timeout(PATIENCE):
            while True:
                frame = await self._frames.get()
                value = getattr(frame, "value", frame)
                self.heard.append(value)
                if isinstance(value, kind):
                    return value
                assert not isinstance(value, NotBegun | Failed), value

    def say(self, value):
        self._line.send(Kind.EVENT, 0, value)

    def begin(self, generation=1, *, ranks=range(2, 4), **settings):
        """Ask for a generation; more settings are the executor's."""
        config = ExecutorConfig(
            backend="mp", parallel=ParallelConfig(pipeline_parallel_size=4), close_grace=1.0,
            **{"worker_cls": FAULTY} | settings,
        )  # fmt: skip
        self.say(
            Begin(
                generation=generation, config=pickled(config), first_rank=ranks.start, num_ranks=len(ranks),
                node_id="node-1", init_method="", arena_bytes=config.arena_bytes,
            )
        )  # fmt: skip

    def call(self, message, *ranks):
        """Send a message to all ranks of the node, or to some."""
        self._calls += 1
        self._line.send(Kind.MESSAGE, self._calls, Chosen(ranks, message) if ranks else message)
        return self._calls

    def call_method(self, method, *args, ranks=()):
        return self.call(CallMethod(call=self._calls + 1, method=method, args=args), *ranks)

    async def answers(self, count):
        found = []
        while len(found) < count:
            found += (await self.hear(Answers)).answers
        return {answer.rank: answer.value for answer in found}

    def hang_up(self):
        self._line.close()


@pytest.fixture
async def leader():
    """A leader whose agent has joined it."""
    ours, theirs = stream_pair()
    watcher = [lambda text: None]

    def told(text):
        watcher[0](text)

    async with ActorSystem(name="node-1") as system:
        agent = await system.spawn(NodeAgent, Line(theirs), PLACE, "here", told)
        found = Leader(Line(ours), agent, watcher)
        try:
            yield found
        finally:
            found.hang_up()


async def test_ranks_come_up_and_answer_by_their_own_numbers(leader):
    """A node's ranks are a part of the world: phases, hellos and answers have the numbers that the leader knows."""
    leader.begin()
    assert (await leader.hear(RankPhase)).rank in {2, 3}
    begun = await leader.hear(Begun)
    assert [hello.rank for hello in begun.hellos] == [2, 3]
    leader.call_method("pid")
    assert await leader.answers(2) == {hello.rank: hello.pid for hello in begun.hellos}
    leader.call(Ping(), 3)
    assert {rank: pong.rank for rank, pong in (await leader.answers(1)).items()} == {3: 3}
    leader.say(Stop(generation=1, grace=1.0))
    assert (await leader.hear(Stopped)).lines == ()


async def test_an_error_of_a_rank_is_told_with_its_type(leader):
    """What a worker raises goes to the leader as it would in one process."""
    leader.begin()
    await leader.hear(Begun)
    leader.call_method("barrier", 3, ranks=(3,))
    failed = await leader.hear(Failed)
    assert failed.rank == 3
    assert isinstance(failed.error, RemoteError)
    assert isinstance(failed.error, ValueError)


async def test_a_start_that_fails_is_told_with_its_cause(leader):
    """The leader hears what the constructor raised, and the node can begin again."""
    leader.begin(worker_kwargs={"fail_in": "__init__"})
    error = (await leader.hear(NotBegun)).error
    assert isinstance(error, RemoteError), error
    leader.say(Stop(generation=1, grace=1.0))
    await leader.hear(Stopped)
    leader.begin(2)
    assert (await leader.hear(Begun)).generation == 2


async def test_a_class_that_this_node_has_not_is_told_by_name(leader):
    """The start fails there, and the leader knows what is missing where."""
    leader.begin(worker_cls="no_such_module:Worker")
    error = (await leader.hear(NotBegun)).error
    assert "no_such_module" in str(error)


async def test_progress_is_told_a_few_times_a_second(leader):
    """However often a worker says it; the last of it is always told."""
    leader.begin(worker_cls=ChattyWorker, ranks=range(2, 3))
    await leader.hear(Begun)
    told = [value for value in leader.heard if isinstance(value, RankProgress)]
    assert told[-1] == RankProgress(1, 2, "weights", 1000, 1000)
    assert len(told) < 50


async def test_a_death_is_told_with_the_node(leader):
    """A rank that ends without being told to is an event, and the error says where it was."""
    leader.begin()
    begun = await leader.hear(Begun)
    os.kill(begun.hellos[1].pid, signal.SIGKILL)
    died = (await leader.hear(Died)).error
    assert (died.rank, died.signal, died.node) == (3, "SIGKILL", "node-1")


async def test_an_agent_that_has_lost_its_leader_leaves_nothing(leader):
    """The workers end, native code or not, and whoever waits for the agent is told why."""
    leader.begin()
    begun = await leader.hear(Begun)
    leader.call_method("native_sleep", 60.0)
    end = asyncio.ensure_future(leader.agent.ask(WaitForEnd(), timeout=PATIENCE))
    await asyncio.sleep(0.1)
    with ProcessWatch(hello.pid for hello in begun.hellos) as watch:
        leader.hang_up()
        with pytest.raises(LeaderLost, match="the leader at here is gone"):
            await end
        assert watch.alive() == []


async def test_an_agent_that_is_dismissed_ends_well(leader):
    """After the last generation it is done."""
    leader.begin()
    await leader.hear(Begun)
    leader.say(Stop(generation=1, grace=1.0))
    await leader.hear(Stopped)
    leader.say(Dismissed("the executor was closed"))
    assert await leader.agent.ask(WaitForEnd(), timeout=PATIENCE) == "the executor was closed"


async def test_an_agent_that_is_told_to_end_says_so_first(leader):
    """The leader need not wait for anything to know that the node is lost."""
    leader.begin()
    begun = await leader.hear(Begun)
    with ProcessWatch(hello.pid for hello in begun.hellos) as watch:
        ending = asyncio.ensure_future(leader.agent.ask(EndNode("SIGTERM", 1.0), timeout=PATIENCE))
        assert (await leader.hear(Leaving)).why == "SIGTERM"
        await ending
        assert watch.alive() == []
    assert await leader.agent.ask(WaitForEnd(), timeout=PATIENCE) == "SIGTERM"


async def test_a_stop_overtakes_a_start_that_hangs(leader):
    """Whatever the ranks are in the middle of, the leader gets its answer."""
    leader.begin(worker_kwargs={"hang_in": "__init__", "seconds": 60.0})
    await leader.hear(RankPhase)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(0.5):
            await leader.hear(Begun)
    leader.say(Stop(generation=1, grace=0.2))
    assert (await leader.hear(Stopped)).generation == 1
    leader.begin(2)
    assert (await leader.hear(Begun)).generation == 2


async def test_an_agent_that_fails_ends_its_workers(leader):
    """A fault of the agent's own is the end of its node: the line is closed, and no worker is left."""

    def fail(text):
        raise RuntimeError(text)

    leader.begin()
    begun = await leader.hear(Begun)
    leader.watcher[0] = fail
    with ProcessWatch(hello.pid for hello in begun.hellos) as watch:
        ending = asyncio.ensure_future(leader.agent.ask(WaitForEnd(), timeout=PATIENCE))
        leader.begin(2)
        with pytest.raises(ActorDied):
            await ending
        await leader.hear(ChannelClosed)
        assert watch.alive(2.0) == []
