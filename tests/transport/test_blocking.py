from __future__ import annotations

import fcntl
import gc
import itertools
import resource
import socket
import threading
import time

import numpy as np
import pytest
from stopwatch import Stopwatch

from aexec.errors import ChannelClosed
from aexec.transport import BlockingChannel, Kind, Writer, affordable_spin, seqpacket_pair, stream_pair
from aexec.transport.codec import NONE
from aexec.transport.frames import join, pack
from aexec.transport.spin import SpinPolicy
from aexec.transport.tcp import tcp_pair


@pytest.fixture(params=[seqpacket_pair, stream_pair, tcp_pair])
def channels(request):
    left, right = request.param()
    writers = Writer(), Writer()
    channels = BlockingChannel(left, writers[0], name="left"), BlockingChannel(right, writers[1], name="right")
    yield channels
    for channel in channels:
        channel.close()
        channel.close()
    for writer in writers:
        writer.close()


def test_a_wait_has_a_limit(channels):
    """It ends without a frame, and not before its time."""
    left, _ = channels
    began = time.monotonic()
    assert left.receive(0.05) is None
    assert time.monotonic() - began >= 0.045
    assert left.receive(0) is None


@pytest.mark.parametrize("spin", [0.0, 0.0005])
def test_frames_that_came_together_are_received_one_by_one(channels, spin):
    """In order, and without a wait; the line says that there are more."""
    left, right = channels
    left._spin = SpinPolicy(spin)
    frames = [pack(Kind.MESSAGE, call, NONE) for call in (1, 2, 3)]
    right.put(Kind.MESSAGE, join(frames[0], join(frames[1], frames[2])))
    assert left.receive(10).call == 1
    assert left.has_more
    assert [left.receive(0).call for _ in range(2)] == [2, 3]
    assert not left.has_more
    assert left.receive(0) is None


@pytest.mark.parametrize("spin", [0.0, 0.0005])
def test_a_wait_can_be_ended_from_another_thread(channels, spin):
    """Once per wake, also when it comes before the wait; frames are not lost by it."""
    left, right = channels
    left._spin = SpinPolicy(spin)
    left.wake()
    assert left.receive(10) is None
    alarm = threading.Timer(0.05, left.wake)
    alarm.start()
    assert left.receive(10) is None
    alarm.join()
    right.send(Kind.MESSAGE, 1, "x")
    assert left.receive(10).value == "x"
    assert left.receive(0.01) is None


def test_a_busy_reader_can_be_woken_too(channels):
    """Just after a frame it sleeps in the system call that receives, and looks up now and then."""
    left, right = channels
    right.send(Kind.MESSAGE, 1, "x")
    assert left.receive().value == "x"
    alarm = threading.Timer(0.005, left.wake)
    with Stopwatch() as watch:
        alarm.start()
        assert left.receive() is None
    assert watch.seconds < 1
    alarm.join()
    right.send(Kind.MESSAGE, 1, "y")
    assert left.receive().value == "y"
    left.wake()
    assert left.receive() is None


@pytest.mark.parametrize("channels", [seqpacket_pair], indirect=True)
def test_a_busy_reader_tells_of_views_that_another_thread_drops(channels):
    """The sender does not wait for the next message."""
    left, right = channels
    left.send(Kind.MESSAGE, 1, np.zeros(100_000))
    held = [right.receive().value]
    reader = threading.Thread(target=right.receive)
    reader.start()
    held.clear()
    gc.collect()
    end = time.monotonic() + 5
    while left._writer.statistics().leases and time.monotonic() < end:
        left.receive(0.01)
    assert not left._writer.statistics().leases
    right.wake()
    reader.join(5)
    assert not reader.is_alive()


