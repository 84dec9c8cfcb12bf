from __future__ import annotations

import asyncio
import os
import pickle
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from stopwatch import Stopwatch

sys.path.insert(0, str(Path(__file__).parent))
from curve_nodes import PATIENCE, Leader, Side, leader

from aexec.errors import ArenaFull, ChannelClosed, ChannelFull, LeaderNotFound, LinkRefused, ProtocolError
from aexec.transport import Kind, LoopChannel, Writer
from aexec.transport.curve import CurveListener, NodeKey, broadcast, curve_pair, dial_leader
from aexec.transport.curve.sockets import Served

pytestmark = pytest.mark.anyio

MIB = 1 << 20


# Getting together.


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
async def test_a_follower_says_hello_and_has_a_line(host):
    """The leader hears its hello and address, it hears the answer, and frames go both ways; also over IPv6."""
    async with leader(host) as node:
        assert node.listener.address[1] > 0
        here, there = await node.follower()
        assert node.hellos == [(host, b"hello")]
        assert node.answered == b"welcome"
        here.link.send(Kind.MESSAGE, 7, "down")
        there.link.send(Kind.REPLY, 7, ["up"])
        assert ((await there.next()).value, (await here.next()).value) == ("down", ["up"])
        assert node.listener.statistics().links == 1


async def test_a_follower_that_is_refused_reads_why_and_is_hung_up_on():
    """It has the answer; its line ends, and the leader has none."""
    async with leader(accept=False, answer=b"too many") as node:
        answer, link = await dial_leader(*node.listener.address, node.key, b"hello", timeout=PATIENCE)
        assert answer == b"too many"
        assert "hung up" in (await Side(link).end()).reason
        await link.closed()
        facts = node.listener.statistics()
        assert (facts.links, facts.accepted, facts.refused) == (0, 0, 1)


async def test_an_error_in_answering_a_hello_refuses_it():
    """The leader lives on, and says what went wrong in its log."""
    async with leader() as node:

        def fail(address, hello):
            raise RuntimeError("no")

        node.listener._on_hello = fail
        answer, link = await dial_leader(*node.listener.address, node.key, b"hello", timeout=PATIENCE)
        assert answer == b""
        assert "hung up" in (await Side(link).end()).reason
        await link.closed()


async def test_frames_that_come_before_a_line_is_opened_are_kept():
    """In order, and heard once it is."""
    async with leader() as node:
        _, link = await dial_leader(*node.listener.address, node.key, b"", timeout=PATIENCE)
        here = await node.sides.get()
        for call in range(50):
            here.link.send(Kind.MESSAGE, call, call)
        await asyncio.sleep(0.1)
        there = Side(link)
        assert [(await there.next()).call for _ in range(50)] == list(range(50))
        link.close()
        await link.closed()


async def test_a_follower_may_come_before_its_leader():
    """It tries until the leader is there, and says what it waits for."""
    with socket.create_server(("127.0.0.1", 0)) as reserved:
        port = reserved.getsockname()[1]
    said = []
    node = Leader(port=port)
    dialling = asyncio.ensure_future(dial_leader("127.0.0.1", port, node.key, b"", timeout=PATIENCE, told=said.append))
    while not said:  # noqa: ASYNC110 - it comes from a callback
        await asyncio.sleep(0.01)
    node.listener.open()
    _, link = await dialling
    assert "nobody listens there" in said[0]
    link.close()
    await node.listener.aclose()
    await link.closed()


async def test_a_leader_that_never_comes_is_told_with_the_reason():
    """Nobody listens, no such name, nothing but silence: each at the deadline, and each with its words."""
    key = NodeKey.random()
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        with pytest.raises(LeaderNotFound, match="somebody accepts connections there"):
            await dial_leader("127.0.0.1", port, key, b"", timeout=1.5)
    with pytest.raises(LeaderNotFound, match=f"tcp://127.0.0.1:{port}.*1.5 s.*nobody listens there"):
        await dial_leader("127.0.0.1", port, key, b"", timeout=1.5)
    with pytest.raises(LeaderNotFound, match="cannot be resolved"):
        await dial_leader("no-such-host.invalid", port, key, b"", timeout=1.5)


async def test_another_key_is_told_at_once():
    """It is of no use to go on trying; the leader counts it among the strangers."""
    async with leader() as node:
        began = time.monotonic()
        with pytest.raises(LinkRefused, match="another key"):
            await dial_leader(*node.listener.address, NodeKey.random(), b"", timeout=PATIENCE)
        assert time.monotonic() - began < 5
        assert node.hellos == []
        assert node.listener.statistics().turned_away >= 1


