"""What the leader makes of what a node says; the node is a list of what it was told."""

from __future__ import annotations

import asyncio

import pytest

from aexec.errors import ChannelClosed, MessageNotDecoded, PeerLost, WorkerDied
from aexec.executor.multiproc.nodes.proxy import NodeProxy
from aexec.executor.multiproc.nodes.roster import JoinedNode
from aexec.messages.control import CallMethod, Hello, Ping
from aexec.messages.nodes import (
    Answer,
    Answers,
    Begin,
    Begun,
    Chosen,
    Died,
    Failed,
    Join,
    Leaving,
    NotBegun,
    RankPhase,
    RankProgress,
    Stop,
    Stopped,
)
from aexec.messages.step import ExecuteModel, SampleTokens, StepId
from aexec.transport import Frame, Kind
from aexec.worker.remote import capture

pytestmark = pytest.mark.anyio

JOIN = Join(wire=1, aexec="1", python="3.11", node_rank=1, nnodes=2, host="far", address="10.0.0.2", pid=7)
BEGIN = Begin(
    generation=3, config=b"", first_rank=2, num_ranks=2, node_id="1", init_method="", arena_bytes=1 << 20
)  # fmt: skip


class Link:
    """Keeps what is sent, and says what the test wants it to."""

    is_open = True

    def __init__(self):
        self.sent = []

    def open(self, on_frame, on_gone):
        self.say, self.break_off = on_frame, on_gone

    def send(self, kind, call, value=None, *, urgent=False):
        if not self.is_open:
            raise ChannelClosed("node 1", "the peer is gone")
        self.sent.append((kind, call, value))

    def close(self):
        self.is_open = False

    def event(self, value):
        self.say(Frame(Kind.EVENT, 0, value))


class Sink:
    """Keeps what it is told."""

    def __init__(self):
        self.heard = []

    def __getattr__(self, name):
        return lambda *facts: self.heard.append((name, *facts))


class Far:
    """A node with ranks 2 and 3 of generation 3."""

    def __init__(self):
        self.link, self.sink, self.lost = Link(), Sink(), []
        self.node = JoinedNode(JOIN, self.link, lambda node, why: self.lost.append((node, why)))
        self.node.open()
        self.proxy = NodeProxy(self.node, range(2, 4), 3, self.sink)

    async def up(self):
        starting = asyncio.ensure_future(self.proxy.start(BEGIN))
        await asyncio.sleep(0)
        hellos = [hello(2), hello(3)]
        self.link.event(Begun(generation=3, hellos=hellos, devices=["cuda:0", "cuda:1"]))
        assert await starting == hellos
        return self


def hello(rank):
    return Hello(rank=rank, pid=100 + rank, node="far", worker="W", methods={})


@pytest.fixture
async def far():
    """Before it has begun."""
    return Far()


async def test_a_start_is_told_as_it_goes(far):
    """Phases and progress of its ranks, and where they are once they are up; another generation's news are not its own."""
    starting = asyncio.ensure_future(far.proxy.start(BEGIN))
    await asyncio.sleep(0)
    assert far.link.sent == [(Kind.EVENT, 0, BEGIN)]
    far.link.event(RankPhase(3, 2, "import"))
    far.link.event(RankPhase(2, 3, "import"))
    far.link.event(RankProgress(3, 3, "weights", 1.0, 2.0))
    assert far.sink.heard == [("phase", 2, "import"), ("progress", 3, "weights", 1.0, 2.0)]
    assert far.proxy.phases() == {2: "import", 3: "spawn"}
    far.link.event(Begun(generation=3, hellos=[hello(2), hello(3)], devices=["cuda:0", "cuda:1"]))
    await starting
    far.link.event(RankPhase(3, 2, "constructed"))  # by another way, and later
    assert far.proxy.phases() == {2: "idle", 3: "idle"}
    node = "1 (far, 10.0.0.2)"
    assert far.proxy.places() == [(2, node, 102, "cuda:0"), (3, node, 103, "cuda:1")]


async def test_a_start_that_fails_raises_what_the_node_says(far):
    """With the notes, which do not travel with every error."""
    starting = asyncio.ensure_future(far.proxy.start(BEGIN))
    await asyncio.sleep(0)
    far.link.event(NotBegun(generation=3, error=PeerLost(2, 3, "meet"), notes=["rank 3: no failure of its own"]))
    with pytest.raises(PeerLost) as caught:
        await starting
    assert caught.value.__notes__ == ["rank 3: no failure of its own"]


PING = Ping()


@pytest.mark.parametrize(
    ("ranks", "parcel"),
    [
        ((0, 1, 2, 3), PING),
        ((2, 3), PING),
        ((1, 3), Chosen([3], PING)),
        ((2,), Chosen([2], PING)),
        ((0, 1), None),
    ],
)
async def test_a_message_names_ranks_only_where_it_is_not_for_all(far, ranks, parcel):
    """It travels as it is for all of them, and not at all for none."""
    assert far.proxy.parcel(PING, ranks) == parcel