@pytest.mark.parametrize("channels", [seqpacket_pair], indirect=True)
def test_a_dropped_view_is_told_while_its_reader_waits(channels):
    """Another thread of the reader had it: the sender does not wait for the next message."""
    left, right = channels
    left.send(Kind.MESSAGE, 1, np.zeros(100_000))
    kept = [right.receive(10)]
    dropper = threading.Timer(0.05, kept.clear)
    dropper.start()
    assert right.receive(0.3) is None
    dropper.join()
    gc.collect()
    assert left.receive(0.01) is None
    assert left._writer.statistics().leases == 0


def test_the_peers_end_is_told_after_its_last_frame(channels):
    """Every time that one asks, in words."""
    left, right = channels
    left.send(Kind.MESSAGE, 1, "last")
    left.close()
    assert right.receive(10).value == "last"
    for _ in range(2):
        with pytest.raises(ChannelClosed, match="channel right is closed: the peer said goodbye") as caught:
            right.receive(10)
        assert caught.value.orderly
    with pytest.raises(ChannelClosed):
        right.send(Kind.REPLY, 1)
    assert repr(right) == "<BlockingChannel right: the peer said goodbye, 2 received>"


def test_two_threads_share_a_writer_and_a_channel(channels):
    """As a worker's two threads do: nothing is mixed up, and all memory comes back."""
    left, right = channels
    seen = []

    def receive():
        for _ in range(400):
            frame = right.receive(30)
            seen.append((frame.call, frame.value.shape, set(frame.value[[0, -1]].tolist())))
            del frame

    def send(first):
        for call in range(first, first + 200):
            left.send(Kind.REPLY, call, np.full(17_000 + 50 * call, call, np.int64))
            if call % 20 == 0:
                left.receive(0) if first == 0 else None

    threads = [threading.Thread(target=receive), *(threading.Thread(target=send, args=(first,)) for first in (0, 200))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(seen) == [(call, (17_000 + 50 * call,), {call}) for call in range(400)]
    assert [call for call, _, _ in seen if call < 200] == list(range(200))
    gc.collect()
    right.receive(0)
    left.receive(0.01)
    assert left._writer.statistics().leases == 0


def test_sending_waits_for_a_reader(channels):
    """Nothing is lost when the line is full."""
    left, right = channels
    sender = threading.Thread(target=lambda: [left.send(Kind.EVENT, call, b"x" * 10_000) for call in range(1000)])
    sender.start()
    assert [right.receive(30).call for _ in range(1000)] == list(range(1000))
    sender.join()


def test_a_thread_spins_only_when_it_pays():
    """While waits are short: never after a long wait, never without a budget."""
    spin = SpinPolicy(0.001)
    assert spin.budget() == 0.0
    for _ in range(30):
        spin.waited(0.0001)
    assert spin.budget() == 0.001
    spin.waited(3600.0)
    assert spin.budget() == 0.0
    none = SpinPolicy(0.0)
    none.waited(0.0)
    assert none.budget() == 0.0
    assert repr(spin).startswith("<SpinPolicy: 1000 us")


def test_nobody_polls_on_a_single_cpu():
    """There he would keep the others from what he waits for."""
    assert (affordable_spin(0.001, 1), affordable_spin(0.001, 2)) == (0.0, 0.001)


@pytest.mark.parametrize("channels", [seqpacket_pair], indirect=True)
def test_a_wait_polls_once(channels, monkeypatch):
    """However many frames come in it that are about memory, and none that is to be received."""
    left, right = channels
    left.send(Kind.MESSAGE, 1, np.zeros(100_000))
    assert right.receive(10).call == 1
    gc.collect()
    assert right.receive(0) is None  # the memory is given back by a frame of its own
    asked = []
    monkeypatch.setattr(left._spin, "budget", lambda: asked.append(left._inbox.received) or 0.0)
    assert left.receive(0.01) is None
    assert (asked, left._inbox.received) == ([0], 1)


@pytest.mark.parametrize("limit", [0, 0.02])
def test_nobody_polls_past_the_limit_of_his_wait(channels, limit):
    """However long polling seems worth it: who asks for what is there gets it at once."""
    left, right = channels
    left._spin = SpinPolicy(3.0)
    for _ in range(30):
        left._spin.waited(0.0001)
    began = time.monotonic()
    assert left.receive(limit) is None
    assert time.monotonic() - began < 2
    right.send(Kind.MESSAGE, 7, "x")
    assert left.receive(10).call == 7


def test_a_wait_that_ends_without_a_frame_is_a_wait_too(channels):
    """A thread that is only ever woken, or whose time is up, does not poll for ever because of a few quick frames once."""
    left, _ = channels
    left._spin = SpinPolicy(0.0005)
    for _ in range(30):
        left._spin.waited(0.0001)
    for _ in range(20):
        assert left.receive(0.002) is None
    assert left._spin.budget() == 0.0


class Crowd:
    """A clock, on which whoever gives way is let in again after ``turn`` seconds."""

    def __init__(self):
        self.now, self.turn = 100.0, 0.0

    def perf_counter(self):
        return self.now

    def sched_yield(self):
        self.now += self.turn

    def waits_after(self, spin, turn):
        """Give way for so long; how many waits there are then until one polls again."""
        self.turn = turn
        assert spin.give_way(self.now) == self.now
        return next(waits for waits in itertools.count() if spin.budget())


@pytest.fixture
def crowd(monkeypatch):
    """Others who want the CPU."""
    crowd = Crowd()
    monkeypatch.setattr("aexec.transport.spin.os", crowd)
    monkeypatch.setattr("aexec.transport.spin.time", crowd)
    return crowd


@pytest.fixture
def quick():
    """A policy of a millisecond, whose waits were short lately."""
    spin = SpinPolicy(0.001)
    for _ in range(30):
        spin.waited(0.0001)
    return spin


def test_nobody_polls_where_somebody_else_computes(quick, crowd):
    """Who gives way there gets the CPU back after a slice of the scheduler's: each time, it is tried half as often."""
    assert crowd.waits_after(quick, 0.004) == 0  # a small step of our own processes
    assert [crowd.waits_after(quick, 0.006) for _ in range(10)] == [16 << min(n, 8) for n in range(10)]


def test_a_crowd_is_forgotten_where_polling_goes_well(quick, crowd):
    """One wait at a time; one that did not poll tells nothing."""
    assert [crowd.waits_after(quick, 0.006) for _ in range(3)] == [16, 32, 64]
    quick.waited(0.002)  # too long to be caught by polling
    for _ in range(100):
        quick.waited(0.0001)
    quick.give_way(crowd.now - 1.0)
    assert "does not poll for 28 waits" in repr(quick)
    for _ in range(50):
        quick.waited(0.0001)
    assert crowd.waits_after(quick, 0.0) == 28
    assert crowd.waits_after(quick, 0.006) == 56


@pytest.fixture
def many_files():
    """More descriptors than ``select`` can count."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(limits[0], 2048), limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)


@pytest.mark.usefixtures("many_files")
@pytest.mark.parametrize("make_pair", [seqpacket_pair, stream_pair])
def test_a_full_line_is_waited_for_whatever_its_descriptor(make_pair):
    """A process with more than 1024 open files sends as any other."""
    left, right = make_pair()
    high = fcntl.fcntl(left, fcntl.F_DUPFD_CLOEXEC, 1100)
    left.close()
    sender = BlockingChannel(socket.socket(fileno=high), Writer(), name="sender")
    receiver = BlockingChannel(right, Writer(), name="receiver")
    text = "x" * 10_000

    def send_all():
        for call in range(1, 401):
            sender.send(Kind.MESSAGE, call, text)

    sending = threading.Thread(target=send_all)
    sending.start()
    sending.join(0.1)
    assert sending.is_alive()  # the line is full
    assert [receiver.receive(10).call for _ in range(400)] == list(range(1, 401))
    sending.join()
    sender.close()
    receiver.close()