async def test_an_address_that_is_not_allowed_is_told_at_once():
    """It has the key, so that it may know; one that is allowed gets in beside it."""
    async with leader(allow=["127.0.0.2", "10.0.0.0/8"]) as node:
        with pytest.raises(LinkRefused, match="allow-list"):
            await dial_leader(*node.listener.address, node.key, b"", timeout=PATIENCE, source="127.0.0.3")
        await node.follower(source="127.0.0.2")
        assert node.hellos == [("127.0.0.2", b"hello")]


async def test_a_service_of_another_kind_is_told():
    """What listens there speaks, but is no leader."""

    async def web(reader, writer):
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n" * 8)
        writer.close()

    server = await asyncio.start_server(web, "127.0.0.1", 0)
    with pytest.raises(LinkRefused, match="no leader of aexec"):
        await dial_leader(*server.sockets[0].getsockname(), NodeKey.random(), b"", timeout=PATIENCE)
    server.close()
    await server.wait_closed()


async def test_a_port_that_is_taken_is_told_by_open_and_leaves_nothing():
    """As the system says it."""
    async with leader() as node:
        with pytest.raises(OSError, match="in use"):
            Leader(port=node.listener.address[1]).listener.open()
        await node.follower()
    await node.listener.aclose()  # twice is once
    unopened = CurveListener("127.0.0.1", 0, NodeKey.random(), lambda *_: (True, b""), lambda *_: None)
    await unopened.aclose()


# Frames.


async def test_a_message_for_several_nodes_is_encoded_once():
    """And each of them has it whole."""
    async with leader() as node:
        pairs = [await node.follower() for _ in range(3)]
        value = _Counted()
        broadcast([here.link for here, _ in pairs], Kind.MESSAGE, 3, [value, np.arange(MIB)])
        for _, there in pairs:
            frame = await there.next()
            assert frame.value[1].sum() == np.arange(MIB).sum()
        assert value.encoded == 1
        broadcast([], Kind.MESSAGE, 3)


class _Counted:
    def __init__(self):
        self.encoded = 0

    def __reduce__(self):
        self.encoded += 1
        return int, ()


async def test_what_was_sent_may_be_changed_at_once():
    """Also while it waits behind others for a peer that does not read."""
    async with leader() as node:
        here, there = await node.follower()
        array = np.zeros(MIB, np.uint8)
        for call in range(100):
            array[:] = call
            here.link.send(Kind.MESSAGE, call, array)
        assert here.link.statistics().queued, "the line has not taken all of it"
        array[:] = 255
        for call in range(100):
            frame = await there.next()
            assert (frame.value == call).all()


async def test_what_waits_is_bounded_in_bytes():
    """The error says how many; once the peer has read, there is room again."""
    async with leader(writer=Writer(32 * MIB, setting="the limit")) as node:
        here, there = await node.follower()
        array = np.zeros(4 * MIB, np.uint8)
        with pytest.raises(ChannelFull, match=r"frames \(3\d\.\d MiB\) wait"):
            send_many(here.link, array)
        sent = here.link.statistics().sent
        await here.link.flushed(PATIENCE)
        with pytest.raises(ArenaFull, match="the limit"):
            here.link.send(Kind.MESSAGE, 1, np.zeros(33 * MIB, np.uint8))
        for _ in range(sent):
            await there.next()
        here.link.send(Kind.MESSAGE, 2, "again")
        assert (await there.next()).value == "again"
        here.link.limit_to(3 * MIB)
        with pytest.raises(ArenaFull, match=r"3\.0 MiB of 3\.0 MiB"):
            here.link.send(Kind.MESSAGE, 3, array)


def send_many(link, value):
    for _ in range(100):
        link.send(Kind.MESSAGE, 1, value)


async def test_what_is_urgent_passes_what_waits():
    """Both ways, between the pieces of a large message; and nothing turns in vain once all has gone."""
    async with leader() as node:
        pairs = [await node.follower() for _ in range(2)]
        for here, there in pairs:
            for one, other in ((here, there), (there, here)):
                for call in range(3):
                    one.link.send(Kind.MESSAGE, call, np.zeros(20 * MIB, np.uint8))
                one.link.send(Kind.MESSAGE, 9, "ping", urgent=True)
                assert (await other.next()).value == "ping"
        for side in (*pairs[0], *pairs[1]):
            assert [(await side.next()).call for _ in range(3)] == [0, 1, 2]
        await asyncio.sleep(0.05)
        assert node.listener._blocked == set()


