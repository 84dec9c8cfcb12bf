"""What is agreed is what all ranks have been asked, and each rank knows what it has said."""

from __future__ import annotations

import pytest

from aexec.engine.replicated.agenda import Agenda, Item, Vote


class Rank:
    """An agenda, and what was done and dropped."""

    def __init__(self):
        self.agenda, self.done, self.dropped = Agenda(), [], []

    def put(self, key, **settings):
        item = Item(key, lambda: self.done.append(key), dropped=lambda: self.dropped.append(key), **settings)
        self.agenda.add(item)
        return item


def hold_round(*ranks):
    """All say what they have, and hear what all have said; returns that."""
    said = [rank.agenda.say() for rank in ranks]
    common = [key for key in said[0] if all(key in each for each in said[1:])]
    for rank in ranks:
        for run in rank.agenda.hear(common):
            run()
    return common


@pytest.fixture
def pair():
    return Rank(), Rank()


def test_what_all_have_is_done_in_the_first_ones_order(pair):
    """What one lacks stays on the agendas of the others."""
    for key in "abc":
        pair[0].put(key)
    for key in "cxa":
        pair[1].put(key)
    assert hold_round(*pair) == ["a", "c"]
    assert [rank.done for rank in pair] == [["a", "c"], ["a", "c"]]
    assert [[item.key for item in rank.agenda] for rank in pair] == [["b"], ["x"]]


def test_equal_keys_are_done_one_after_the_other(pair):
    """The first of each rank belongs together."""
    for rank, count in zip(pair, (3, 2), strict=True):
        for _ in range(count):
            rank.put("a")
    assert [hold_round(*pair) for _ in range(3)] == [["a"], ["a"], []]
    assert [len(rank.agenda) for rank in pair] == [1, 0]


def test_what_is_said_cannot_be_taken_back_while_the_round_is_open(pair):
    """Another rank may have said it too."""
    said, unsaid = pair[0].put("a"), None
    keys = pair[0].agenda.say()
    unsaid = pair[0].put("b")
    assert keys == ["a"]
    assert pair[0].agenda.withdraw(unsaid)
    assert not pair[0].agenda.withdraw(said)
    pair[0].agenda.hear([])
    assert pair[0].agenda.withdraw(said)
    assert pair[0].dropped == ["b", "a"]


def test_what_is_moot_is_not_said(pair):
    """It is dropped, and others wait for it in vain."""
    pair[0].put("a", is_moot=lambda: True)
    pair[1].put("a")
    assert hold_round(*pair) == []
    assert pair[0].dropped == ["a"]


def test_a_round_is_worth_it_for_news_that_all_are_sure_to_want(pair):
    """What was not agreed is said again with the next news, or when the rank insists."""
    rank, other = pair
    rank.put("a", presses=False)
    assert not rank.agenda.wants_round
    rank.put("b")
    assert rank.agenda.wants_round
    other.put("c")
    assert hold_round(*pair) == []
    assert not rank.agenda.wants_round
    assert rank.agenda.is_pressing
    rank.agenda.insist()
    assert rank.agenda.wants_round


def test_after_a_round_that_agreed_on_something_the_next_is_worth_it(pair):
    """The others may have said what comes next under the same key."""
    for rank in pair:
        rank.put("a")
        rank.put("a")
    hold_round(*pair)
    assert all(rank.agenda.wants_round for rank in pair)


@pytest.mark.parametrize(
    ("answers", "outcome"), [((True, True), True), ((True, False), False), ((False, False), False)]
)
def test_a_vote_is_decided_in_the_next_round(pair, answers, outcome):
    """Whoever says no says nothing, and all know it."""
    heard = []
    for rank, answer in zip(pair, answers, strict=True):
        rank.agenda.ask(Vote("grammar of a", answer, heard.append))
        assert rank.agenda.wants_round
    hold_round(*pair)
    assert heard == [outcome, outcome]
    assert not pair[0].agenda.wants_round or outcome


def test_it_can_be_printed(pair):
    """As numbers."""
    pair[0].put("a")
    hold_round(*pair)
    assert repr(pair[0].agenda) == "<Agenda: 1 wait for other ranks, 0 agreed in 1 rounds>"
    assert [item.key for item in pair[0].agenda.clear()] == ["a"]
    assert len(pair[0].agenda) == 0
