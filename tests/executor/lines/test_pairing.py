"""When a launch waits for its sampling, and for how long."""

from __future__ import annotations

import asyncio

import pytest

from aexec.executor.lines import pairing as module
from aexec.executor.lines.pairing import Pairing
from aexec.messages.step import ExecuteModel, SampleTokens
from aexec.transport import Kind, LoopChannel, Writer, seqpacket_pair

pytestmark = pytest.mark.anyio

USUAL = 16  # steps after which a launch waits


class Line:
    """A line, and the datagrams that came through it."""

    def __init__(self, writer):
        ours, self.theirs = seqpacket_pair()
        self.theirs.setblocking(False)
        self.channel = LoopChannel(ours, writer, lambda frame: None, lambda error: None)
        self.channel.open()

    def datagrams(self):
        found = 0
        while True:
            try:
                self.theirs.recv(1 << 16)
            except BlockingIOError:
                return found
            found += 1


class Steps:
    """A driver, and two lines."""

    def __init__(self):
        self.writer = Writer()
        self.lines = [Line(self.writer), Line(self.writer)]
        self.channels = [line.channel for line in self.lines]
        self.pairing = Pairing(self.writer)
        self.step = 0

    def launch(self, **options):
        self.step += 1
        return self.pairing.launch(self.channels, self.step, ExecuteModel(self.step, **options))

    def sample(self):
        self.pairing.sample(self.channels, self.step, SampleTokens(self.step))

    def arrived(self):
        return [line.datagrams() for line in self.lines]

    def make_usual(self):
        for _ in range(USUAL):
            self.launch()
            self.sample()
        self.arrived()


@pytest.fixture
async def steps(monkeypatch):
    monkeypatch.setattr(module, "_PROMPT", 10.0)  # whatever else this machine does
    steps = Steps()
    yield steps
    for line in steps.lines:
        line.channel.close()
        line.theirs.close()
    steps.writer.close()


async def test_a_launch_goes_at_once_until_it_is_known_better(steps):
    """Nobody knows yet what the driver does next."""
    for _ in range(USUAL):
        assert not steps.launch()
        assert steps.arrived() == [1, 1]
        steps.sample()
        assert steps.arrived() == [1, 1]


async def test_halves_that_usually_come_together_travel_together(steps):
    """As one datagram on each line."""
    steps.make_usual()
    assert steps.launch()
    assert steps.arrived() == [0, 0]
    assert "a launch waits" in repr(steps.pairing)
    steps.sample()
    assert steps.arrived() == [1, 1]
    assert "no launch waits" in repr(steps.pairing)


async def test_a_launch_waits_no_longer_than_its_turn(steps):
    """And the next one does not wait at all."""
    steps.make_usual()
    assert steps.launch()
    await asyncio.sleep(0)
    assert steps.arrived() == [1, 1]
    steps.sample()
    assert steps.arrived() == [1, 1]
    assert not steps.launch()


async def test_a_driver_that_works_between_the_halves_is_not_kept_waiting(steps, monkeypatch):
    """Its forward pass is to begin at once."""
    steps.make_usual()
    monkeypatch.setattr(module, "_PROMPT", 0.0)
    steps.launch()
    steps.sample()
    assert not steps.launch()


async def test_a_step_without_tokens_has_nothing_to_wait_for(steps):
    """No sampling follows."""
    steps.make_usual()
    assert not steps.launch(num_tokens=0)
    assert steps.arrived() == [1, 1]


async def test_whatever_else_goes_down_a_line_takes_the_launch_along(steps):
    """Order is kept, and nothing is sent twice."""
    steps.make_usual()
    assert steps.launch()
    steps.channels[0].send(Kind.MESSAGE, 99, "other")
    assert steps.lines[0].datagrams() == 2
    assert steps.lines[1].datagrams() == 0
    steps.writer.send([steps.channels[1]], Kind.MESSAGE, 99, "other")
    assert steps.lines[1].datagrams() == 1
    await asyncio.sleep(0)
    assert steps.arrived() == [0, 0]


async def test_two_launches_in_one_turn_keep_their_order(steps):
    """The first one goes before the second one waits."""
    steps.make_usual()
    assert steps.launch()
    assert steps.launch()
    assert steps.arrived() == [1, 1]
    steps.sample()
    assert steps.arrived() == [1, 1]