async def test_something_urgent_for_a_node_that_has_just_gone_is_no_error():
    """It is told where the line is heard, as for any other frame."""
    async with leader() as node:
        here, child = await node.process()
        child.kill()
        child.wait()
        time.sleep(0.2)  # noqa: ASYNC251 - ZMQ knows of it, and this loop does not
        here.link.send(Kind.MESSAGE, 1, "ping", urgent=True)
        here.link.send(Kind.MESSAGE, 2, "ping")
        assert not (await here.end()).orderly


async def test_large_messages_do_not_hold_the_loop():
    """Neither end's: 100 MB go through in pieces, between which everything else has its turn."""
    async with leader() as node:
        here, there = await node.follower()
        here.link.send(Kind.MESSAGE, 1, np.ones(100 * MIB, np.uint8))
        turns = []
        while there.frames.empty():
            began = time.thread_time()
            await asyncio.sleep(0)
            turns.append(time.thread_time() - began)
        assert sorted(turns)[-4] < 0.05  # time that the host takes away counts as ours, and may be in a turn or two
        assert len((await there.next()).value) == 100 * MIB


async def test_a_line_that_is_idle_costs_nothing():
    """Heart-beats are ZMQ's own business: nothing of ours runs while nothing is sent."""
    async with leader(node_timeout=1.5) as node:
        here, there = await node.follower(node_timeout=1.5)
        await asyncio.sleep(0.1)
        turns, turn = [], Served._turn
        Served._turn = lambda served: (turns.append(served), turn(served))[1]
        try:
            await asyncio.sleep(1.0)
        finally:
            Served._turn = turn
        assert turns == []
        assert here.link.is_open
        assert there.link.is_open


async def test_a_line_is_opened_once_and_before_it_is_used():
    """Anything else is a mistake of ours, and says so."""
    async with leader() as node:
        _, link = await dial_leader(*node.listener.address, node.key, b"", timeout=PATIENCE)
        assert not link.is_open
        assert "not opened" in repr(link)
        with pytest.raises(ProtocolError, match="before it was opened"):
            link.send(Kind.MESSAGE, 1)
        side = Side(link)
        with pytest.raises(ProtocolError, match="opened twice"):
            Side(link)
        assert side.link.is_open
        link.close()
        link.close()
        await link.closed()


# The end.


async def test_a_close_is_told_as_one():
    """By either end: the other one can tell it from a death."""
    async with leader() as node:
        here, there = await node.follower()
        here.link.close()
        assert (await there.end()).orderly
        here, there = await node.follower()
        there.link.close()
        assert (await here.end()).orderly
        with pytest.raises(ChannelClosed, match="said goodbye"):
            here.link.send(Kind.MESSAGE, 1)


async def test_a_listener_that_closes_says_goodbye_on_all_lines():
    """And lets nobody in any longer."""
    async with leader() as node:
        sides = [(await node.follower())[1] for _ in range(3)]
        await node.listener.aclose()
        for there in sides:
            assert (await there.end()).orderly
        with pytest.raises(LeaderNotFound, match="nobody listens"):
            await dial_leader(*node.listener.address, node.key, b"", timeout=1.5)


@pytest.mark.parametrize("how", [signal.SIGKILL, "exit"])
async def test_a_follower_that_dies_is_known_at_once(how):
    """Its connection breaks: no heart-beat is waited for. It may come again, on a new line."""
    async with leader(node_timeout=30.0) as node:
        here, child = await node.process(node_timeout=30.0)
        assert await here.ask("hello") == "hello"
        with Stopwatch() as watch:
            if how == "exit":
                here.link.send(Kind.MESSAGE, 1, "exit")
            else:
                os.kill(child.pid, how)
            end = await here.end()
        assert watch.seconds < 2
        assert not end.orderly
        assert "its connection was closed" in end.reason
        again, _ = await node.process()
        assert await again.ask("hello") == "hello"
        assert not here.link.is_open


