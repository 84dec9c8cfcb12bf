"""Whoever has no key of the nodes is refused, logged once, and changes nothing for those who have one."""

from __future__ import annotations

import asyncio
import contextlib
import pickle
import resource
import socket
import struct
import sys
import time
from pathlib import Path

import pytest
import structlog
import zmq

sys.path.insert(0, str(Path(__file__).parent))
from curve_nodes import PATIENCE, leader

from aexec.errors import LinkRefused
from aexec.transport import Kind
from aexec.transport.curve import NodeKey, dial_leader, dialer
from aexec.transport.curve.listener import MOST_AT_THE_DOOR
from aexec.transport.frames import pack

pytestmark = pytest.mark.anyio

MANY = 1000


class Traffic:
    """Steps of a generation between a leader and a follower, one after the other, for as long as it runs."""

    def __init__(self, side):
        self.side, self.steps, self.took = side, 0, []
        self.task = asyncio.ensure_future(self.run())

    async def run(self):
        while True:
            began = time.monotonic()
            step = [self.steps, b"x" * 20_000]
            assert await self.side.ask(step) == step
            self.steps += 1
            self.took.append(time.monotonic() - began)
            await asyncio.sleep(0.001)

    async def goes_on(self, steps=20):
        """So many more steps are made, none of which takes long, but for one in which the machine may stand still."""
        wanted, self.took = self.steps + steps, []
        async with asyncio.timeout(PATIENCE):
            while self.steps < wanted:
                await asyncio.sleep(0.005)
                assert not self.task.done(), self.task
        assert sorted(self.took)[-2] < 1.0

    async def stop(self):
        self.task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self.task


@contextlib.asynccontextmanager
async def a_generation(**options):
    """A leader, and traffic with one of its followers, which is a process of its own."""
    with structlog.testing.capture_logs() as logs:
        async with leader(**options) as node:
            side, _ = await node.process()
            traffic = Traffic(side)
            try:
                await traffic.goes_on()
                yield node, traffic, logs
                await traffic.goes_on()
                assert side.link.is_open
                assert node.listener.statistics().links == 1
            finally:
                await traffic.stop()
    warnings = [entry for entry in logs if entry["log_level"] != "debug"]
    assert len(warnings) <= 1, "strangers are logged once"


async def turned_away(node, count):
    """Wait until so many were."""
    async with asyncio.timeout(PATIENCE):
        while node.listener.statistics().turned_away < count:  # noqa: ASYNC110 - nobody is told of it
            await asyncio.sleep(0.01)


def log_of(logs):
    (entry,) = logs
    assert entry["log_level"] == "warning"
    return entry


@contextlib.contextmanager
def many_descriptors():
    """As many as the test needs itself."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 4 * MANY + 1000
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(before[0], min(wanted, before[1])), before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


@contextlib.contextmanager
def dealer(node, **settings):
    """A socket of somebody else's program that knows ZMQ."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as sock:
        sock.linger = 0
        sock.ipv6 = True
        sock.reconnect_ivl = 50  # it is a stubborn one
        for name, value in settings.items():
            setattr(sock, name, value)
        sock.connect("tcp://{}:{}".format(*node.listener.address))
        yield sock


STRANGERS = {
    "no key": lambda node: {},
    "a password": lambda node: {"plain_username": b"root", "plain_password": b"secret"},
    "another leader's key": lambda node: curve(NodeKey.random(), NodeKey.random()),
    "the leader's public key and no follower's": lambda node: curve(node.key, NodeKey.random()),
}


def curve(leaders, followers):
    public, secret = followers.curve_keys("follower")
    return {
        "curve_serverkey": leaders.curve_keys("leader")[0],
        "curve_publickey": public,
        "curve_secretkey": secret,
    }


@pytest.mark.parametrize("who", STRANGERS)
async def test_a_program_that_knows_zmq_and_not_the_key_is_refused(who):
    """It comes again and again, with pickles for whoever takes them; none of its messages is heard (G50)."""
    async with a_generation() as (node, traffic, logs):
        for count in range(1, 4):
            with dealer(node, **STRANGERS[who](node)) as sock:
                for _ in range(10):
                    with contextlib.suppress(zmq.Again):
                        sock.send(pack(Kind.MESSAGE, 1, 1, pickle.dumps(Bomb())), zmq.NOBLOCK)
                await turned_away(node, count)
                await traffic.goes_on()
                assert sock.poll(0) == 0, "it hears nothing"
        assert len(node.hellos) == 1, "nobody has looked at what it says"
    assert log_of(logs)["who"].startswith(("127.0.0.1 port", "one that has gone again"))
    assert log_of(logs)["why"].startswith(
        "it has no key" if "no key" in who or "password" in who else "it has another key"
    )
    assert Bomb.exploded == 0


class Bomb:
    exploded = 0

    def __reduce__(self):
        return exploding, ()


def exploding():
    Bomb.exploded += 1


