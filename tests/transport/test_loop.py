from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import structlog

from aexec.errors import ArenaFull, ChannelClosed
from aexec.transport import BlockingChannel, HotWindow, Kind, LoopChannel, Writer, seqpacket_pair, stream_pair
from aexec.transport.frames import pack

pytestmark = pytest.mark.anyio

MIB = 1 << 20


class Peer:
    """A process that answers, and this end of the channel to it."""

    def __init__(self, writer, pair=seqpacket_pair, *, name="rank 0 work", spin=0.0, hot=None):
        ours, theirs = pair()
        script = Path(__file__).with_name("peers.py")
        command = [sys.executable, str(script), str(theirs.fileno()), str(spin)]
        self.process = subprocess.Popen(command, pass_fds=[theirs.fileno()])
        theirs.close()
        self.gone = asyncio.get_running_loop().create_future()
        self.answers = {}
        self.channel = LoopChannel(ours, writer, self.on_frame, self.gone.set_result, name=name, hot=hot)
        self.channel.open()
        self.calls = 0

    def on_frame(self, frame):
        self.answers.pop(frame.call).set_result(frame)

    def expect(self, call):
        self.answers[call] = asyncio.get_running_loop().create_future()
        return self.answers[call]

    async def ask(self, word, content=None):
        self.calls += 1
        answer = self.expect(self.calls)
        self.channel.send(Kind.MESSAGE, self.calls, (word, content))
        return await asyncio.wait_for(answer, 30)

    async def close(self):
        self.channel.close()
        await asyncio.to_thread(self.process.wait, 30)


@pytest.fixture
async def make_peer():
    writer = Writer(64 * MIB, setting="limit")
    peers = []

    def make(**options):
        peers.append(Peer(writer, **options))
        return peers[-1]

    yield make
    for peer in peers:
        peer.answers.clear()
        await peer.close()
    writer.close()


def open_descriptors():
    return len(list(Path("/proc/self/fd").iterdir()))


async def comes_true(fact):
    """A fact of another process: it is asked for until it holds."""
    async with asyncio.timeout(20):
        while not fact():  # noqa: ASYNC110 - nothing here is told of it
            await asyncio.sleep(0.002)


async def test_views_that_another_process_keeps_hold_their_memory_and_no_other(make_peer):
    """Until it drops them; the books are the owner's, and name who has what."""
    peer = make_peer()
    await peer.ask("keep", np.ones(MIB, np.uint8))
    await peer.ask("sum", np.ones(MIB, np.uint8))
    writer = peer.channel._writer
    await comes_true(lambda: writer.statistics().leases == 1)
    (held,) = writer.held()
    assert (held.what, held.holders) == ("tuple", ("rank 0 work",))
    assert held.nbytes >= MIB
    assert writer.held(longer_than=1000.0) == []
    await peer.ask("drop")
    await comes_true(lambda: writer.statistics().leases == 0)
    assert repr(writer) == "<Writer: 0 messages in use, 0 of 67108864 bytes>"


async def test_a_reader_that_is_killed_frees_what_it_held(make_peer):
    """At once, without a word from it; the others go on."""
    dead, alive = make_peer(name="dead"), make_peer(name="alive")
    writer = dead.channel._writer
    for peer in (dead, alive):
        peer.expect(1)
        peer.calls = 1
    answers = [peer.answers[1] for peer in (dead, alive)]
    writer.send([dead.channel, alive.channel], Kind.MESSAGE, 1, ("keep", np.ones(MIB, np.uint8)))
    await asyncio.gather(*answers)
    assert writer.held()[0].holders == ("alive", "dead")
    dead.process.kill()
    error = await asyncio.wait_for(dead.gone, 10)
    assert not error.orderly
    assert str(error).startswith("channel dead is closed: the peer is gone")
    assert writer.held()[0].holders == ("alive",)
    await alive.ask("drop")
    await comes_true(lambda: writer.statistics().leases == 0)
    writer.send([dead.channel, alive.channel], Kind.MESSAGE, 2, ("drop", None))
    alive.calls = 2
    await asyncio.wait_for(alive.expect(2), 10)


async def test_a_large_answer_travels_in_the_workers_own_memory(make_peer):
    """Which is given back to it, so that a thousand times the limit goes through."""
    peer = make_peer()
    for _ in range(150):
        frame = await peer.ask("make", 10 * MIB)
        assert (frame.value[0], len(frame.value)) == (5, 10 * MIB)
        del frame
    await comes_true(lambda: peer.channel.statistics().leases == 0)


async def test_an_answer_that_cannot_be_encoded_is_an_error_of_that_call(make_peer):
    """G51: the worker returns a lock; then it is asked again, and answers."""
    peer = make_peer()
    frame = await peer.ask("lock")
    assert frame.kind is Kind.FAILURE
    assert "a lock" in frame.value
    assert (await peer.ask("echo", "ping")).value == "ping"


