"""What has been asked of this rank's engine, and waits until all ranks have been asked the same. Pure.

Each rank says in rounds what is on its agenda. What all have said is *agreed*: it leaves the
agendas, and happens on all ranks at the same place in their row of steps. Whatever a rank has
said in a round that is open it cannot take back: it may turn out to be agreed. What it has not
said yet, or what was not agreed, it may (:meth:`Agenda.withdraw`).

The same key may be on the agenda several times, for what is asked several times in the same
words; the first of them is meant then.

A *vote* is a question about which all ranks have agreed to answer in the very next round: its
key is said by those who say yes, and what is not agreed has been denied.

While steps run there is a round for each, whatever there is to say. Without steps a rank opens
one only for what all are sure to want (:attr:`Agenda.is_pressing`), and for news: what was not agreed in the last round would not be in the next, unless another rank had news. A rank
that cannot know whether another has asks again after a while (:meth:`Agenda.insist`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

__all__ = ("Agenda", "Item", "Vote", "never")


def never() -> bool:
    """It has to be done in any case."""
    return False


def _nothing() -> None:
    """Nobody wants to know."""


@dataclass(slots=True, eq=False)
class Item:
    """Something that was asked of this rank.

    Attributes:
        key: What all ranks call it.
        run: Does it, once it is agreed.
        since: When it came.
        fail: Tells whoever asked that it will not be; None: nobody who could be told waits for it.
        presses: All ranks are sure to want it; if not, one that does so alone is no reason to ask them.
        is_moot: It need not be any longer; asked before each round.
        dropped: Called when it is off the agenda and was not done: it was withdrawn, or moot.
        is_told: That it waits for other ranks was told.
    """

    key: str
    run: Callable[[], object]
    since: float = 0.0
    fail: Callable[[Exception], object] | None = None
    presses: bool = True
    is_moot: Callable[[], bool] = never
    dropped: Callable[[], object] = _nothing
    is_told: bool = field(default=False, init=False)


@dataclass(slots=True, eq=False)
class Vote:
    """A question that this rank answers in the next round.

    Attributes:
        key: What all ranks call it.
        is_yes: This rank's answer.
        run: Told whether all ranks say yes.
    """

    key: str
    is_yes: bool
    run: Callable[[bool], object]


class Agenda:
    """All that waits for other ranks, in the order in which it came.

    Attributes:
        num_rounds: Rounds that were held.
        num_agreed: What was agreed in them.
    """

    def __init__(self) -> None:
        self._items: dict[str, deque[Item]] = {}  # by key
        self._votes: list[Vote] = []
        self._said: dict[str, Item] = {}  # in the round that is open
        self._asked: list[Vote] = []
        self._has_news = False
        self.num_rounds = self.num_agreed = 0

    def __len__(self) -> int:
        """How much there is."""
        return sum(map(len, self._items.values()))

    def __iter__(self) -> Iterator[Item]:
        """All of it; what has the same key stands together."""
        return (item for items in self._items.values() for item in items)

    def __repr__(self) -> str:
        """As in ``<Agenda: 3 wait for other ranks, 2 agreed in 12 rounds>``."""
        return f"<Agenda: {len(self)} wait for other ranks, {self.num_agreed} agreed in {self.num_rounds} rounds>"

    # ------------------------------------------------------------ what comes and goes

    def add(self, item: Item) -> None:
        """Say it from the next round on."""
        self._items.setdefault(item.key, deque()).append(item)
        self._has_news = True

    def has(self, key: str) -> bool:
        """Something of this key is there."""
        return key in self._items

    def ask(self, vote: Vote) -> None:
        """Answer it in the next round, as all ranks will."""
        self._votes.append(vote)

    def withdraw(self, item: Item) -> bool:
        """Take back what need not be; False: it is said in the round that is open, or is not there any longer."""
        if self._said.get(item.key) is item or not self._remove(item):
            return False
        item.dropped()
        return True

    def tidy(self) -> None:
        """Drop what is moot; to be called while no round is open."""
        for item in [item for item in self if item.is_moot()]:
            self.withdraw(item)

    def clear(self) -> list[Item]:
        """Nothing will be agreed any longer; returns what there was."""
        items = list(self)
        self._items.clear()
        self._votes.clear()
        return items

    # ------------------------------------------------------------ rounds

    @property
    def is_pressing(self) -> bool:
        """There is something that all ranks are sure to want."""
        return bool(self._votes) or any(item.presses for item in self)

    @property
    def wants_round(self) -> bool:
        """A round without steps is worth it."""
        return bool(self._votes) or (self._has_news and self.is_pressing)

    def insist(self) -> None:
        """Say once more what was not agreed: another rank may have it by now."""
        self._has_news = True

    def say(self) -> list[str]:
        """Open a round; returns this rank's keys."""
        self.tidy()
        self._said = {key: items[0] for key, items in self._items.items()}
        self._asked, self._votes = self._votes, []
        self._has_news = False
        return [*(vote.key for vote in self._asked if vote.is_yes), *self._said]

    def hear(self, agreed: Iterable[str]) -> list[Callable[[], object]]:
        """Close the round; returns what is to be done now, in order."""
        said, self._said = self._said, {}
        asked, self._asked = self._asked, []
        common = dict.fromkeys(agreed)
        self.num_rounds += 1
        self.num_agreed += len(common)
        self._has_news = self._has_news or bool(common)  # others may have had what was next under the same key
        todo: list[Callable[[], object]] = [_answered(vote, is_yes=vote.key in common) for vote in asked]
        for item in filter(None, map(said.get, common)):
            self._remove(item)
            todo.append(item.run)
        return todo

    def _remove(self, item: Item) -> bool:
        items = self._items.get(item.key)
        if items is None or item not in items:
            return False
        items.remove(item)
        if not items:
            del self._items[item.key]
        return True


def _answered(vote: Vote, *, is_yes: bool) -> Callable[[], object]:
    return lambda: vote.run(is_yes)
