"""One generation of a node's ranks, as its agent has it: a worker group whose sink is the line to the leader."""

from __future__ import annotations

import asyncio
import dataclasses
import pickle
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

import anyio

from aexec.actor import Context
from aexec.config import ExecutorConfig
from aexec.errors import AexecError, ConfigError, ExecutorClosed, WorkerDied, note
from aexec.executor.group import GroupPlan
from aexec.executor.multiproc.group import MultiprocGroup
from aexec.executor.multiproc.share import NodeShare
from aexec.messages.base import Message
from aexec.messages.control import Dump, Ping
from aexec.messages.nodes import (
    Answer,
    Answers,
    Begin,
    Begun,
    Died,
    Failed,
    NotBegun,
    RankPhase,
    RankProgress,
    Stopped,
)
from aexec.transport import Kind
from aexec.transport.pickling import is_plain
from aexec.worker.remote import caller_error, departing

__all__ = ("HASTE", "HostedRanks", "NodePlace")

HASTE: Final = 0.5  #: Seconds for workers to end that nobody waits for any longer, before each kind of force.
_PROGRESS_EVERY = 0.2  # seconds

_MOST_QUESTIONS = 256  # whose answers are known to be urgent: some are never answered


class Tell(Protocol):
    """Sends to the leader; raises only if a value cannot travel."""

    def __call__(self, kind: Kind, call: int, value: Any, /, *, urgent: bool = False) -> None:
        """Send a frame; an ``urgent`` one passes all that waits."""


@dataclass(frozen=True, slots=True)
class NodePlace:
    """Which node this is.

    Attributes:
        node_rank: Its number, from 1.
        nnodes: How many there are.
        host: Its name, for people.
        address: By which the others reach it.
    """

    node_rank: int
    nnodes: int
    host: str
    address: str

    def __str__(self) -> str:
        return f"node {self.node_rank} ({self.host}, {self.address})"


