from __future__ import annotations

from aexec.worker.claims import Claims


def test_a_call_that_comes_runs():
    """And is told when it is taken back meanwhile."""
    claims = Claims()
    claim = claims.take(1)
    assert claim is not None
    assert not claim.abandoned
    assert claims.revoke(1) is False
    assert claim.abandoned


def test_a_call_that_was_taken_back_before_it_came_never_runs():
    """The line that takes back is faster; the calls around it run."""
    claims = Claims()
    assert claims.revoke(2) is True
    assert claims.take(1) is not None
    assert claims.take(2) is None
    assert claims.take(3) is not None


def test_a_call_that_is_through_cannot_be_taken_back():
    """Nor does it spoil what runs now."""
    claims = Claims()
    claims.take(1)
    claims.end()
    assert claims.revoke(1) is False
    running = claims.take(2)
    assert claims.revoke(1) is False
    assert running is not None
    assert not running.abandoned


def test_what_can_no_longer_come_is_forgotten():
    """Calls come in the order of their ids: what is taken back and passed by stays nowhere."""
    claims = Claims()
    for call in (3, 5, 9):
        claims.revoke(call)
    assert repr(claims) == "<Claims: up to call 0, 3 taken back before they came>"
    claims.take(6)
    assert repr(claims) == "<Claims: up to call 6, 1 taken back before they came>"


def test_the_end_of_the_worker_is_told_to_what_runs_and_to_what_just_begins():
    """Nobody waits for either."""
    claims = Claims()
    running = claims.take(1)
    claims.abandon()
    assert running is not None
    assert running.abandoned
    late = claims.take(2)
    assert late is not None
    assert late.abandoned