@pytest.mark.parametrize("pair", [seqpacket_pair, stream_pair])
async def test_any_size_up_to_the_limit_works(make_peer, pair):
    """G15: from a byte to the limit and back; above it, that call alone fails, and names the setting."""
    peer = make_peer(pair=pair)
    for size in (1, 1000, 16_384, 16_385, 65_536, MIB, 20 * MIB, 60 * MIB, 3 * MIB):
        data = np.arange(size, dtype=np.uint8)
        frame = await peer.ask("echo", data)
        assert np.array_equal(frame.value, data)
        del frame
        gc.collect()
        await comes_true(lambda: peer.channel._writer.statistics().leases == 0)
    with pytest.raises(ArenaFull, match=r"\(limit\)"):
        await peer.ask("echo", np.zeros(65 * MIB, np.uint8))
    assert (await peer.ask("echo", "still here")).value == "still here"


async def test_a_system_without_memory_files_says_so_and_small_messages_go_on():
    """G16: what does not fit is an error of that call."""

    def refuse(size):
        raise OSError("this system has no memory files")

    left, right = seqpacket_pair()
    writer, got = Writer(allocate=refuse), []
    sender = LoopChannel(left, writer, print, print)
    receiver = LoopChannel(right, writer, got.append, print)
    for channel in (sender, receiver):
        channel.open()
    with pytest.raises(ArenaFull, match="this system has no memory files"):
        sender.send(Kind.MESSAGE, 1, np.zeros(100_000))
    sender.send(Kind.MESSAGE, 2, "small")
    await comes_true(lambda: got)
    assert got[0].value == "small"
    for channel in (sender, receiver):
        channel.close()


@pytest.mark.parametrize("pair", [seqpacket_pair, stream_pair])
@pytest.mark.parametrize(
    ("garbage", "words"),
    [
        (b"GET / HTTP/1.1\r\nHost: nobody\r\n\r\n", "it begins with 47 45 54 20"),
        (b"x", "1 bytes, where a header alone has 32"),
        (pack(2, 1, 1, b"abc")[:-1], "34 bytes, where its header promises 35"),
    ],
)
async def test_garbage_closes_the_channel_and_says_what_it_was(pair, garbage, words):
    """A stranger, or a peer of another version: the channel ends, and nothing is guessed."""
    ours, stranger = pair()
    gone = asyncio.get_running_loop().create_future()
    channel = LoopChannel(ours, Writer(), print, gone.set_result, name="rank 3 control")
    channel.open()
    stranger.send(garbage if pair is seqpacket_pair else len(garbage).to_bytes(8, "little") + garbage)
    error = await asyncio.wait_for(gone, 10)
    assert str(error).startswith("channel rank 3 control is closed: the peer sent what is no frame: ")
    assert words in str(error)
    assert not channel.is_open
    assert "what is no frame" in repr(channel)
    stranger.close()


async def test_descriptors_of_garbage_are_closed():
    """Whatever a stranger sends along does not stay open here."""
    ours, stranger = seqpacket_pair()
    gone = asyncio.get_running_loop().create_future()
    channel = LoopChannel(ours, Writer(), print, gone.set_result)
    channel.open()
    before = open_descriptors()
    socket.send_fds(stranger, [b"garbage"], [stranger.fileno()])
    await asyncio.wait_for(gone, 10)
    assert open_descriptors() < before
    stranger.close()


async def test_an_absurd_length_on_a_stream_is_garbage():
    """And no memory is taken for it."""
    ours, stranger = stream_pair()
    gone = asyncio.get_running_loop().create_future()
    channel = LoopChannel(ours, Writer(), print, gone.set_result)
    channel.open()
    stranger.send(b"\xff" * 8)
    assert "it claims to have" in str(await asyncio.wait_for(gone, 10))
    stranger.close()


async def test_a_hundred_thousand_messages_reach_four_readers_in_order():
    """G14: one writer, readers at different paces, two of them stopped for a while."""
    writer = Writer()
    pairs = [seqpacket_pair() for _ in range(4)]
    received = [[] for _ in pairs]
    senders = [LoopChannel(ours, writer, print, print, queue=200_000) for ours, _ in pairs]
    receivers = [
        LoopChannel(theirs, writer, lambda frame, into=into: into.append(frame.call), print)
        for (_, theirs), into in zip(pairs, received, strict=True)
    ]
    for channel in [*senders, *receivers[:2]]:
        channel.open()
    for call in range(25_000):
        writer.send(senders, Kind.MESSAGE, call, call)
        if call % 500 == 0:
            await asyncio.sleep(0)
        if call == 10_000:
            for channel in receivers[2:]:
                channel.open()
    await comes_true(lambda: all(len(calls) == 25_000 for calls in received))
    assert all(calls == list(range(25_000)) for calls in received)
    for channel in [*senders, *receivers]:
        channel.close()