class HostedRanks:
    """The ranks of one generation; it is its group's sink.

    Args:
        begin: What the leader wants.
        place: Which node this is.
        actor: The agent's context.
        tell: Sends to the leader; raises only if a value cannot travel.
    """

    def __init__(self, begin: Begin, place: NodePlace, actor: Context, tell: Tell) -> None:
        self.generation = begin.generation
        self.ranks = range(begin.first_rank, begin.first_rank + begin.num_ranks)
        self._begin, self._place, self._actor, self._tell = begin, place, actor, tell
        self._group: MultiprocGroup | None = None
        self._starting = anyio.CancelScope()
        self._start_is_over: asyncio.Event | None = None
        self._is_up = False
        self._progressed: dict[int, float] = {}  # by rank: when the leader was told last
        self._answers: list[Answer] = []
        self._questions: set[int] = set()  # calls whose answers pass others
        self._turn: asyncio.Handle | None = None
        self._loop = asyncio.get_running_loop()

    def __repr__(self) -> str:
        state = "up" if self._is_up else "starting or over"
        return f"<HostedRanks generation {self.generation}: ranks {self.ranks.start} to {self.ranks.stop - 1}, {state}>"

    async def start(self) -> Begun | NotBegun | None:
        """Bring the ranks to where their worker is constructed; None: :meth:`stop` was faster."""
        self._start_is_over = over = asyncio.Event()
        try:
            with self._starting:
                return await self._start()
        except Exception as error:  # noqa: BLE001 - the leader's caller is told, whatever it is
            return self._not_begun(error)
        finally:
            over.set()
        return None

    def send(self, call: int, message: Message[Any], ranks: Sequence[int]) -> None:
        """Hand a message to ranks of this node; what is wrong with it is the answer."""
        try:
            if self._group is None or not self._is_up:
                raise ExecutorClosed(f"the workers of {self._place} are not up")
            if isinstance(message, Ping | Dump):
                self._asked(call)
            self._group.send(call, message, ranks)
        except AexecError as error:
            for rank in ranks:
                self.failed(call, rank, error)

    async def stop(self, grace: float, *, in_haste: bool = False) -> Stopped:
        """End all ranks.

        Args:
            grace: Seconds for running work and ``shutdown`` hooks.
            in_haste: Nobody waits for them any longer: no step of their end takes long.
        """
        self._is_up = False
        self._starting.cancel()
        if self._start_is_over is not None:
            await self._start_is_over.wait()
        lines: Sequence[str] = ()
        if self._group is not None:
            if in_haste:
                self._group.plan = dataclasses.replace(self._group.plan, config=_hasty(self._group.plan.config))
            lines = await self._group.stop(grace)
        self._flush()
        return Stopped(generation=self.generation, lines=tuple(f"{self._place}: {line}" for line in lines))

    # As the group's sink.

    def phase(self, rank: int, phase: str) -> None:
        """See ``GroupSink``."""
        self._tell(Kind.EVENT, 0, RankPhase(self.generation, rank, phase))

    def progress(self, rank: int, phase: str, done: float, total: float) -> None:
        """See ``GroupSink``; told a few times a second, whatever the worker says: nobody looks more often."""
        now = self._loop.time()
        if done >= total or now - self._progressed.get(rank, 0.0) > _PROGRESS_EVERY:
            self._progressed[rank] = now
            self._tell(Kind.EVENT, 0, RankProgress(self.generation, rank, phase, done, total))

    def replied(self, call: int, rank: int, value: Any) -> None:
        """See ``GroupSink``; it goes when this turn of the loop is over, with others that come by then."""
        if call in self._questions:
            self._tell(Kind.REPLY, call, Answers([Answer(call, rank, value)]), urgent=True)
            return
        self._answers.append(Answer(call, rank, value))
        if self._turn is None:
            self._turn = self._loop.call_soon(self._flush)

    def failed(self, call: int, rank: int, error: BaseException) -> None:
        """See ``GroupSink``."""
        self._flush()
        leaving = departing(error, rank=rank, method="the call")
        self._tell(Kind.FAILURE, call, Failed(rank, leaving, _notes(error)))

    def died(self, error: WorkerDied) -> None:
        """See ``GroupSink``."""
        self._flush()  # what it has answered before counts
        self._tell(Kind.EVENT, 0, Died(generation=self.generation, error=self._of_this_node(error)))

    def lost(self, error: AexecError) -> None:
        """See ``GroupSink``; of processes, each end is told by itself."""
        raise error

    # Starting.

    async def _start(self) -> Begun:
        begin = self._begin
        config = await asyncio.to_thread(_settings, begin, str(self._place))
        MultiprocGroup.check(config)
        share = NodeShare(
            ranks=self.ranks,
            node_id=begin.node_id,
            node_ip=self._place.address,
            init_method=begin.init_method,
            secret=begin.secret,
        )
        group = self._group = MultiprocGroup(GroupPlan(config, begin.generation, self._actor, self), share)
        hellos = await group.start()
        self._is_up = True
        return Begun(
            generation=begin.generation,
            hellos=tuple(hellos),
            devices=tuple(place.device for place in group.places()),
            settings=dict(group.settings()),
            environment=dict(group.environment()),
        )

    def _not_begun(self, error: Exception) -> NotBegun:
        ours = caller_error(error, rank=self.ranks.start, method=f"the start of {self._place}")
        if isinstance(ours, WorkerDied):
            ours = self._of_this_node(ours)
        return NotBegun(generation=self.generation, error=ours, notes=_notes(ours))

    def _of_this_node(self, error: WorkerDied) -> WorkerDied:
        found = WorkerDied(
            error.rank, error.pid, error.exit_code, error.signal, error.phase, error.step, error.stderr_tail,
            node=error.node or self._begin.node_id, cause=error.cause,
        )  # fmt: skip
        for line in _notes(error):
            note(found, line)
        return found

    # Answering.

    def _asked(self, call: int) -> None:
        if len(self._questions) >= _MOST_QUESTIONS:
            self._questions.clear()
        self._questions.add(call)

    def _flush(self) -> None:
        answers, self._answers = self._answers, []
        if self._turn is not None:
            self._turn.cancel()
            self._turn = None
        plain: list[Answer] = []
        alone = answers
        if len(answers) > 1:
            plain = [each for each in answers if is_plain(each.value)]
            alone = [each for each in answers if not is_plain(each.value)]
        if plain:
            self._tell(Kind.REPLY, plain[0].call if len(plain) == 1 else 0, Answers(plain))
        for answer in alone:
            self._send_alone(answer)

    def _send_alone(self, answer: Answer) -> None:
        try:
            self._tell(Kind.REPLY, answer.call, Answers([answer]))
        except AexecError as error:
            self._tell(Kind.FAILURE, answer.call, Failed(answer.rank, error))


def _settings(begin: Begin, node: str) -> ExecutorConfig:
    """The leader's settings, with what they are made of imported here; blocks."""
    here = set(sys.path)
    sys.path.extend(entry for entry in begin.sys_path if entry and entry not in here and Path(entry).exists())
    try:
        config: object = pickle.loads(begin.config)  # noqa: S301 - the leader has proved that it knows the key
    except Exception as error:
        raise ConfigError(
            f"the executor's settings cannot be read on {node}: {type(error).__name__}: {error}. Install there what "
            "worker_cls, worker_init and worker_kwargs are made of, or have them in a folder that all nodes see"
        ) from error
    if not isinstance(config, ExecutorConfig):
        raise ConfigError(f"the leader sent {type(config).__name__} to {node}: expected an ExecutorConfig")
    return config


def _hasty(config: ExecutorConfig) -> ExecutorConfig:
    return dataclasses.replace(config, term_grace=min(config.term_grace, HASTE))


def _notes(error: BaseException) -> tuple[str, ...]:
    return tuple(getattr(error, "__notes__", ()))
