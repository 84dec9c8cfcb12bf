"""The part of a replicated driver that asks the other ranks, and knows when a decision is due."""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from aexec.actor import handles
from aexec.actor.deadlines import Timer
from aexec.engine.driver import EngineDriver
from aexec.engine.replicated.agenda import Agenda, Item
from aexec.engine.replicated.calls import AskRanks, LookAtAgenda, RanksHeard, RanksLost
from aexec.errors import RanksDisagree

__all__ = ("RankRounds",)

_RETRY_SECONDS, _MOST_RETRY_SECONDS = 0.05, 1.0
_GRACE_SECONDS = 5.0  # in which the executor says itself that a rank does not come


class RankRounds(EngineDriver):
    """Holds rounds of agreement, one for each decision; see ``EngineDriver`` for its arguments."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._agenda = Agenda()
        self._is_asking = self._is_about_to_ask = False
        self._heard: list[str] | None = None  # for the next decision
        self._lacking: Mapping[str, Sequence[int]] = {}  # by the last round
        self._retry = _RETRY_SECONDS
        self._look: Timer | None = None
        self._insisting: Timer | None = None
        config = getattr(self._executor, "config", None)
        self._slow: float = getattr(config, "slow_call", 10.0)
        self._patience: float = getattr(config, "distributed_timeout", 300.0) + _GRACE_SECONDS

    @abc.abstractmethod
    def _decide(self, todo: list[Callable[[], object]]) -> None:
        """Take the outcome of the oldest step, if there is one, do what was agreed, and launch what there is to run."""

    def _put(self, item: Item) -> None:
        """Have something done on all ranks."""
        self._agenda.add(item)
        if item.presses and self._look is None:
            self._look = self.context.after(min(self._slow, self._patience), LookAtAgenda())
        self._ask_soon()

    def _proceed(self) -> None:
        """Decide as long as all is there that a decision takes."""
        while self._heard is not None and (self._in_flight.has_landed or not self._in_flight):
            heard, self._heard = self._heard, None
            if heard:
                self._retry = _RETRY_SECONDS
            self._decide(self._agenda.hear(heard))
            self._ask_soon()

    # ------------------------------------------------------------ rounds

    def _ask_soon(self) -> None:
        """Ask the ranks for the next decision, if there will be one; at once if steps run.

        Otherwise after what is in the mailbox by now, so that it is in the same round.
        """
        if self._is_asking or self._heard is not None or self._outages.recovery.failure is not None:
            return
        if self._in_flight:
            self._ask()
        elif not self._is_about_to_ask:
            self._agenda.tidy()
            if self._agenda.wants_round:
                self._is_about_to_ask = True
                self.context.after(0.0, AskRanks())
            elif self._agenda.is_pressing and self._insisting is None:  # others may have by now what they lacked
                self._insisting = self.context.after(self._retry, AskRanks(insists=True))
                self._retry = min(2 * self._retry, _MOST_RETRY_SECONDS)

    @handles(AskRanks)
    def ask_ranks(self, message: AskRanks) -> None:
        """Do so, unless it was done meanwhile, or there is no reason any longer."""
        if message.insists:
            self._insisting = None
            self._agenda.insist()
        else:
            self._is_about_to_ask = False
        if self._is_asking or self._heard is not None or self._outages.recovery.failure is not None:
            return
        self._agenda.tidy()
        if self._in_flight or self._agenda.wants_round:
            self._ask()

    def _ask(self) -> None:
        self._is_asking = True
        self.context.pipe_to_self(self._executor.agree(self._agenda.say()), RanksHeard, RanksLost)

    @handles(RanksHeard)
    def ranks_heard(self, message: RanksHeard) -> None:
        """All ranks have said what they have: decide, if the oldest step is through."""
        self._is_asking = False
        if self._outages.recovery.failure is None:
            self._heard, self._lacking = message.result
            self._proceed()

    @handles(RanksLost)
    def ranks_lost(self, message: RanksLost) -> None:
        """Without the others nothing can be run: end all requests."""
        self._is_asking = False
        self._give_up(message.error)

    def _give_up(self, error: Exception) -> None:
        self._outages.failed(error)
        self._heard = None
        self._after_loss()

    # ------------------------------------------------------------ what waits for too long

    @handles(LookAtAgenda)
    def look_at_agenda(self, message: LookAtAgenda) -> None:
        """Say what has waited for other ranks for a while, and end what has for too long."""
        del message
        self._look, now = None, self.context.now()
        for item in [item for item in self._agenda if item.presses]:
            if now - item.since >= self._patience and item.fail is not None:
                self._end(item)
            elif now - item.since >= self._slow and not item.is_told:
                item.is_told = True
                self.context.log.warning(
                    "waits for other ranks",
                    what=item.key,
                    seconds=round(now - item.since, 1),
                    lacking=self._who_lacks(item),
                )
        limits = [
            item.since + (self._patience if item.is_told else self._slow) - now
            for item in self._agenda
            if item.presses and not (item.is_told and item.fail is None)  # nobody is left who could be told
        ]
        if limits:
            self._look = self.context.after(max(min(limits), _RETRY_SECONDS), LookAtAgenda())

    def _end(self, item: Item) -> None:
        """Give it up here; what is said in the round that is open may come nevertheless, and then goes on unread."""
        if item.fail is not None:
            item.fail(RanksDisagree(item.key, self._patience, self._who_lacks(item)))
        item.fail, item.presses = None, False
        self._agenda.withdraw(item)

    def _who_lacks(self, item: Item) -> Sequence[int]:
        """The ranks that were not asked for it, as far as they have said what they were asked for."""
        return self._lacking.get(item.key, ())
