"""Workers that somebody else has started get their lines; nobody else gets anything."""

from __future__ import annotations

import errno
import os
import pickle
import resource
import socket
import struct
from pathlib import Path

import anyio
import anyio.lowlevel
import pytest

from aexec.errors import ChannelClosed, MeetingFailed, ProtocolError
from aexec.transport import Kind, LoopChannel, Writer, meeting
from aexec.transport.handshake import HELLO_SIZE, PROOF_SIZE, Verdict, answer_challenge, hello
from aexec.transport.lines import socket_link_of
from aexec.transport.links import PacketLink, StreamLink
from aexec.transport.meeting import Meeting, MeetingPlace, dial, new_secret, peer_pid

pytestmark = pytest.mark.anyio

SECRET = new_secret()
LOCAL, REMOTE = "local", "remote"


@pytest.fixture
def open_meeting(leak_check):
    """Opens meetings; they are closed after the test."""
    opened = []

    def open_it(expect=2, host="127.0.0.1", secret=SECRET):
        opened.append(Meeting(secret, host=host, expect=expect))
        opened[-1].open()
        return opened[-1]

    yield open_it
    for each in opened:
        each.close()


def way(to, which):
    """The place, seen from this node or from another."""
    return MeetingPlace(SECRET, local=to.local_address) if which is LOCAL else to.place(here=False)


async def come(place, rank, line, timeout=10.0):
    """Dial from a thread, as a worker does from its process."""
    return await anyio.to_thread.run_sync(lambda: dial(place, rank, line, timeout))


async def both_lines(to, rank=0, which=LOCAL):
    """A worker's ends and the driver's."""
    theirs = [await come(way(to, which), rank, line) for line in ("work", "control")]
    return theirs, await to.lines(rank)


def connect(to, which):
    """A connection of a stranger."""
    if which is LOCAL:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            sock.connect(f"\0{to.local_address}")
        except OSError:
            sock.close()
            raise
    else:
        sock = socket.create_connection(to.remote_address)
    sock.setblocking(False)
    return sock


async def heard(sock, size=1 << 16):
    """What comes; empty when it is hung up."""
    await anyio.wait_readable(sock)
    try:
        return sock.recv(size)
    except ConnectionResetError:
        return b""


def close(*socks):
    for sock in socks:
        sock.close()


@pytest.mark.parametrize("which", [LOCAL, REMOTE])
async def test_each_rank_gets_its_own_two_lines(open_meeting, which):
    """On whatever way and in whatever order they come, and ready for frames at once."""
    to = open_meeting(expect=2)
    ends = [(rank, line, await come(way(to, which), rank, line)) for rank in (1, 0) for line in ("control", "work")]
    for rank, line, end in ends:
        end.sendall(f"{rank} {line}".encode())
    for rank in (0, 1):
        work, control = await to.lines(rank)
        assert (await heard(work), await heard(control)) == (f"{rank} work".encode(), f"{rank} control".encode())
        close(work, control)
    close(*(end for _, _, end in ends))


async def test_a_meeting_of_chosen_ranks_is_for_nobody_else(open_meeting):
    """As where a group's own rank is the driver: it has no line to itself, and the meeting is over without it."""
    to = open_meeting(expect=[1, 5])
    with pytest.raises(MeetingFailed, match="the group has no such rank"):
        await come(way(to, LOCAL), 0, "work")
    for rank in (5, 1):
        theirs, ours = await both_lines(to, rank)
        close(*theirs, *ours)
    assert (to.statistics().seated, to.statistics().expected) == (4, 4)
    with pytest.raises(MeetingFailed, match="nobody listens there"):
        await come(way(to, LOCAL), 1, "work", timeout=2.0)


async def test_on_this_node_memory_is_shared(open_meeting):
    """Lines of this node carry descriptors and name the process at their end; others are streams."""
    to = open_meeting(expect=2)
    theirs, ours = await both_lines(to, 0, LOCAL)
    assert all(isinstance(socket_link_of(end), PacketLink) for end in (*theirs, *ours))
    assert {peer_pid(end) for end in (*theirs, *ours)} == {os.getpid()}
    far, near = await both_lines(to, 1, REMOTE)
    assert all(isinstance(socket_link_of(end), StreamLink) for end in (*far, *near))
    close(*theirs, *ours, *far, *near)