async def test_a_hot_window_changes_nothing_but_time(make_peer):
    """Answers are the same, others on the loop have their turn, and idle it does nothing."""
    hot = HotWindow(0.002)
    peer = make_peer(hot=hot, spin=0.001)
    turns = 0

    async def other():
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    task = asyncio.create_task(other())
    for number in range(200):
        assert (await peer.ask("echo", number)).value == number
    assert turns > 200
    task.cancel()
    assert repr(hot).startswith("<HotWindow: 0 answers missing")


async def test_what_was_received_outlives_its_channel(make_peer):
    """The memory stays for as long as it is in use."""
    peer = make_peer()
    frame = await peer.ask("make", MIB)
    peer.channel.close()
    assert frame.value.sum() == 5 * MIB
    with pytest.raises(ChannelClosed, match="this end closed it"):
        peer.channel.send(Kind.MESSAGE, 1)


@pytest.mark.parametrize("pair", [seqpacket_pair, stream_pair])
async def test_the_last_words_of_a_peer_that_left_something_unread_are_heard(pair):
    """The kernel reports a reset before what was sent: the frames come first all the same."""
    left_unread, gone = [], asyncio.get_running_loop().create_future()
    ours, theirs = pair()
    writer = Writer()
    channel = LoopChannel(ours, writer, left_unread.append, gone.set_result)
    peer = BlockingChannel(theirs, writer)
    channel.open()
    channel.send(Kind.MESSAGE, 1, "never read")
    for call in range(3):
        peer.send(Kind.REPLY, call, b"x" * 5000)
    peer.close()
    assert (await asyncio.wait_for(gone, 10)).orderly
    assert [frame.call for frame in left_unread] == [0, 1, 2]


@pytest.mark.parametrize("waits", [False, True])
async def test_a_frame_that_the_system_does_not_take_ends_the_channel(waits):
    """Nobody waits for an answer to what was never sent: no memory, or too many descriptors under way."""
    ours, theirs = seqpacket_pair()
    theirs.setblocking(False)
    gone = asyncio.get_running_loop().create_future()
    channel = LoopChannel(ours, Writer(), lambda _: None, gone.set_result, name="rank 0 work")
    channel.open()
    while waits and not channel.num_queued:
        channel.send(Kind.MESSAGE, 1, "x" * 10_000)

    def refuse(*_):
        raise OSError(errno.ENOBUFS, "No buffer space available")

    channel._link.send = channel._link.flush = refuse
    channel.send(Kind.MESSAGE, 2, "x")
    with contextlib.suppress(BlockingIOError):
        while waits:
            theirs.recv(1 << 16)
    error = await asyncio.wait_for(gone, 10)
    assert "a frame could not be sent (No buffer space available)" in str(error)
    with pytest.raises(ChannelClosed, match="No buffer space available"):
        channel.send(Kind.MESSAGE, 3)
    channel.close()
    theirs.close()


async def test_a_frame_that_its_owner_cannot_deal_with_ends_the_channel():
    """Whoever waits for what it brought is told so at once, in the place of an endless wait."""
    ours, theirs = seqpacket_pair()
    gone = asyncio.get_running_loop().create_future()

    def broken(frame):
        raise KeyError(frame.call)

    ends = [
        LoopChannel(ours, Writer(), broken, gone.set_result, name="rank 0 work"),
        LoopChannel(theirs, Writer(), print, lambda _: None),
    ]
    for end in ends:
        end.open()
    with structlog.testing.capture_logs() as logs:
        ends[1].send(Kind.REPLY, 7, "answer")
        error = await asyncio.wait_for(gone, 5)
    assert (error.channel, error.reason) == ("rank 0 work", "this end failed on a frame: KeyError(7)")
    assert [(line["event"], line["frame"]) for line in logs] == [("a frame could not be dealt with", "REPLY")]
    for end in ends:
        end.close()


@pytest.mark.parametrize("pair", [seqpacket_pair, stream_pair])
async def test_a_frame_that_is_held_goes_with_the_next_one_or_when_told(pair):
    """In order, whatever the next one is; the other end reads them one by one."""
    ours, theirs = pair()
    writer, heard, enough = Writer(), [], asyncio.Event()

    def on_frame(frame):
        heard.append(frame.call)
        if len(heard) == 7:
            enough.set()

    sender = LoopChannel(ours, writer, on_frame, lambda error: None)
    receiver = LoopChannel(theirs, writer, on_frame, lambda error: None)
    sender.open()
    receiver.open()
    frames = [pack(Kind.MESSAGE, call, 0) for call in range(7)]
    sender.hold(frames[0])
    sender.put(Kind.MESSAGE, frames[1])
    sender.hold(frames[2])
    sender.send(Kind.MESSAGE, 3, np.zeros(100_000))
    sender.hold(frames[4])
    sender.hold(frames[5])
    await sender.flushed(10)
    sender.let_go()
    sender.put(Kind.MESSAGE, frames[6])
    await asyncio.wait_for(enough.wait(), 10)
    assert heard == list(range(7))
    assert (sender.statistics().sent, receiver.statistics().received) >= (7, 7)
    sender.close()
    receiver.close()
    writer.close()
