"""Stages that meet over TCP: who is let in, who is not, and what is said of those who are missing."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor, wait

import pytest

from aexec.errors import ConfigError, PeerLost, ProtocolError
from aexec.parallel import door
from aexec.parallel.layout import RankLayout
from aexec.parallel.rendezvous import PortReservation
from aexec.parallel.sockets import SocketLink
from aexec.transport.handshake import Stranger

SECRET = bytes(range(32))
TWO_STAGES = RankLayout(pipeline=2)


@pytest.fixture
def place():
    """A port that is kept for the ranks, as a node's process keeps it."""
    with contextlib.closing(PortReservation("127.0.0.2")) as reservation:
        yield reservation


@pytest.fixture
def make_link(place):
    """Make one rank's link; closed after the test."""
    with contextlib.ExitStack() as stack:

        def make(rank, layout=TWO_STAGES, *, timeout=5.0, host="127.0.0.3", secret=SECRET):
            link = SocketLink(
                layout, rank, init_method=place.init_method, timeout=timeout, host=host, secret=secret
            )  # fmt: skip
            return stack.enter_context(contextlib.closing(link))

        yield make


@pytest.fixture
def threads():
    """Ranks that wait for each other need a thread each."""
    with ThreadPoolExecutor(8) as pool:
        yield pool


@pytest.fixture
def open_links(make_link, threads):
    """Make and connect a pipeline."""

    def make(layout=TWO_STAGES, **options):
        links = [make_link(rank, layout, **options) for rank in range(layout.size)]
        for opened in [threads.submit(link.open) for link in links]:
            opened.result()
        return links

    return make


@pytest.fixture
def opening(make_link, threads):
    """Rank 0 waits for the others; what came of it."""
    link = make_link(0)
    return threads.submit(link.open)


def test_replicas_that_meet_at_one_place_keep_to_themselves(open_links):
    """Rank 0 of all serves them; errors name the ranks of the replica."""
    links = open_links(RankLayout(tensor=1, pipeline=2, data=2))
    links[0].send(1, 100)
    links[2].send(1, 102)
    assert [links[rank].receive(1, 0) for rank in (1, 3)] == [100, 102]
    links[2].close()
    with pytest.raises(PeerLost, match="rank 1 could not receive the hidden states of step 2: rank 0 is gone"):
        links[3].receive(2, 0)


def test_a_replica_that_is_here_before_rank_0_listens_waits_for_it(make_link, threads):
    """Replicas start each for itself; a rank of its own replica listens before anybody calls it."""
    layout = RankLayout(pipeline=2, data=2)
    others = [make_link(rank, layout) for rank in (2, 3)]
    opening = [threads.submit(link.open) for link in others]
    assert wait(opening, timeout=0.1).done == set()
    links = [make_link(rank, layout) for rank in (0, 1)]
    for opened in [*opening, *(threads.submit(link.open) for link in links)]:
        opened.result()
    others[0].send(1, 7)
    assert others[1].receive(1, 0) == 7


@pytest.mark.parametrize("host", ["127.0.0.3", ""])
def test_a_word_goes_through_all_stages(open_links, host):
    """Each at its own tensor parallel place, wherever its rank listens."""
    links = open_links(RankLayout(tensor=2, pipeline=3), host=host)
    for column in (0, 1):
        links[column].send(1, 100 + column)
        links[4 + column - 2].send(1, links[2 + column].receive(1, 0) + 10)
    assert [links[rank].receive(1, 0) for rank in (4, 5)] == [110, 111]


def test_nobody_listens_once_all_have_met(open_links, place):
    """Neither at the rendezvous, which torch may want next, nor elsewhere."""
    links = open_links()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", place.port), 5.0)
    assert [link._meeting._listener.fileno() for link in links[1:]] == [-1]
    door.listen("127.0.0.2", place.port).close()


def test_steps_arrive_in_order_and_are_told_apart(open_links):
    """G54, G60: as on one machine."""
    first, second = open_links()
    for step in (1, 2, 4):
        first.send(step, step * step)
    assert [second.receive(step, 0) for step in (1, 2)] == [1, 4]
    with pytest.raises(ProtocolError, match="rank 1 is at step 3, and rank 0 sent step 4"):
        second.receive(3, 0)


def test_a_failed_step_is_passed_on(open_links):
    """The stage after goes on with the next step."""
    first, second = open_links()
    first.send_failure(7, 0)
    first.send(8, 64)
    with pytest.raises(PeerLost, match=r"step 7: rank 0 .*failed at this step"):
        second.receive(7, 0)
    assert second.receive(8, 0) == 64