async def test_a_follower_that_stands_still_is_lost_in_time():
    """A machine that has stopped answers no heart-beat, and closes no connection."""
    async with leader(node_timeout=1.5) as node:
        here, _ = await node.process()
        with Stopwatch() as watch:
            here.link.send(Kind.MESSAGE, 1, "stop")
            end = await here.end()
        assert watch.wall > 0.75
        assert watch.seconds < 4
        assert "no sign of life for 1.5 s" in end.reason


async def test_a_loop_that_is_blocked_is_no_death():
    """Of either end, for several times the limit: heart-beats do not come from the loop."""
    async with leader(node_timeout=1.5) as node:  # a machine that stands still is silent for two thirds of it at most
        here, _ = await node.process(node_timeout=1.5)
        here.link.send(Kind.MESSAGE, 1, ("block", 4.0))
        time.sleep(3.5)  # noqa: ASYNC251 - the loop is to be blocked
        assert (await here.next()).value == ("block", 4.0)
        assert await here.ask("still there") == "still there"


async def test_a_leader_that_dies_is_known_at_once():
    """The follower is told, and that it was no goodbye; its line does not come back by itself."""
    key = NodeKey.random()
    command = [sys.executable, str(Path(__file__).with_name("curve_peers.py")), "lead", key.secret.hex(), "30"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:  # noqa: ASYNC220
        port = int(await asyncio.to_thread(child.stdout.readline))
        _, link = await dial_leader("127.0.0.1", port, key, b"", timeout=PATIENCE, node_timeout=30)
        there = Side(link)
        assert await there.ask("hello") == "hello"
        with Stopwatch() as watch:
            child.kill()
            end = await there.end()
        assert watch.seconds < 2
        assert not end.orderly
        assert "its connection was closed" in end.reason
        await link.closed()


async def test_closing_does_not_wait_for_a_peer_that_does_not_read():
    """What it has not taken is lost; the end comes in time nevertheless."""
    async with leader() as node:
        here, _ = await node.process()
        here.link.send(Kind.MESSAGE, 1, "stop")
        for _ in range(30):
            here.link.send(Kind.MESSAGE, 2, np.zeros(MIB, np.uint8))
        with Stopwatch() as watch:
            await node.listener.aclose()
        assert watch.seconds < 2


async def test_a_cancelled_dial_leaves_nothing():
    """Nor does one whose hello is never answered: the fixture looks for what is left."""
    key = NodeKey.random()
    with socket.create_server(("127.0.0.1", 0)) as silent, pytest.raises(TimeoutError):
        await asyncio.wait_for(dial_leader(*silent.getsockname(), key, b"", timeout=30), 0.2)


async def test_a_pair_is_two_ends_of_a_line():
    """For channels of one's own."""
    writer, frames = Writer(), asyncio.Queue()
    left, right = await curve_pair()
    one = LoopChannel(left, writer, print, print)
    other = LoopChannel(right, writer, frames.put_nowait, print)
    one.open()
    other.open()
    one.send(Kind.MESSAGE, 1, "x")
    assert (await frames.get()).value == "x"
    with pytest.raises(ValueError, match="descriptors cannot go to another node"):
        one.send(Kind.MESSAGE, 1, "x", fds=(0,))
    one.close()
    other.close()


@pytest.mark.parametrize("error", [LinkRefused("tcp://a:1", "why"), ChannelFull("c", 3, 5 * MIB)])
def test_errors_travel(error):
    """They are the same after pickling, in words too."""
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again)) == (type(error), str(error))


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
async def test_last_words_are_heard_however_soon_the_leader_closes(host):
    """What came before the end of the connection counts: a busy agent would take the close of its executor for a loss."""
    async with leader(host) as up:
        side, follower = await up.follower()
        side.link.send(Kind.EVENT, 0, "last words")
        up.listener.close()
        time.sleep(0.5)  # noqa: ASYNC251 - the loop is held up, and ZMQ's threads are not
        assert (await follower.next()).value == "last words"
        await follower.end()


async def test_somebody_who_accepts_and_says_nothing_is_named_as_that(monkeypatch):
    """Another program has the port: that the leader is not up yet would be the wrong hint."""
    monkeypatch.setattr("aexec.transport.curve.dialer._PATIENCE", 0.2)
    said = []
    with socket.create_server(("127.0.0.1", 0)) as silent, pytest.raises(LeaderNotFound, match="somebody accepts"):
        await dial_leader(*silent.getsockname(), NodeKey.random(), b"", timeout=1.5, told=said.append)
    assert "somebody accepts connections there, and says nothing" in said
