"""Two nodes, and one of their processes ends, stops, or is heard of no longer: a named error, and nothing left.

G18, G48; see ``tests/plugins/nodes.py`` for what the nodes are.
"""

from __future__ import annotations

import os
import signal
import time

import pytest
from nodes import nodes as nodes
from stopwatch import Stopwatch

from aexec.testing.processes import descendants

pytestmark = [pytest.mark.timeout(90), pytest.mark.usefixtures("no_files_are_left")]

SOON = 3.0  # seconds within which a caller has its error, whatever has happened
TIMEOUT = 2.0  # seconds of silence, as these tests set it, so that all of it fits into that

BUSY = """
async def main():
    async with make(node_timeout=2.0) as executor:
        call = asyncio.ensure_future(executor.collective_rpc("native_sleep", (60.0,)))
        while "native_sleep" not in str([info.phase for info in executor.ranks]):
            await asyncio.sleep(0.01)
        say(pids=[info.pid for info in executor.ranks])
        (error,) = await asyncio.gather(call, return_exceptions=True)
        say(**facts_of(error), rank=error.rank, signal=error.signal)
    say(closed=True)

asyncio.run(main())
"""
QUIET = """
async def main():
    async with make(node_timeout=2.0) as executor:
        say(pids=[info.pid for info in executor.ranks])
        while True:
            await asyncio.sleep(60)

asyncio.run(main())
"""


@pytest.fixture
def two(nodes):
    """Both nodes in a call of a minute: the leader, the follower, and the ranks' pids."""
    leader, follower = nodes.lead(BUSY), nodes.follow(node_timeout=TIMEOUT)
    return leader, follower, leader.hear()["pids"]


def test_an_agent_that_is_killed(two):
    """The caller has a named error within three seconds, and nothing is left of either node."""
    leader, follower, _ = two
    with leader.watch() as near, follower.watch() as far:
        follower.kill()
        began = time.monotonic()
        error = leader.hear()
        assert error["error"] == "WorkerDied"
        assert error["rank"] in {2, 3}
        assert "node 1" in error["text"]
        assert error["at"] - began < SOON
        assert far.alive(2.0) == []
        assert leader.hear() == {"closed": True}
        assert leader.finish() == 0
        assert near.alive(2.0) == []


def test_a_worker_of_another_node_that_is_killed(two):
    """The error names the rank, its node and the signal; the agent goes with the executor, which has failed."""
    leader, follower, pids = two
    with leader.watch() as near, follower.watch() as far:
        with Stopwatch() as stopwatch:
            os.kill(pids[3], signal.SIGKILL)
            error = leader.hear()
        assert (error["error"], error["rank"], error["signal"]) == ("WorkerDied", 3, "SIGKILL")
        assert "node 1" in error["text"]
        assert stopwatch.seconds < 1.0
        assert leader.hear() == {"closed": True}
        assert (leader.finish(), follower.finish()) == (0, 1)
        assert "rank 3" in follower.shows("has given up")
        assert near.alive(2.0) == far.alive(2.0) == []


def test_a_leader_that_is_killed(two):
    """G48: the follower knows it at once, ends its workers in native code too, and itself with a code that is not 0."""
    leader, follower, _ = two
    with leader.watch() as near, follower.watch() as far:
        leader.kill()
        began = time.monotonic()
        assert far.alive(SOON) == near.alive(SOON) == []
        assert time.monotonic() - began < SOON
        assert follower.finish() == 1
    assert "the leader at" in follower.shows("is gone")


def test_a_leader_that_is_killed_in_its_start(nodes):
    """G48: the follower's workers are not up yet, and hang in their constructor: they end all the same."""
    leader = nodes.lead("""
async def main():
    await make(worker_kwargs={"hang_in": "__init__", "seconds": 60.0})

asyncio.run(main())
""")
    follower = nodes.follow(node_timeout=TIMEOUT)
    follower.shows("starting ranks 2 to 3")
    while len(descendants(follower.pid)) < 3:
        time.sleep(0.01)
    with leader.watch() as near, follower.watch() as far:
        leader.kill()
        assert far.alive(SOON) == near.alive(SOON) == []
        assert follower.finish() == 1


