from __future__ import annotations

import asyncio
from types import SimpleNamespace

import anyio
import pytest

from aexec.transport import BlockingChannel, HotWindow, Kind, LoopChannel, Writer, seqpacket_pair
from aexec.transport.spin import SpinPolicy

pytestmark = pytest.mark.anyio


@pytest.fixture
def hot():
    """A window that is in use: answers came quickly lately."""
    hot = HotWindow(5.0)
    for _ in range(30):
        hot._policy.waited(0.001)
    return hot


class Heard(list):
    """What happened, in order."""

    def __init__(self):
        super().__init__()
        self.enough = asyncio.Event()

    def append(self, each):
        super().append(each)
        if len(self) == 5:
            asyncio.get_running_loop().call_later(0.01, self.enough.set)  # more would follow at once


@pytest.fixture
async def lines(hot):
    """Two lines that share the window, what the driver hears on them, and their other ends."""
    writer, heard, ours, theirs = Writer(), Heard(), [], []
    for rank in range(2):
        here, there = seqpacket_pair()
        ours.append(LoopChannel(here, writer, lambda frame: heard.append(frame.value), heard.append, hot=hot))
        theirs.append(BlockingChannel(there, writer, name=f"rank {rank}"))
        ours[-1].open()
    yield ours, theirs, heard
    for end in [*ours, *theirs]:
        end.close()
    writer.close()


async def test_the_cpu_is_given_away_when_all_is_sent_and_until_the_answers_are_there(lines, monkeypatch):
    """Never within a send, where the next rank's message would wait; nor once more when there is something to hear."""
    ours, theirs, heard = lines

    def give_way(_, now):
        heard.append("gave way")
        if len(heard) == 3:
            for rank in theirs:
                rank.send(Kind.REPLY, 1, rank.receive(5).value)
        return now

    monkeypatch.setattr(SpinPolicy, "give_way", give_way)
    for rank, line in enumerate(ours):
        line.send(Kind.MESSAGE, 1, rank)
    assert heard == []
    with anyio.fail_after(5):
        await heard.enough.wait()
    assert heard == ["gave way", "gave way", "gave way", 0, 1]


@pytest.fixture
def clock(monkeypatch):
    """The time of a window that takes no turns: a list of one number."""
    now = [100.0]
    monkeypatch.setattr("aexec.transport.hot.time", SimpleNamespace(perf_counter=lambda: now[0]))
    monkeypatch.setattr(HotWindow, "_again", lambda _: None)
    return now


def test_all_that_is_asked_together_is_one_wait(hot, clock):
    """A pause of 16 waits is 16 waits of the driver, however many ranks it asks in each."""
    hot._policy.give_way(-1e9)
    assert "does not poll for 16 waits" in repr(hot)
    for left in range(15, 0, -1):
        for _rank in range(8):
            hot.asked()
        for _rank in range(8):
            hot.answered()
        assert f"does not poll for {left} waits" in repr(hot)


def test_an_answer_that_does_not_come_keeps_no_loop_awake(hot, clock):
    """A call may take an hour: what is asked meanwhile tells how soon answers come, and what does not come counts too."""
    for _ in range(20):
        hot.asked()
        hot.asked()
        clock[0] += 0.001
        hot.answered()
        clock[0] += 60.0
    assert hot._policy.budget() == 0.0
    for _ in range(40):
        hot.asked()
        clock[0] += 0.001
        hot.answered()
        clock[0] += 60.0
    assert hot._policy.budget() == 5.0