def test_a_stage_that_is_gone_ends_the_wait_at_once(open_links):
    """G62: long before the time is up."""
    first, second = open_links(timeout=60.0)
    begun = time.monotonic()
    threading.Timer(0.05, first.close).start()
    with pytest.raises(PeerLost, match="rank 0 is gone or too late"):
        second.receive(7, 0)
    assert time.monotonic() - begun < 10


def test_a_late_step_is_passed_over_even_if_half_of_it_had_come(open_links):
    """TCP knows no messages: the rest is put to what was there."""
    first, second = open_links(timeout=1.0)  # they meet within it as well
    whole, write = [], first._to.send
    first._write = lambda _, message: whole.append(message)
    first.send(7, 49)
    write(whole[0][:5])
    with pytest.raises(PeerLost, match="timed out"):
        second.receive(7, 0)
    write(whole[0][5:])
    del first._write
    first.send(8, 64)
    assert second.receive(8, 0) == 64


def test_a_stage_that_takes_no_more_is_named(open_links):
    """G62: what is left of a step that it took in part is never sent as if it were another."""
    first, second = open_links(timeout=1.0)
    first._to.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
    second._from.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
    with pytest.raises(PeerLost, match=r"rank 0 could not send .*rank 1 is gone or too late \((timed out|it took)"):
        any(first.send(step, step) for step in range(1 << 22))


def test_a_rank_that_does_not_come_is_named(make_link, threads):
    """Both by rank 0, and to the one that waits for it there."""
    layout = RankLayout(pipeline=3)
    first, second = (make_link(rank, layout, timeout=1.5) for rank in (0, 1))
    opened = [threads.submit(link.open) for link in (first, second)]
    with pytest.raises(PeerLost, match="rank 0 could not meet rank 2: rank 2 is gone or too late"):
        opened[0].result()
    with pytest.raises(PeerLost, match="rank 1 could not meet the other ranks at rank 0: rank 0 is gone"):
        opened[1].result()


def test_a_rank_0_that_is_not_there_is_named(make_link):
    """At once: it listens before anybody opens."""
    with pytest.raises(PeerLost, match=r"could not meet the other ranks at rank 0: .*refused"):
        make_link(1).open()


def test_an_address_that_is_not_rank_0s_is_named():
    """Nothing of this machine has it."""
    with pytest.raises(PeerLost, match=r"rank 0 could not listen where the ranks meet: .*assign"):
        SocketLink(TWO_STAGES, 0, init_method="tcp://192.0.2.77:4000", timeout=1.0, secret=SECRET)


def test_ranks_need_a_secret(place):
    """Anybody can dial a port."""
    with pytest.raises(ConfigError, match=r"WorkerContext.group_secret"):
        SocketLink(TWO_STAGES, 0, init_method=place.init_method, timeout=1.0)


def test_strangers_keep_nobody_out(opening, make_link, place, monkeypatch):
    """One is silent, one talks nonsense, one knows another secret, and there are many of them."""
    monkeypatch.setattr(door, "MOST_AT_THE_DOOR", 8)
    address = ("127.0.0.2", place.port)
    with contextlib.ExitStack() as stack:
        for number in range(20):
            stranger = stack.enter_context(socket.create_connection(address, 5.0))
            if number % 2:
                stranger.sendall(b"GET / HTTP/1.1\r\n\r\n" * 4)
        with pytest.raises(PeerLost, match="does not know the secret"):
            make_link(1, secret=SECRET[::-1]).open()
        second = make_link(1)
        second.open()
        opening.result()


def test_a_stranger_who_says_nothing_is_turned_away(opening, make_link, place, monkeypatch):
    """After a while, though the others are still waited for."""
    monkeypatch.setattr(door, "PATIENCE", 0.1)
    with socket.create_connection(("127.0.0.2", place.port), 5.0) as stranger:
        assert stranger.recv(1) == b""
    make_link(1).open()
    opening.result()


def test_a_rank_is_let_in_once(opening, make_link, place):
    """Whoever knows the secret and is not waited for is told so."""
    deadline, key = time.monotonic() + 5.0, door.key_of(SECRET)
    with pytest.raises(Stranger, match="this rank is not expected there"):
        door.call(("127.0.0.2", place.port), key, 7, deadline).close()
    make_link(1).open()
    opening.result()


def test_the_key_of_the_stages_is_no_use_elsewhere():
    """Nor is the secret itself here."""
    assert door.key_of(SECRET) != SECRET
    assert door.key_of(SECRET) == door.key_of(bytes(range(32)))