async def test_lines_to_other_nodes_notice_when_those_are_gone(open_meeting):
    """Small frames go at once; silence is asked about; but a work line may be full for as long as a thread computes."""
    theirs, ours = await both_lines(open_meeting(expect=1), 0, REMOTE)
    for pair in (theirs, ours):
        for end in pair:
            assert end.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
            assert end.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        work, control = (end.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) for end in pair)
        assert (work, control) == (0, 20_000)
    close(*theirs, *ours)


async def test_who_waits_for_a_rank_waits_until_it_is_there(open_meeting):
    """And the lines are given out once."""
    to = open_meeting(expect=1)
    got = []
    async with anyio.create_task_group() as tasks:

        async def wait():
            got.append(await to.lines(0))

        tasks.start_soon(wait)
        theirs = [await come(way(to, LOCAL), 0, line) for line in ("work", "control")]
    with pytest.raises(ProtocolError, match="rank 0 were taken already"):
        await to.lines(0)
    close(*theirs, *got[0])


async def test_a_rank_that_comes_twice_is_refused(open_meeting):
    """Its first line holds, and the second caller is told why it gets none."""
    to = open_meeting(expect=1)
    first = await come(way(to, LOCAL), 0, "work")
    for which in (LOCAL, REMOTE):
        with pytest.raises(MeetingFailed, match="another process of this rank has this line already"):
            await come(way(to, which), 0, "work")
    control = await come(way(to, LOCAL), 0, "control")
    ours = await to.lines(0)
    first.send(b"it is me")
    assert await heard(ours[0]) == b"it is me"
    close(first, control, *ours)


async def test_a_rank_that_lost_its_line_before_it_was_used_may_come_again(open_meeting):
    """Its connection broke in between: the one that has come last counts."""
    to = open_meeting(expect=1)
    (await come(way(to, REMOTE), 0, "work")).close()
    theirs, ours = await both_lines(to, 0, REMOTE)
    theirs[0].sendall(b"again")
    assert await heard(ours[0]) == b"again"
    close(*theirs, *ours)


async def test_a_rank_that_the_group_does_not_have_is_refused(open_meeting):
    """Even if it knows the secret."""
    to = open_meeting(expect=2)
    with pytest.raises(MeetingFailed, match="the group has no such rank"):
        await come(way(to, LOCAL), 2, "work")
    assert to.statistics().seated == 0


@pytest.mark.parametrize("which", [LOCAL, REMOTE])
async def test_a_worker_with_another_secret_gets_nothing(open_meeting, which):
    """It finds that out itself: the driver proves itself first, and cannot."""
    to = open_meeting()
    place = way(to, which)
    place = MeetingPlace(new_secret(), place.local, place.remote)
    with pytest.raises(MeetingFailed, match="does not know the secret of this group"):
        await come(place, 0, "work")


@pytest.mark.parametrize("which", [LOCAL, REMOTE])
async def test_a_worker_is_not_taken_in_by_who_has_the_drivers_address(leak_check, which):
    """A listener that does not know the secret learns no more than which rank has called."""
    if which is LOCAL:
        listening = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        listening.bind("\0aexec-test-false")
        listening.listen()
        place = MeetingPlace(SECRET, local="aexec-test-false")
    else:
        listening = socket.create_server(("127.0.0.1", 0))
        place = MeetingPlace(SECRET, remote=listening.getsockname())

    def pretend():
        sock, _ = listening.accept()
        with sock, listening:
            assert len(sock.recv(HELLO_SIZE)) == HELLO_SIZE
            sock.sendall(bytes(64))
            return sock.recv(1 << 16)

    async with anyio.create_task_group() as tasks:
        learned = []

        async def listen():
            learned.append(await anyio.to_thread.run_sync(pretend))

        tasks.start_soon(listen)
        with pytest.raises(MeetingFailed, match="does not know the secret of this group"):
            await come(place, 0, "work")
    assert learned == [b""]


async def pass_for_a_worker(to, which, proof):
    """Do all as a worker does, but for the proof; what is answered to that."""
    sock = connect(to, which)
    sock.send(hello(0, "work"))
    assert len(await heard(sock)) == 64
    sock.send(proof)
    answer = await heard(sock)
    sock.close()
    return answer


@pytest.mark.parametrize("which", [LOCAL, REMOTE])
@pytest.mark.parametrize("proof", [bytes(PROOF_SIZE), b"x" * 4096], ids=["wrong", "long"])
async def test_a_stranger_without_the_secret_is_turned_away(open_meeting, which, proof):
    """It gets no verdict, and the rank can still come."""
    to = open_meeting(expect=1)
    assert await pass_for_a_worker(to, which, proof) == b""
    assert to.statistics().turned_away == 1
    theirs, ours = await both_lines(to)
    close(*theirs, *ours)