GARBAGE = {
    "a web browser": b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n" * 20,
    "a pickle": pickle.dumps(Bomb()) * 20,
    "a frame of ours": struct.pack("<Q", 100) + pack(Kind.MESSAGE, 1, 1, pickle.dumps(Bomb())),
    "zeros": bytes(100_000),
    "ones": b"\xff" * 100_000,
    "noise": bytes(range(256)) * 100,
    "a greeting of ZMTP and then noise": b"\xff%b\x7f\x03\x00CURVE%b" % (bytes(8), bytes(47)) + b"abc" * 999,
    "a greeting of ZMTP 1.0": b"\x01\x00" + b"\x05\x00hello" * 100,
}


@pytest.mark.parametrize("what", GARBAGE)
async def test_garbage_is_refused(what):
    """Whatever it is: the connection is closed, and nothing else happens (G50)."""
    async with a_generation(patience=0.5) as (node, traffic, logs):
        loop = asyncio.get_running_loop()
        for count in range(1, 4):
            with socket.socket() as sock:
                sock.setblocking(False)
                await loop.sock_connect(sock, node.listener.address)
                with contextlib.suppress(ConnectionError):
                    await loop.sock_sendall(sock, GARBAGE[what])
                await turned_away(node, count)
                await hung_up_on(sock)
        await traffic.goes_on()
        assert len(node.hellos) == 1
    assert log_of(logs)["why"]
    assert Bomb.exploded == 0


async def hung_up_on(sock):
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(PATIENCE):
        with contextlib.suppress(ConnectionError):
            while await loop.sock_recv(sock, 4096):
                pass


@contextlib.asynccontextmanager
async def a_thousand(node, say=b""):
    """So many connections, as fast as somebody else's process makes them."""
    with contextlib.ExitStack() as stack:
        for _ in range(MANY):
            sock = stack.enter_context(socket.socket())
            sock.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                sock.connect(node.listener.address)
            if say:
                await asyncio.sleep(0)
                with contextlib.suppress(OSError):  # it is not connected: the door is shut
                    sock.send(say)
        yield


def num_descriptors():
    return len(list(Path("/proc/self/fd").iterdir()))


async def test_a_thousand_idle_connections_cost_nothing():
    """The kernel keeps them: not one descriptor of this process is taken, and followers get in beside them."""
    with many_descriptors():
        async with a_generation() as (node, traffic, _):
            before = num_descriptors()
            async with a_thousand(node):
                await traffic.goes_on()
                assert num_descriptors() <= before + MANY + 5
                assert node.listener.statistics().at_the_door == 0
                async with asyncio.timeout(5):
                    side, mine = await node.follower()
                    assert await said(mine, side) == "hello"
                mine.link.close()
                await side.end()
                await traffic.goes_on()


async def said(one, other):
    one.link.send(Kind.MESSAGE, 1, "hello")
    return (await other.next()).value


async def test_a_thousand_connections_that_say_too_little_are_turned_away():
    """A bounded number is let in at a time, each has its limit, and then a follower gets in again."""
    with many_descriptors():
        async with a_generation(patience=0.3) as (node, traffic, logs):
            before, most = num_descriptors(), 0
            async with a_thousand(node, b"\xff"):
                for _ in range(20):
                    most = max(most, num_descriptors() - before - MANY)
                    await asyncio.sleep(0.01)
                await traffic.goes_on()
                await turned_away(node, MOST_AT_THE_DOOR // 2)
            assert most < MANY // 2, "the door is shut while too many stand at it"
            side, mine = await node.follower()
            assert await said(mine, side) == "hello"
            mine.link.close()
            await side.end()
    assert log_of(logs)["why"] == "it said nothing, or too little, in time"


async def test_connections_that_stay_idle_are_turned_away_in_the_end():
    """When the kernel keeps them no longer they have as long as anybody else to prove themselves."""
    async with a_generation(patience=0.3, silent=1) as (node, traffic, logs):
        with contextlib.ExitStack() as stack:
            for _ in range(20):
                stack.enter_context(socket.create_connection(node.listener.address))
            await turned_away(node, 20)
            await traffic.goes_on()
    assert "in time" in log_of(logs)["why"]


async def test_strangers_in_between_are_only_counted():
    """Nodes with another key and from other addresses: refused each time, logged once."""
    async with a_generation(allow=["127.0.0.1"]) as (node, traffic, logs):
        for key, source in ((node.key, "127.0.0.9"), (NodeKey.random(), "127.0.0.1"), (node.key, "127.0.0.8")):
            with pytest.raises(LinkRefused):
                await dial_leader(*node.listener.address, key, b"", timeout=PATIENCE, source=source)
        await turned_away(node, 5)
        await traffic.goes_on()
    entry = log_of(logs)
    assert (entry["who"].split()[0], entry["why"]) == ("127.0.0.9", "its address is not allowed")


async def test_a_follower_that_looks_why_nobody_is_there_is_no_stranger():
    """A leader that comes up just then takes its connection for nobody's: it is not told of it."""
    async with leader() as up:
        place = dialer._Place(socket.AF_INET, up.listener.address, None)
        assert await dialer._why_absent(place) == ""
        side, follower = await up.follower()
        side.link.send(Kind.EVENT, 0, "what came before has been told by now")
        await follower.next()
        async with asyncio.timeout(PATIENCE):
            while up.listener.statistics().at_the_door:  # noqa: ASYNC110 - nobody is told of it
                await asyncio.sleep(0.005)
        assert up.listener.statistics().turned_away == 0
