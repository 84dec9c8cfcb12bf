"""What the executor's façade may read without asking: the actor writes it, nobody else does."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from aexec.executor.base import ExecutorEvent
from aexec.executor.callbacks import FailureCallbacks
from aexec.executor.direct import Taker
from aexec.executor.fanout import Fanout
from aexec.executor.gate import StepGate
from aexec.executor.group import WorkerGroup
from aexec.executor.lifecycle import ExecutorState
from aexec.executor.memory import Memory
from aexec.executor.proc import process_state
from aexec.messages.control import Hello
from aexec.messages.lifecycle import RankInfo, RankState
from aexec.observe.hub import EventHub

__all__ = ("Board", "ExecutorStatistics")

_UP = (ExecutorState.READY, ExecutorState.DRAINING)


class ExecutorStatistics(NamedTuple):
    """Figures of an executor; counts are of its current generation.

    Calls of the executor itself (start, health, stacks) count, and calls that took the short way past its
    actor's mailbox do, which ``handled`` of ``ActorStatistics`` leaves out.

    Attributes:
        state: See ``ExecutorState``.
        generation: Counts its worker groups, from 1.
        open: Calls that have not ended, or whose ranks have not all answered.
        queued: Those of them that wait for their turn.
        ended: Calls that all ranks have answered.
        errors: Answers that were errors.
        timeouts: Calls that passed their limit.
        late: Answers that came after their call's end, and were dropped.
        steps_in_flight: Steps that the ranks have, and have not ended.
        steps_waiting: Steps that wait for a place among them, or for the end of a pause.
        max_concurrent_steps: How many may be in flight.
        paused: How it is paused: ``abort``, ``finish`` or ``keep``; empty: it is not.
        memory: ``ready``, or what of the model is asleep or missing.
    """

    state: str
    generation: int
    open: int
    queued: int
    ended: int
    errors: int
    timeouts: int
    late: int
    steps_in_flight: int = 0
    steps_waiting: int = 0
    max_concurrent_steps: int = 0
    paused: str = ""
    memory: str = "ready"


class Board:
    """The state of one executor, for reading."""

    def __init__(self, backend: str, world_size: int, output_rank: int, *, is_replicated: bool = False) -> None:
        self.backend, self.world_size, self.output_rank = backend, world_size, output_rank
        self.is_replicated = is_replicated
        self.state = ExecutorState.STARTING
        self.generation = 0
        self.events = EventHub[ExecutorEvent]()
        self.callbacks = FailureCallbacks()
        self.hellos: tuple[Hello, ...] = ()
        self.group: WorkerGroup | None = None
        self.fanout: Fanout | None = None
        self.gate: StepGate | None = None
        self.memory: Memory | None = None
        self.taker: Taker | None = None
        self.phases: dict[int, str] = {}
        self.dead: set[int] = set()
        self.stuck: set[int] = set()

    def __repr__(self) -> str:
        ranks = f"{self.world_size} rank{'s' * (self.world_size > 1)}"
        calls = self.fanout.book if self.fanout else None
        pending = f"{len(calls.open)} pending" if calls else "no calls"
        words = [
            f"{self.backend}: {ranks}",
            f"generation {self.generation}",
            self.state.value,
            *self._unusual(),
            pending,
        ]
        return f"<Executor {', '.join(words)}>"

    def new_generation(self) -> int:
        """Forget the ranks of the last one."""
        self.generation += 1
        self.hellos = ()
        self.phases = dict.fromkeys(range(self.world_size), "starting")
        self.dead, self.stuck = set(), set()
        self.memory = None
        return self.generation

    def ranks(self) -> tuple[RankInfo, ...]:
        """All ranks, as they are seen now."""
        seen: Mapping[int, str] = self.group.phases() if self.group else {}
        return tuple(self._rank(rank, seen.get(rank) or self._phase(rank)) for rank in range(self.world_size))

    def statistics(self) -> ExecutorStatistics:
        """The figures so far."""
        figures = ExecutorStatistics(self.state.value, self.generation, 0, 0, 0, 0, 0, 0)
        if (fanout := self.fanout) is not None:
            book = fanout.book
            figures = figures._replace(
                open=len(book.open), queued=book.queued, ended=book.ended, late=book.late,
                errors=fanout.errors, timeouts=fanout.timeouts,
            )  # fmt: skip
        if (gate := self.gate) is not None:
            figures = figures._replace(
                steps_in_flight=len(gate.flying), steps_waiting=len(gate.waiting),
                max_concurrent_steps=gate.limit, paused=gate.paused or "",
            )  # fmt: skip
        return figures._replace(memory=self.memory.state if self.memory else "not ready")

    def process_state(self, rank: int) -> str:
        """What the system says of a rank's process: running, stopped or dead; empty: it cannot be seen from here."""
        if rank in self.dead:
            return "dead"
        hello = self.hellos[rank] if self.hellos else None
        if hello is None or self.group is None or not self.group.is_here(hello):
            return ""
        return process_state(hello.pid)

    def _unusual(self) -> list[str]:
        """What a user should know who wonders why no step runs."""
        words = [f"paused ({self.gate.paused})"] if self.gate and self.gate.paused else []
        if self.memory and not self.memory.is_ready:
            words.append(self.memory.state)
        return words

    def _phase(self, rank: int) -> str:
        """What it was last told to do, where it cannot be looked at."""
        if self.state not in _UP or rank in self.dead or self.fanout is None:
            return self.phases.get(rank, "unknown")
        return next((call.name for call in self.fanout.book.under_way(rank)), "idle")

    def _rank(self, rank: int, phase: str) -> RankInfo:
        hello = self.hellos[rank] if self.hellos else None
        pid, node = (hello.pid, self.group.node_name(hello)) if hello and self.group else (0, "")
        return RankInfo(rank=rank, pid=pid, node=node, phase=phase, state=self._rank_state(rank))

    def _rank_state(self, rank: int) -> RankState:
        if rank in self.dead:
            return "dead"
        if self.state in (ExecutorState.CLOSING, ExecutorState.CLOSED):
            return "stopped"
        if self.state not in _UP:
            return "starting" if self.state is not ExecutorState.FAILED else "stopped"
        return "stuck" if rank in self.stuck else "ready"
