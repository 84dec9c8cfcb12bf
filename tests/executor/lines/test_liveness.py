from __future__ import annotations

import itertools

import pytest

from aexec.executor.lines.liveness import Signs, patience

ALL = [Signs(*each) for each in itertools.product([False, True], repeat=3)]


def test_a_worker_without_a_sign_lives():
    """Nothing is guessed."""
    assert patience(Signs()) is None


@pytest.mark.parametrize("signs", [signs for signs in ALL if any(signs)], ids=str)
def test_any_sign_is_the_beginning_of_its_end(signs):
    """PRC-09, G07: a death is told well within a second, whichever sign stays out."""
    seconds = patience(signs)
    assert seconds is not None
    assert seconds <= 0.3


def test_all_that_there_is_to_know_is_told_at_once():
    """The lines are read to their end, so no answer is lost, and how it ended is known."""
    assert patience(Signs(lines=True, status=True)) == 0


def test_one_more_sign_never_means_a_longer_wait():
    """Else a death could be put off."""
    for signs in ALL:
        for more in (signs._replace(**{name: True}) for name in Signs._fields):
            before, after = patience(signs), patience(more)
            assert before is None or after <= before