class Trap:
    """Leaves a file where it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.write_text, (self.path, "it was run")


@pytest.mark.parametrize("which", [LOCAL, REMOTE])
async def test_a_pickle_of_a_stranger_is_never_run(open_meeting, tmp_path, which):
    """G50: neither as the first thing that it says, nor as a frame of ours, nor after a hello."""
    to = open_meeting(expect=1)
    bomb = pickle.dumps(Trap(tmp_path / "trace"))
    writer = Writer()
    length = struct.pack("<Q", len(bomb))
    for data in (bomb, length + bomb, hello(0, "work") + bomb, bomb.ljust(1 << 16, b"."), None):
        sock = connect(to, which)
        if data is None:
            channel = LoopChannel(sock, writer, print, print)
            channel.open()
            channel.send(Kind.EVENT, 0, Trap(tmp_path / "trace"))
            await channel.flushed(5.0)
            channel.close()
        else:
            sock.sendall(data)
            with anyio.move_on_after(0.1):
                await heard(sock)
            sock.close()
    theirs, ours = await both_lines(to)
    assert not (tmp_path / "trace").exists()
    pickle.loads(bomb)
    assert (tmp_path / "trace").read_text() == "it was run"
    close(*theirs, *ours)
    writer.close()


@pytest.fixture
def many_descriptors():
    """As many as this process may have at all."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (before[1], before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.usefixtures("many_descriptors")
@pytest.mark.parametrize("which", [LOCAL, REMOTE])
async def test_a_thousand_idle_connections_keep_nobody_out(open_meeting, which, caplog):
    """A few of them wait, the others are closed; workers come through meanwhile, and the log has one line."""
    to = open_meeting(expect=1)
    crowd = await anyio.to_thread.run_sync(lambda: [connect(to, which) for _ in range(1000)])
    with anyio.fail_after(10):
        theirs, ours = await both_lines(to, 0, which)
    facts = to.statistics()
    assert facts.at_the_door <= meeting.MOST_AT_THE_DOOR
    assert facts.turned_away >= 1000 - meeting.MOST_AT_THE_DOOR - 1
    assert len(caplog.records) == 1
    assert "was turned away" in caplog.text
    close(*theirs, *ours, *crowd)


async def test_who_says_nothing_or_too_little_has_a_time_limit(open_meeting, monkeypatch):
    """A byte now and then does not prolong it."""
    monkeypatch.setattr(meeting, "PATIENCE", 0.2)
    to = open_meeting(expect=1)
    slow, silent = connect(to, REMOTE), connect(to, LOCAL)
    with anyio.fail_after(5):
        async with anyio.create_task_group() as tasks:

            async def drip():
                for byte in hello(0, "work"):
                    try:
                        slow.send(bytes([byte]))
                    except OSError:
                        return
                    await anyio.sleep(0.02)
                raise AssertionError("it was let in")

            tasks.start_soon(drip)
            assert await heard(silent) == b""
            assert await heard(slow) == b""
    assert (to.statistics().turned_away, to.statistics().at_the_door) == (2, 0)
    close(slow, silent)


async def test_a_worker_whose_bytes_come_one_by_one_is_welcome(open_meeting):
    """A stream may cut anything anywhere."""
    to = open_meeting(expect=1)
    sock = connect(to, REMOTE)
    said = hello(0, "control")
    for byte in said:
        sock.send(bytes([byte]))
        await anyio.lowlevel.checkpoint()
    answer = await heard(sock, 64)
    for byte in answer_challenge(SECRET, said, answer):
        sock.send(bytes([byte]))
        await anyio.lowlevel.checkpoint()
    assert await heard(sock) == bytes([Verdict.WELCOME])
    sock.close()


async def test_without_descriptors_the_loop_does_not_run_hot(open_meeting, monkeypatch, leak_check):
    """Who waits is let in when there are some again."""
    monkeypatch.setattr(meeting, "_BREATHER", 0.05)
    to = open_meeting(expect=1)
    tried = []

    class Exhausted:
        def __init__(self, sock):
            self.sock, self.fileno = sock, sock.fileno

        def accept(self):
            tried.append(1)
            if len(tried) < 4:
                raise OSError(errno.EMFILE, "no descriptors")
            return self.sock.accept()

        def close(self):
            self.sock.close()

    local = to._listening[0]
    to._loop.remove_reader(local.fileno())
    to._listening[0] = Exhausted(local)
    to._loop.add_reader(local.fileno(), to._let_in, to._listening[0])
    with anyio.fail_after(5):
        theirs, ours = await both_lines(to)
    assert 4 <= len(tried) <= 12
    close(*theirs, *ours)