async def test_what_a_rank_was_told_is_its_phase_until_it_answers(far):
    """Seen without asking: calls, steps, and whose they are."""
    await far.up()
    call = CallMethod(call=1, method="slow")
    far.proxy.sent(1, call, (1, 2), beside=False)
    far.proxy.sent(2, ExecuteModel(StepId(9)), (0, 1, 2, 3), beside=False)
    far.proxy.sent(3, SampleTokens(StepId(9)), (0, 1, 2, 3), beside=False)
    assert far.proxy.phases() == {2: "slow", 3: "sample_tokens"}
    far.link.say(Frame(Kind.REPLY, 0, Answers([Answer(1, 2, "a"), Answer(3, 3, "b")])))
    assert far.sink.heard == [("replied", 1, 2, "a"), ("replied", 3, 3, "b")]
    assert far.proxy.phases() == {2: "sample_tokens", 3: "idle"}


async def test_an_error_is_rebuilt_with_its_notes(far):
    """Of any type, of one rank."""
    await far.up()
    failure = capture(ZeroDivisionError("x"), rank=3, method="divide")
    far.link.say(Frame(Kind.FAILURE, 5, Failed(3, failure, ["a note"])))
    ((name, call, rank, error),) = far.sink.heard
    assert (name, call, rank) == ("failed", 5, 3)
    assert isinstance(error, ZeroDivisionError)
    assert "a note" in error.__notes__


async def test_what_one_end_cannot_read_fails_the_call_of_all_its_ranks(far):
    """A message that the node could not read, or an answer that we cannot; each rank's error is its own."""
    await far.up()
    error = MessageNotDecoded("node 1", "REPLY of call 6", "no module")
    far.link.say(Frame(Kind.REPLY, 6, None, (), error))
    far.link.say(Frame(Kind.FAILURE, 7, Failed(-1, error)))
    assert [fact[:3] for fact in far.sink.heard] == [
        ("failed", 6, 2), ("failed", 6, 3), ("failed", 7, 2), ("failed", 7, 3)
    ]  # fmt: skip
    assert len({id(fact[3]) for fact in far.sink.heard}) == 4


async def test_a_death_is_told_once(far):
    """Of a rank by its node, and of the others when the node goes."""
    await far.up()
    died = WorkerDied(2, 102, None, "SIGKILL", "idle", node="1 (far, 10.0.0.2)")
    far.link.event(Died(generation=3, error=died))
    far.proxy.sent(4, ExecuteModel(StepId(8)), (2, 3), beside=False)
    far.link.break_off(ChannelClosed("node 1", "the peer is gone"))
    (_, first), (_, second) = far.sink.heard
    assert first is died
    assert (second.rank, second.pid, second.phase, second.step) == (3, 103, "execute_model", 8)
    assert str(second) == (
        "rank 3 (pid 103 on node 1 (far, 10.0.0.2)) ended during execute_model, step 8: "
        "node 1 (far, 10.0.0.2) is lost: the peer is gone"
    )
    assert far.lost == [(far.node, "the peer is gone")]


async def test_a_node_that_says_why_it_leaves_is_lost_for_that(far):
    """And not for the line that breaks then."""
    await far.up()
    far.link.event(Leaving("Ctrl-C"))
    far.link.break_off(ChannelClosed("node 1", "the peer is gone"))
    assert len(far.lost) == 1
    assert len(far.sink.heard) == 2
    assert "its agent was told to end there (Ctrl-C)" in str(far.sink.heard[0][1])
    (line,) = await far.proxy.stop(0.0, 5.0)
    assert line == (
        "ranks 2 to 3 on node 1 (far, 10.0.0.2): it is lost: its agent was told to end there (Ctrl-C); whatever is "
        "alive there ends its workers by itself"
    )


async def test_a_stop_waits_for_the_node(far):
    """It says what it had to do; deaths are no news any longer."""
    await far.up()
    stopping = asyncio.ensure_future(far.proxy.stop(1.0, 5.0))
    await asyncio.sleep(0)
    assert far.link.sent[-1] == (Kind.EVENT, 0, Stop(generation=3, grace=1.0))
    far.link.event(Died(generation=3, error=WorkerDied(2, 102)))
    far.link.event(Stopped(generation=3, lines=["node 1: rank 2 was killed"]))
    assert await stopping == ["node 1: rank 2 was killed"]
    assert far.sink.heard == []


async def test_a_node_that_was_never_begun_has_nothing_to_stop(far):
    """Nothing is sent, and nothing waited for."""
    assert await far.proxy.stop(1.0, 5.0) == []
    assert far.link.sent == []


async def test_a_node_that_does_not_answer_a_stop_is_let_go(far):
    """Its line is closed, so that it ends its workers itself; and that is said."""
    await far.up()
    (line,) = await far.proxy.stop(0.0, 0.05)
    assert line.startswith(
        "ranks 2 to 3 on node 1 (far, 10.0.0.2): it did not say within 0.05 s that they have ended; "
    )
    assert not far.link.is_open
    assert far.sink.heard == []


@pytest.mark.parametrize("meanwhile", [True, False])
async def test_a_node_that_is_lost_needs_no_stop(far, meanwhile):
    """Whether it goes before it is asked or after."""
    await far.up()
    gone = ChannelClosed("node 1", "the peer is gone")
    if not meanwhile:
        far.link.close()
        far.link.break_off(gone)
    stopping = asyncio.ensure_future(far.proxy.stop(1.0, 5.0))
    await asyncio.sleep(0)
    if meanwhile:
        far.link.break_off(gone)
    (line,) = await asyncio.wait_for(stopping, 4.0)  # of the 5 s that it may take
    assert "the peer is gone; whatever is alive there ends its workers by itself" in line
