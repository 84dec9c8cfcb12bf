"""What the executor's façade may read without asking: the actor writes it, nobody else does."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import NamedTuple

from aexec.executor.base import ExecutorEvent
from aexec.executor.callbacks import FailureCallbacks
from aexec.executor.fanout import Fanout
from aexec.executor.group import WorkerGroup
from aexec.executor.lifecycle import ExecutorState
from aexec.messages.control import Hello
from aexec.messages.lifecycle import RankInfo, RankState
from aexec.observe.hub import EventHub

__all__ = ("Board", "ExecutorStatistics")


class ExecutorStatistics(NamedTuple):
    """Figures of an executor; counts are of its current generation.

    Attributes:
        state: See ``ExecutorState``.
        generation: Counts its worker groups, from 1.
        open: Calls that have not ended, or whose ranks have not all answered.
        queued: Those of them that wait for their turn.
        ended: Calls that all ranks have answered.
        errors: Answers that were errors.
        timeouts: Calls that passed their limit.
        late: Answers that came after their call's end, and were dropped.
    """

    state: str
    generation: int
    open: int
    queued: int
    ended: int
    errors: int
    timeouts: int
    late: int


class Board:
    """The state of one executor, for reading."""

    def __init__(self, backend: str, world_size: int, output_rank: int) -> None:
        self.backend, self.world_size, self.output_rank = backend, world_size, output_rank
        self.state = ExecutorState.STARTING
        self.generation = 0
        self.events = EventHub[ExecutorEvent]()
        self.callbacks = FailureCallbacks()
        self.hellos: tuple[Hello, ...] = ()
        self.group: WorkerGroup | None = None
        self.fanout: Fanout | None = None
        self.phases: dict[int, str] = {}
        self.dead: set[int] = set()
        self.stuck: set[int] = set()

    def __repr__(self) -> str:
        ranks = f"{self.world_size} rank{'s' * (self.world_size > 1)}"
        calls = self.fanout.book if self.fanout else None
        pending = f"{len(calls.open)} pending" if calls else "no calls"
        return f"<Executor {self.backend}: {ranks}, generation {self.generation}, {self.state.value}, {pending}>"

    def new_generation(self) -> int:
        """Forget the ranks of the last one."""
        self.generation += 1
        self.hellos = ()
        self.phases = dict.fromkeys(range(self.world_size), "starting")
        self.dead, self.stuck = set(), set()
        return self.generation

    def ranks(self) -> tuple[RankInfo, ...]:
        """All ranks, as they are seen now."""
        seen: Mapping[int, str] = self.group.phases() if self.group else {}
        return tuple(self._rank(rank, seen.get(rank) or self._phase(rank)) for rank in range(self.world_size))

    def statistics(self) -> ExecutorStatistics:
        """The figures so far."""
        state, generation, fanout = self.state.value, self.generation, self.fanout
        if fanout is None:
            return ExecutorStatistics(state, generation, 0, 0, 0, 0, 0, 0)
        book = fanout.book
        counts = (len(book.open), book.queued, book.ended, fanout.errors, fanout.timeouts, book.late)
        return ExecutorStatistics(state, generation, *counts)

    def dump(self) -> str:
        """All that helps to find a hang, as text."""
        stacks: Mapping[int, str] = self.group.stacks() if self.group else {}
        lines = [repr(self)]
        for info in self.ranks():
            lines.append(f"rank {info.rank}: pid {info.pid} on {info.node}, {info.state}, {info.phase}")
            lines += [f"  {line}" for line in stacks.get(info.rank, "").splitlines()]
        return "\n".join([*lines, *self._calls()])

    def _calls(self) -> list[str]:
        if self.fanout is None:
            return []
        now = time.monotonic()
        return [
            f"call {call.id}: {call.text}, {'sent' if call.sent else 'queued'}, for {now - call.since:.3g} s, "
            f"waits for ranks {sorted(call.missing)}{'' if call.waiter else ' (its caller is gone)'}"
            for call in self.fanout.book.open.values()
        ]

    def _phase(self, rank: int) -> str:
        """What it was last told to do, where it cannot be looked at."""
        if self.state is not ExecutorState.READY or rank in self.dead or self.fanout is None:
            return self.phases.get(rank, "unknown")
        return next((call.name for call in self.fanout.book.under_way(rank)), "idle")

    def _rank(self, rank: int, phase: str) -> RankInfo:
        hello = self.hellos[rank] if self.hellos else None
        pid, node = (hello.pid, hello.node) if hello else (0, "")
        return RankInfo(rank=rank, pid=pid, node=node, phase=phase, state=self._rank_state(rank))

    def _rank_state(self, rank: int) -> RankState:
        if rank in self.dead:
            return "dead"
        if self.state in (ExecutorState.CLOSING, ExecutorState.CLOSED):
            return "stopped"
        if self.state is not ExecutorState.READY:
            return "starting" if self.state is not ExecutorState.FAILED else "stopped"
        return "stuck" if rank in self.stuck else "ready"
