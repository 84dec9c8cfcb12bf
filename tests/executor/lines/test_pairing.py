"""When a launch waits for its sampling, and for how long."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from aexec.executor.lines import pairing as module
from aexec.executor.lines.pairing import Pairing, reorder
from aexec.messages.batch import GrammarOutput, SchedulerOutput
from aexec.messages.step import ExecuteModel, PairedStep, SampleTokens
from aexec.transport import Kind, LoopChannel, Writer, seqpacket_pair
from aexec.transport.inbox import Inbox
from aexec.transport.links import PacketLink

pytestmark = pytest.mark.anyio

USUAL = 16  # steps after which a launch waits


class Line:
    """A line, and the datagrams that came through it."""

    def __init__(self, writer):
        ours, self.theirs = seqpacket_pair()
        self.theirs.setblocking(False)
        self.channel = LoopChannel(ours, writer, lambda frame: None, lambda error: None)
        self.channel.open()

    def messages(self):
        """By datagram, what came in it: each message with its call."""
        inbox, link = Inbox("test", Writer(), self, lambda: None), PacketLink(self.theirs)
        found = []
        while (frame := inbox.take(link)) is not None:
            together = [(frame.call, frame.value)]
            while inbox.rest is not None:
                frame = inbox.take(link)
                together.append((frame.call, frame.value))
            found.append(together)
        return found

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
        self.order = list(self.channels)  # as the group has it: the one to send to last may change
        self.pairing = Pairing(self.writer)
        self.step = 0

    def launch(self, **options):
        self.step += 1
        return self.pairing.launch(self.order, self.step, ExecuteModel(self.step, **options))

    def sample(self, grammar=None, step=None):
        step = step or self.step
        self.pairing.sample(self.order, 100 + step, SampleTokens(step, grammar))

    def messages(self):
        return [line.messages() for line in self.lines]

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


@pytest.mark.parametrize("payload", [None, SchedulerOutput(num_scheduled_tokens={"a": 3})], ids=["none", "scheduler"])
async def test_halves_that_travel_together_are_one_message(steps, payload):
    """It says both calls, and the line counts one frame."""
    steps.make_usual()
    before = [channel.statistics().sent for channel in steps.channels]
    assert steps.launch(payload=payload, num_tokens=3)
    steps.sample()
    both = PairedStep(ExecuteModel(steps.step, payload, 3), 100 + steps.step)
    assert steps.messages() == [[[(steps.step, both)]]] * 2
    assert [channel.statistics().sent for channel in steps.channels] == [sent + 1 for sent in before]


@pytest.mark.parametrize(
    ("payload", "grammar"),
    [
        ({"a": "user's"}, None),
        (SchedulerOutput(num_scheduled_tokens={"a": np.int64(3)}), None),
        (None, GrammarOutput(request_ids=["a"], bitmask=np.zeros((1, 1), np.int32))),
    ],
    ids=["payload of another kind", "pickled payload", "bitmask"],
)
async def test_what_is_more_than_it_looks_stays_two_messages(steps, payload, grammar):
    """Which may be read or not, each for itself; they share a datagram."""
    steps.make_usual()
    assert steps.launch(payload=payload)
    steps.sample(grammar)
    for datagrams in steps.messages():
        ((launch, sampling),) = datagrams
        assert launch == (steps.step, ExecuteModel(steps.step, payload))
        assert (sampling[0], sampling[1].step) == (100 + steps.step, steps.step)
        assert (sampling[1].grammar is None) == (grammar is None)


async def test_a_call_between_the_halves_comes_between_them(steps):
    """On each line, whichever of them it goes down first."""
    steps.make_usual()
    assert steps.launch()
    steps.writer.send(steps.channels[:1], Kind.MESSAGE, 99, "call")
    steps.sample()
    launch, sampling = (steps.step, ExecuteModel(steps.step)), (100 + steps.step, SampleTokens(steps.step))
    first, second = steps.messages()
    assert [message for datagram in first for message in datagram] == [launch, (99, "call"), sampling]
    assert second == [[launch, sampling]]
    assert "no launch waits" in repr(steps.pairing)


async def test_the_sampling_of_an_older_step_takes_the_launch_along(steps):
    """It is not its own: they stay two."""
    steps.make_usual()
    assert steps.launch()
    assert steps.launch()
    steps.arrived()
    steps.sample(step=steps.step - 1)
    launch, sampling = (steps.step, ExecuteModel(steps.step)), (99 + steps.step, SampleTokens(steps.step - 1))
    assert steps.messages() == [[[launch, sampling]]] * 2


async def test_a_line_that_breaks_between_the_halves_takes_nothing_from_the_others(steps):
    """The launch that it held is gone with it."""
    steps.make_usual()
    assert steps.launch()
    steps.channels[0].close()
    steps.sample()
    ours = [message for datagram in steps.lines[1].messages() for message in datagram]
    assert ours == [(steps.step, ExecuteModel(steps.step)), (100 + steps.step, SampleTokens(steps.step))]
    await asyncio.sleep(0)
    assert steps.lines[1].datagrams() == 0


async def test_a_line_whose_peer_takes_over_is_sent_to_last(steps):
    """From the next time on; the lines stay the same."""
    first, second = steps.order
    reorder(steps.order, None)
    assert steps.order == [first, second]
    reorder(steps.order, first)
    assert steps.order == [second, first]
