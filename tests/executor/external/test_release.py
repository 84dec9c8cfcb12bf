"""What a hub lets go of, and when."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aexec.errors import ProtocolError
from aexec.executor.external.release import Agreed, Forward, Release
from aexec.messages.peers import Called, Departed


def said(answers=1, what="a"):
    return Called(what.encode(), what, None, answers)


def test_a_reply_goes_out_when_the_last_rank_has_made_its_call():
    """In the order in which they came; the hub's own rank hears of the agreement at once, others by a reply."""
    release = Release((0, 1, 2))
    assert release.called(1, said()) == ()
    assert release.replied(1, 1, "one") is None
    assert release.called(0, said()) == ()
    assert release.replied(0, 1, "nought") is None
    assert release.called(2, said()) == [Agreed((0,), 1), Forward(1, 1, "one"), Forward(0, 1, "nought")]
    assert release.replied(2, 1, "two") == Forward(2, 1, "two")


def test_who_answers_alone_is_told_at_once_that_it_may_go_on():
    """No reply of another will tell it."""
    release = Release((0, 1))
    release.called(1, said(answers=2))
    assert release.called(0, said(answers=0)) == [Agreed((1,), 1)]
    assert not release.has_untold


def test_who_answers_among_others_is_told_later_unless_a_reply_has_told_it():
    """A frame less for each call that is quick."""
    release = Release((0, 1, 2))
    for rank in (0, 1, 2):
        release.called(rank, said())
    release.told(1, 1)
    assert release.has_untold
    assert release.take_untold() == [Agreed((2,), 1)]
    assert not release.has_untold


def test_replies_beside_an_error_are_told_at_once():
    """The error tells nobody that the call was agreed."""
    release = Release((0, 1))
    release.called(0, said())
    assert release.failed(1) is None
    assert release.called(1, said()) == [Agreed((0, 1), 1)]
    assert release.failed(1) == Agreed((0, 1), 1)


def test_a_departure_waits_for_the_replies_before_it():
    """They are held until the others have made their calls; one with a reason waits for nothing."""
    release = Release((0, 1))
    release.called(1, said())
    release.replied(1, 1, "last words")
    assert release.departs(Departed(1, 1)) is None
    out = release.called(0, said())
    assert out[-2:] == [Forward(1, 1, "last words"), Departed(1, 1)]
    assert release.departs(Departed(0, 9, "it fails")) == Departed(0, 9, "it fails")


def test_departures_that_still_wait_are_said_at_the_end():
    """When the hub itself goes."""
    release = Release((0, 1))
    release.called(1, said())
    release.departs(Departed(1, 1))
    assert release.take_departing() == [Departed(1, 1)]
    assert release.take_departing() == []


def test_nobody_answers_what_it_has_not_been_asked():
    """That would be a fault of ours."""
    with pytest.raises(ProtocolError, match="rank 1 answers call 1, which it has not made"):
        Release((0, 1)).replied(1, 1, "early")


@given(st.integers(1, 4), st.integers(1, 6), st.randoms())
def test_every_reply_goes_out_once_and_never_before_its_call_is_agreed(ranks, calls, random):
    """Whatever the interleaving of calls and replies (G05); and everybody hears of each call that it answers."""
    release = Release(tuple(range(ranks)))
    todo = {rank: [(kind, seq) for seq in range(1, calls + 1) for kind in ("call", "reply")] for rank in range(ranks)}
    forwarded, told = [], dict.fromkeys(range(ranks), 0)

    def put(out):
        for one in out:
            assert one.seq <= release.lockstep.agreed
            if isinstance(one, Forward):
                forwarded.append((one.rank, one.seq))
                for other in set(range(ranks)) - {one.rank}:
                    release.told(other, one.seq)
                    told[other] = max(told[other], one.seq)
            else:
                for rank in one.ranks:
                    told[rank] = max(told[rank], one.seq)

    while any(todo.values()):
        rank = random.choice([rank for rank in todo if todo[rank]])
        kind, seq = todo[rank].pop(0)
        if kind == "call":
            put(release.called(rank, said()))
        else:
            now = release.replied(rank, seq, None)
            put([now] if now else [])
        if random.random() < 0.2:
            put(release.take_untold())
    put(release.take_untold())
    assert sorted(forwarded) == [(rank, seq) for rank in range(ranks) for seq in range(1, calls + 1)]
    assert told == dict.fromkeys(range(ranks), calls)
    assert release.num_held == 0