def test_an_agent_that_is_stopped(two):
    """It is as good as dead once it was silent for ``node_timeout``; when it goes on, it ends."""
    leader, follower, _ = two
    with leader.watch() as near, follower.watch() as far:
        with Stopwatch() as stopwatch:
            follower.kill(signal.SIGSTOP)
            error = leader.hear()
        assert error["error"] == "WorkerDied"
        assert "node 1" in error["text"]
        assert stopwatch.wall > TIMEOUT - 1.0
        assert stopwatch.seconds < SOON
        assert leader.hear() == {"closed": True}
        assert near.alive(5.0) == []
        follower.kill(signal.SIGCONT)
        assert far.alive(SOON) == []
        assert follower.finish() == 1


def test_a_leader_that_is_stopped(nodes):
    """It is lost for the follower, which ends; the leader hears of that when it goes on."""
    leader, follower = nodes.lead(BUSY), nodes.follow(node_timeout=TIMEOUT)
    leader.hear()
    with follower.watch() as far:
        leader.kill(signal.SIGSTOP)
        began = time.monotonic()
        assert far.alive(TIMEOUT + 3.0) == []
        assert time.monotonic() - began > TIMEOUT - 1.0
        assert follower.finish() == 1
    leader.kill(signal.SIGCONT)
    assert leader.hear()["error"] == "WorkerDied"
    assert leader.hear() == {"closed": True}


def test_a_line_that_is_cut(nodes):
    """Nobody is told, and both nodes know it within three seconds; nothing is left on either."""
    leader = nodes.lead(BUSY)
    follower = nodes.follow(node_timeout=TIMEOUT, **nodes.way_to_be_cut())
    leader.hear()
    with leader.watch() as near, follower.watch() as far:
        nodes.cut()
        with Stopwatch() as stopwatch:
            error = leader.hear()
        assert error["error"] == "WorkerDied"
        assert "node 1" in error["text"]
        assert stopwatch.seconds < SOON
        assert far.alive(SOON) == []
        assert follower.finish() == 1
        assert leader.hear() == {"closed": True}
        assert leader.finish() == 0
        assert near.alive(2.0) == []


@pytest.mark.parametrize(("number", "word", "code"), [(signal.SIGINT, "Ctrl-C", 130), (signal.SIGTERM, "SIGTERM", 143)])
def test_an_agent_that_is_told_to_end(two, number, word, code):
    """G19: it says so to the leader before it ends its workers: the error there has the reason, at once."""
    leader, follower, _ = two
    with follower.watch() as far:
        with Stopwatch() as stopwatch:
            follower.kill(number)
            error = leader.hear()
        assert error["error"] == "WorkerDied"
        assert word in error["text"]
        assert stopwatch.seconds < 1.0
        assert far.alive(8.0) == []
        assert follower.finish() == code
    assert leader.hear() == {"closed": True}


def test_a_second_interrupt_of_an_agent_is_now(two):
    """G19: whoever will not wait for workers in native code need not."""
    _, follower, _ = two
    with follower.watch() as far:
        follower.kill(signal.SIGINT)
        follower.shows("once more")
        follower.kill(signal.SIGINT)
        assert far.alive(1.5) == []
        assert follower.finish() == -signal.SIGINT


def test_restarted_followers_join_a_restarted_head(nodes):
    """G48: the head's tree of processes goes as a whole; its followers end, and are of use again with the next head."""
    first, follower = nodes.lead(QUIET), nodes.follow(node_timeout=TIMEOUT)
    first.hear()
    with first.watch() as near, follower.watch() as far:
        first.kill_all()
        assert near.alive(2.0) == []
        assert far.alive(SOON) == []
        assert follower.finish() == 1
    again = nodes.follow()
    again.shows("waiting for the leader")
    second = nodes.lead("""
async def main():
    async with make() as executor:
        say(said=await executor.collective_rpc("pid") == [info.pid for info in executor.ranks])

asyncio.run(main())
""")
    assert second.hear() == {"said": True}
    assert (second.finish(), again.finish()) == (0, 0)
