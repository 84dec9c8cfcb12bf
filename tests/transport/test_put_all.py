"""In which order a writer sends to several channels."""

from __future__ import annotations

import pytest

from aexec.transport import Kind, Writer
from aexec.transport import writer as module


class Clock:
    """Stands still but for what channels take."""

    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


class Channel:
    """One that is free, and takes its time for a frame."""

    is_free = is_open = shares_memory = True
    copies_off_loop = False

    def __init__(self, clock, seconds):
        self.clock, self.seconds, self.frames = clock, seconds, []

    def put(self, kind, frame):
        self.frames.append((kind, frame))
        self.clock.now += self.seconds


AT_ONCE, TAKEN_OVER = 4e-6, 40e-6


@pytest.mark.parametrize(
    ("takes", "eager"),
    [
        ([AT_ONCE, AT_ONCE, AT_ONCE], None),
        ([TAKEN_OVER, AT_ONCE, AT_ONCE], 0),
        ([AT_ONCE, TAKEN_OVER, AT_ONCE], 1),
        ([AT_ONCE, AT_ONCE, TAKEN_OVER], None),
        ([TAKEN_OVER], None),
        ([], None),
    ],
)
def test_a_channel_whose_peer_takes_over_is_named_unless_it_is_the_last(monkeypatch, takes, eager):
    """All are sent the same frame, in order; whoever sends may put that one behind the others."""
    clock = Clock()
    monkeypatch.setattr(module, "perf_counter", clock)
    writer = Writer()
    channels = [Channel(clock, seconds) for seconds in takes]
    named = writer.send(channels, Kind.MESSAGE, 7, "value")
    assert named is (None if eager is None else channels[eager])
    assert [len(channel.frames) for channel in channels] == [1] * len(channels)
    assert len({channel.frames[0] for channel in channels}) == bool(channels)
    writer.close()
