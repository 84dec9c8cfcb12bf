"""Words from stage to stage, without torch."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time

import pytest

from aexec.errors import ConfigError, PeerLost, ProtocolError
from aexec.parallel import abstract
from aexec.parallel.layout import RankLayout
from aexec.parallel.sockets import SocketLink

TWO_STAGES = RankLayout(pipeline=2)


@pytest.fixture
def meeting():
    """Where the ranks of one group meet; gone after the test."""
    number = os.memfd_create("meeting")
    yield f"file:///proc/{os.getpid()}/fd/{number}"
    os.close(number)


@pytest.fixture
def make_links(meeting):
    """Make and connect a pipeline of links, in this thread."""
    with contextlib.ExitStack() as stack:

        def make(layout=TWO_STAGES, timeout=5.0):
            links = [
                stack.enter_context(contextlib.closing(SocketLink(layout, rank, init_method=meeting, timeout=timeout)))
                for rank in range(layout.size)
            ]
            for link in links:
                link.open()
            return links

        yield make


def test_a_word_goes_through_all_stages(make_links):
    """Each stage at its own tensor parallel place."""
    links = make_links(RankLayout(tensor=2, pipeline=3))
    for column in (0, 1):
        links[column].send(1, 100 + column)
        links[4 + column - 2].send(1, links[2 + column].receive(1, 0) + 10)
    assert [links[rank].receive(1, 0) for rank in (4, 5)] == [110, 111]


def test_a_stage_runs_ahead_of_the_one_after_it(make_links):
    """Several steps are under way, and arrive in order."""
    first, second = make_links()
    for step in range(1, 6):
        first.send(step, step * step)
    assert [second.receive(step, 0) for step in range(1, 6)] == [1, 4, 9, 16, 25]
    assert (first.statistics().sent, second.statistics().received) == (5, 5)


def test_a_stage_at_another_step_is_told_apart(make_links):
    """G54, G60: stages that see steps in different orders never take one for another."""
    first, second = make_links()
    first.send(8, 1)
    with pytest.raises(ProtocolError, match="rank 1 is at step 7, and rank 0 sent step 8"):
        second.receive(7, 0)


def test_a_failed_step_is_passed_on(make_links):
    """The stage after does not wait for what will never come, and goes on with the next step."""
    first, second = make_links()
    first.send_failure(7, 0)
    first.send(8, 64)
    with pytest.raises(PeerLost, match=r"could not receive the hidden states of step 7: rank 0 .*failed at this step"):
        second.receive(7, 0)
    assert second.receive(8, 0) == 64


def test_a_stage_that_is_gone_ends_the_wait_at_once(make_links):
    """G62: long before the time is up."""
    first, second = make_links(timeout=60.0)
    begun = time.monotonic()
    threading.Timer(0.05, first.close).start()
    with pytest.raises(PeerLost, match="rank 0 is gone or too late") as caught:
        second.receive(7, 0)
    assert time.monotonic() - begun < 10
    assert (caught.value.rank, caught.value.peer) == (1, 0)
    with pytest.raises(PeerLost, match="rank 0 could not send the hidden states of step 8"):
        first.send(8, 0)


def test_a_stage_that_is_too_late_is_named(make_links):
    """A wait has an end, and its seconds are counted: they are the stage's bubble."""
    _, second = make_links(timeout=0.5)
    with pytest.raises(PeerLost, match="timed out"):
        second.receive(7, 0)
    assert second.statistics().wait_seconds >= 0.4


def test_a_stage_that_was_never_made_is_named(meeting):
    """Instead of a wait for it."""
    with (
        contextlib.closing(SocketLink(TWO_STAGES, 0, init_method=meeting, timeout=1.0)) as link,
        pytest.raises(PeerLost, match="could not connect to the stage after: rank 1 is gone"),
    ):
        link.open()


@pytest.mark.parametrize("init_method", ["", "env://", "tcp://127.0.0.1"])
def test_stages_meet_at_a_file_or_a_port(init_method):
    """The error says what would do."""
    with pytest.raises(ConfigError, match=r"expected file:///path on Linux.*or tcp://host:port"):
        SocketLink(TWO_STAGES, 0, init_method=init_method, timeout=1.0)


def test_a_step_that_came_too_late_is_passed_over(make_links):
    """Its time-out was the end of it: the next step gets its own word."""
    first, second = make_links(timeout=0.5)
    with pytest.raises(PeerLost, match="timed out"):
        second.receive(7, 0)
    first.send(7, 49)
    first.send(8, 64)
    assert second.receive(8, 0) == 64


def test_a_place_that_is_taken_is_named(meeting):
    """Whoever has it, the error is ours."""
    with (
        contextlib.closing(SocketLink(TWO_STAGES, 1, init_method=meeting, timeout=1.0)),
        pytest.raises(PeerLost, match=r"rank 1 could not wait for the stage before: rank 0 .*in use"),
    ):
        SocketLink(TWO_STAGES, 1, init_method=meeting, timeout=1.0)


@pytest.fixture
def foreign(monkeypatch):
    """The kernel names another user for so many connections, the first ones."""

    def these(count):
        users = iter([os.getuid() + 1] * count)
        monkeypatch.setattr(abstract, "_user_of", lambda _: next(users, os.getuid()))

    return these


def test_a_stranger_is_turned_away_and_the_stage_before_is_let_in(meeting, foreign):
    """A process of another user can connect, and neither sends words nor keeps others out."""
    first, second = (
        contextlib.closing(SocketLink(TWO_STAGES, rank, init_method=meeting, timeout=5.0)) for rank in (0, 1)
    )
    with first as first, second as second, socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stranger:
        stranger.connect(second._meeting.address(1))
        first.open()
        foreign(1)
        second.open()
        first.send(7, 49)
        assert second.receive(7, 0) == 49


def test_words_are_not_sent_to_a_stranger(meeting, foreign):
    """Somebody else may have taken the name of the stage after."""
    with (
        contextlib.closing(SocketLink(TWO_STAGES, 1, init_method=meeting, timeout=1.0)),
        contextlib.closing(SocketLink(TWO_STAGES, 0, init_method=meeting, timeout=1.0)) as first,
    ):
        foreign(1)
        with pytest.raises(PeerLost, match="a process of another user"):
            first.open()