async def test_nobody_is_listened_to_once_all_are_there(open_meeting):
    """The doors are closed behind the last one."""
    to = open_meeting(expect=1)
    theirs, ours = await both_lines(to)
    for which in (LOCAL, REMOTE):
        with pytest.raises(ConnectionRefusedError):
            connect(to, which)
    with pytest.raises(MeetingFailed, match="nobody listens there"):
        await come(to.place(here=True), 0, "work")
    close(*theirs, *ours)


async def test_closing_ends_everything(open_meeting):
    """Listeners, strangers, lines that nobody took, and whoever waits for a rank."""
    to = open_meeting(expect=2)
    stranger, half = connect(to, REMOTE), await come(way(to, LOCAL), 0, "work")
    async with anyio.create_task_group() as tasks:

        async def wait():
            with pytest.raises(ChannelClosed, match="this end closed it"):
                await to.lines(1)

        tasks.start_soon(wait)
        await anyio.wait_all_tasks_blocked()
        to.close()
        to.close()
    assert await heard(half) == b""
    assert await heard(stranger) == b""
    assert repr(to).startswith("<Meeting at closed: 0/4 lines")
    close(stranger, half)


@pytest.mark.parametrize("host", ["", "0.0.0.0", "::"])
def test_a_meeting_is_never_held_everywhere(host):
    """One address of this node, and no other network can reach it."""
    with pytest.raises(ValueError, match="expected one address of this node"):
        Meeting(SECRET, host=host, expect=1)


def test_a_secret_is_no_word():
    """It would be guessed."""
    with pytest.raises(ValueError, match="expected what new_secret"):
        Meeting(b"sesame", host=None, expect=1)


async def test_without_a_host_there_is_no_port(open_meeting):
    """A group of one node is reached on that node only."""
    to = open_meeting(expect=1, host=None)
    assert to.remote_address is None
    with pytest.raises(MeetingFailed, match="none was given"):
        await come(to.place(here=False), 0, "work")


async def test_an_address_of_another_node_cannot_be_listened_on(leak_check):
    """Said at once, and nothing stays behind."""
    to = Meeting(SECRET, host="192.0.2.1", expect=1)
    with pytest.raises(OSError, match="assign"):
        to.open()
    to.close()


async def test_a_driver_that_does_not_answer_is_given_up(leak_check):
    """Within the time that was given, and the error says where, and what may be the matter."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        place = MeetingPlace(SECRET, remote=listening.getsockname())
        with anyio.fail_after(5), pytest.raises(MeetingFailed) as caught:
            await come(place, 3, "control", timeout=0.3)
    port = place.remote[1]
    assert str(caught.value) == (
        f"rank 3 could not get its control line to the driver at tcp://127.0.0.1:{port}: "
        f"tcp://127.0.0.1:{port}: no answer within 0.3 s: is there a firewall between the nodes?"
    )


async def test_a_worker_that_is_dropped_tries_again(open_meeting, monkeypatch):
    """As happens when a crowd of strangers comes in the same moment."""
    to = open_meeting(expect=1)
    real, dropped = to._let_in, []

    def drop_first(listening):
        if len(dropped) < 2:
            sock, _ = listening.accept()
            dropped.append(sock.close())
        else:
            real(listening)

    monkeypatch.setattr(to, "_let_in", drop_first)
    for listening in to._listening:
        to._loop.remove_reader(listening.fileno())
        to._loop.add_reader(listening.fileno(), drop_first, listening)
    theirs, ours = await both_lines(to, 0, REMOTE)
    assert len(dropped) == 2
    close(*theirs, *ours)


def test_the_secret_is_not_shown():
    """In no log and in no traceback: a place says where it is, and no more."""
    place = MeetingPlace(SECRET, local="aexec-x", remote=("fe80::1", 7))
    assert repr(SECRET)[2:-1] not in repr(place)
    assert str(place) == "unix socket @aexec-x or tcp://[fe80::1]:7"
    assert pickle.loads(pickle.dumps(place)) == place
