"""The steps of one rank, in order: what may run, what has to wait, what a failure spoils. Pure.

Whoever runs steps, an actor with a compute thread or the main thread of a worker process,
asks this book and does as it says. The rules, besides the table of ``messages.step``:

* A forward pass that fails says so at its sampling; the step is dropped, the next goes on.
* Samplings run in step order: one that is asked for before that of an older step waits for it.
"""

from __future__ import annotations

from typing import Generic, NamedTuple, TypeVar

import msgspec

from aexec.messages.batch import GrammarOutput
from aexec.messages.step import ExecuteModel, StepId
from aexec.model.steps import StepTable

__all__ = ("Forward", "Sampling", "StepBook", "StepStatistics")

R = TypeVar("R")


class StepStatistics(NamedTuple):
    """Counts of steps.

    Attributes:
        pending: Steps that wait for their sampling.
        executed: Steps that were accepted.
        finished: Steps that had their result.
        failed: Steps whose asker was given the error of their forward pass or sampling.
    """

    pending: int
    executed: int
    finished: int
    failed: int


class Forward(msgspec.Struct, eq=False):
    """One forward pass, queued or done, until its step is sampled; a struct is made quickly."""

    error: Exception | None = None


class Sampling(msgspec.Struct, Generic[R], frozen=True, eq=False):
    """A sampling that was asked for.

    Attributes:
        step: Whose.
        grammar: What the tokens are masked with.
        reply: Where its end goes.
        forward: The step's forward pass.
    """

    step: StepId
    grammar: GrammarOutput | None
    reply: R
    forward: Forward


class StepBook(Generic[R]):
    """All steps of one rank."""

    def __init__(self) -> None:
        self.table = StepTable()
        self._forwards: dict[StepId, Forward] = {}
        self._asked: dict[StepId, Sampling[R]] = {}
        self._executed = self._finished = self._failed = 0

    def __repr__(self) -> str:
        return f"<StepBook: {self.table!r}, {len(self._asked)} samplings wait>"

    def statistics(self) -> StepStatistics:
        """Counts so far."""
        return StepStatistics(len(self.table.pending), self._executed, self._finished, self._failed)

    def execute(self, message: ExecuteModel, *, samples: bool) -> Forward | None:
        """Accept a step; None: it runs whole, for it has no tokens, or its runner does not sample.

        Raises:
            StepStateError: It was sent before, or its id does not increase.
        """
        whole = message.num_tokens == 0 or not samples
        self.table.execute(message.step, whole=whole)
        self._executed += 1
        if whole:
            return None
        forward = self._forwards[message.step] = Forward()
        return forward

    def forward_ended(self, step: StepId, error: Exception | None) -> None:
        """Its forward pass is through; see :meth:`take_ready` after an error."""
        if error is None:
            self.table.forward_done(step)

    def spend(self, step: StepId) -> Forward:
        """Its sampling is asked for; if its forward pass has failed by now, that was its end.

        Raises:
            StepStateError: The step is unknown, sampled already, or was dropped.
        """
        forward = self._forwards.pop(step, None)
        if forward is not None and forward.error is not None:
            self._failed += 1
            self.table.drop(step, _raised("execute_model", forward.error))
        else:
            self.table.sample(step)
        assert forward is not None
        return forward

    def ask(self, sampling: Sampling[R]) -> list[Sampling[R]]:
        """Keep it until it may run; returns what may run now, as :meth:`take_ready`."""
        if not self._asked and not self._forwards:  # as ever, with one step in flight
            return [sampling]
        self._asked[sampling.step] = sampling
        return self.take_ready()

    def take_ready(self) -> list[Sampling[R]]:
        """What was asked for and has no older step before it that may yet be sampled, in step order."""
        if not self._asked:
            return []
        oldest = min((step for step, forward in self._forwards.items() if forward.error is None), default=None)
        ready = [step for step in sorted(self._asked) if oldest is None or step < oldest]
        return [self._asked.pop(step) for step in ready]

    def ended(self, step: StepId, forward: Forward | None, error: Exception | None) -> str:
        """A sampling, or a whole step, is through; in which method it was."""
        phase = "execute_model" if forward is None or forward.error is not None else "sample_tokens"
        if error is None:
            self._finished += 1
        else:
            self._failed += 1
            self.table.spoil(step, _raised(phase, error))
        return phase

    def drop_all(self, why: str) -> None:
        """Give up all steps that wait for their sampling; later messages for them are told why."""
        for step in self.table.pending:
            self.table.drop(step, why)
        self._forwards.clear()


def _raised(phase: str, error: Exception) -> str:
    return f"its {phase} raised {type(error).__name__}"
