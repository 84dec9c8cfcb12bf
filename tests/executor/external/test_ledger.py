from __future__ import annotations

from aexec.executor.external.ledger import Ledger


class Asker:
    """Another rank that wants to know."""

    def __init__(self):
        self.told = []

    def resolve(self, value):
        self.told.append(value)


def test_a_call_ends_with_its_last_answer():
    """By either number; what comes later is nobody's."""
    ledger = Ledger()
    ledger.made(1, 10, (0, 1))
    assert (ledger.number(10), ledger.entry(10).missing) == (1, {0, 1})
    assert [ledger.answered(1, 0), ledger.answered(1, 1), ledger.answered(1, 1)] == [10, 10, 0]
    assert (len(ledger), ledger.number(10), ledger.entry(10)) == (0, 0, None)


def test_a_launch_ends_with_the_sampling_of_its_step():
    """Nobody answers it, unless to refuse it."""
    ledger = Ledger()
    ledger.launched(ledger.made(1, 10, ()), 7)
    assert ledger.answered(1, 0) == 10
    ledger.samples(ledger.made(2, 11, (0,)), 7)
    assert len(ledger) == 2
    ledger.answered(2, 0)
    assert len(ledger) == 0


def test_what_a_rank_gave_back_is_told_to_who_asks_before_and_after():
    """And to who asks about a call that this rank has still to make."""
    ledger, early, before, after = Ledger(), Asker(), Asker(), Asker()
    ledger.ask_given_back(1, early)
    ledger.made(1, 10, (0, 1))
    ledger.ask_given_back(1, before)
    ledger.given_back(10, never_ran=True)
    ledger.ask_given_back(1, after)
    assert [early.told, before.told, after.told] == [[True]] * 3


def test_a_call_that_ends_was_not_given_back():
    """Whoever waits for that is told, and whoever asks about an old one is told at once."""
    ledger, waiting, late = Ledger(), Asker(), Asker()
    ledger.made(1, 10, (0,))
    ledger.ask_given_back(1, waiting)
    ledger.answered(1, 0)
    ledger.ask_given_back(1, late)
    assert [waiting.told, late.told] == [[False]] * 2
    ledger.given_back(10, never_ran=True)
    assert repr(ledger) == "<Ledger: 0 open, the last is 1>"
