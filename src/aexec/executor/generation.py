"""One worker group, from its start to its end."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import anyio

from aexec.actor import Context
from aexec.config import ExecutorConfig
from aexec.errors import AexecError, CallTimeout, WorkerDied, note
from aexec.executor.board import Board
from aexec.executor.collective import CAUSE_WINDOW, Lane
from aexec.executor.fanout import STACK_GRACE, Fanout
from aexec.executor.group import GroupPlan, WorkerGroup
from aexec.executor.progress import StartProgress
from aexec.executor.start import run_hooks
from aexec.messages.control import Dump, Hello
from aexec.messages.lifecycle import SlowCall
from aexec.worker.context import Progress

__all__ = ("RETIRE_BUDGET", "Generation", "stop_budget")

RETIRE_BUDGET = 15.0  #: Seconds for what generations share to be given back, where there is such a thing.
_SLACK = 3.0  # seconds for what comes with force: letting go of helpers, files and lines


def stop_budget(config: ExecutorConfig) -> float:
    """Seconds that the end of a group may take in all: grace, force, and some slack."""
    return config.close_grace + config.term_grace + config.kill_grace + _SLACK


class Generation:
    """A group, its calls, and what becomes known of its ranks; it is the group's sink.

    Args:
        backend: Makes the group.
        config: The executor's settings.
        actor: The executor's context.
        board: Where what is known of the ranks goes.
        progress: Told how far the start has come.
        ids: Call ids.
        died: Told of deaths after the start.
        lost: Told, after the start, that the group can do nothing more.
        timed_out: Told of calls past their limit that had started.
        previous: The generation before it, which has stopped.
    """

    def __init__(
        self,
        backend: type[WorkerGroup],
        config: ExecutorConfig,
        actor: Context,
        board: Board,
        *,
        progress: Progress | None,
        ids: itertools.count[int],
        died: Callable[[WorkerDied], None],
        lost: Callable[[AexecError], None],
        timed_out: Callable[[CallTimeout], None],
        previous: Generation | None = None,
    ) -> None:
        self.number = board.new_generation()
        self.hellos: tuple[Hello, ...] = ()
        self.dead: set[int] = set()
        self._config, self._board, self._died, self._lost = config, board, died, lost
        self._log = actor.log
        self._progress = StartProgress(progress, board.world_size)
        self._starting = anyio.CancelScope()
        self._limit = anyio.CancelScope()
        self._ready = self._stopped = self._retired = False
        self._stop_lock = anyio.Lock()
        self._killer: AexecError | None = None
        before = previous.group if previous else None
        if before is not None:  # it hands over all that it took over: no chain of those that were
            before.plan = dataclasses.replace(before.plan, previous=None)
        self.group: WorkerGroup = backend(GroupPlan(config, self.number, actor, self, before))
        self.fanout = Fanout(
            self.group,
            actor,
            ids=ids,
            world_size=board.world_size,
            slow_every=config.slow_call,
            emit=self._slow,
            timed_out=timed_out,
            look=board.process_state,
        )
        board.group, board.fanout, board.dead = self.group, self.fanout, self.dead

    def __repr__(self) -> str:
        return f"<Generation {self.number}: {'ready' if self._ready else 'starting'}, {len(self.dead)} dead>"

    async def start(self) -> None:
        """Bring all ranks to where they can take steps; leaves nothing behind when that fails.

        Raises:
            CallTimeout: ``start_timeout`` has passed without progress; the notes say what each rank was doing.
            WorkerDied: A rank ended.
            AexecError: What a rank raised.
        """
        try:
            await self._start()
        except BaseException as error:
            self.group.given_up(error)
            await self.stop()
            raise

    async def stop(self) -> None:
        """End all workers, once, within ``close_grace`` and what force takes."""
        async with self._stop_lock:
            if not self._stopped:
                await self._stop_group()
            self._stopped = True

    async def retire(self) -> None:
        """End all workers, and give back what generations share: none follows."""
        await self.stop()
        async with self._stop_lock:
            if not self._retired:
                await self._retire_group()
            self._retired = True

    def phase(self, rank: int, phase: str) -> None:
        """See ``GroupSink``."""
        self._move_on()
        self._board.phases[rank] = phase
        self._progress.phase(phase, sum(at == phase for at in self._board.phases.values()))

    def progress(self, rank: int, phase: str, done: float, total: float) -> None:
        """See ``GroupSink``."""
        if self._progress.report(rank, phase, done, total):
            self._move_on()

    def replied(self, call: int, rank: int, value: Any) -> None:
        """See ``GroupSink``."""
        self.fanout.replied(call, rank, value)

    def failed(self, call: int, rank: int, error: BaseException) -> None:
        """See ``GroupSink``."""
        self.fanout.failed(call, rank, error)

    def died(self, error: WorkerDied) -> None:
        """See ``GroupSink``."""
        self.dead.add(error.rank)
        self._board.phases[error.rank] = "ended"
        if self._ready:
            self._died(error)
        else:
            self._end_start(error)

    def lost(self, error: AexecError) -> None:
        """See ``GroupSink``."""
        if self._ready:
            self._lost(error)
        else:
            self._end_start(error)

    def _end_start(self, error: AexecError) -> None:
        if self._killer is None:
            self._killer = error
            self._starting.cancel()
        else:
            note(self._killer, f"as well: {error}".partition("\n")[0])

    async def _start(self) -> None:
        with self._limit, self._starting:
            self._move_on()
            self.hellos = self._board.hellos = tuple(await self.group.start())
            await run_hooks(self.fanout, self.hellos, self._hook)
            self._ready = True
            return
        if self._killer is None:
            raise await self._too_late()
        await self._hear_others(self._killer)
        raise self._killer

    async def _hear_others(self, cause: AexecError) -> None:
        """The first death is the cause; what the other ranks raised before and in this moment follows from it."""
        calls = list(self.fanout.book.open.values())
        await anyio.sleep(CAUSE_WINDOW)
        for call in calls:
            for rank, error in call.errors.items():
                note(cause, f"rank {rank} raised as well: {type(error).__name__}: {error}".partition("\n")[0])

    async def _stop_group(self) -> None:
        with anyio.CancelScope(shield=True), anyio.move_on_after(stop_budget(self._config)) as limit:
            lines = await self.group.stop(self._config.close_grace)
            if lines:  # one line in all: a terminal that was interrupted has enough to show
                self._log.warning("not all workers ended by themselves", what="; ".join(lines))
        if limit.cancelled_caught:
            self._log.error("the workers could not be ended in time", group=repr(self.group))

    async def _retire_group(self) -> None:
        with anyio.CancelScope(shield=True), anyio.move_on_after(RETIRE_BUDGET) as limit:
            await self.group.retire()
        if limit.cancelled_caught:
            self._log.error(
                "what the group's generations share could not be given back in time", group=repr(self.group)
            )

    def _move_on(self) -> None:
        """The start has come further: its limit counts from here."""
        self._limit.deadline = asyncio.get_running_loop().time() + self._config.start_timeout

    def _slow(self, call: SlowCall) -> None:
        self._board.events.emit(call)

    def _hook(self, hook: str, ranks_done: int) -> None:
        self._move_on()
        if not ranks_done:
            self._board.phases.update(dict.fromkeys(self._board.phases, hook))
        self._progress.phase(hook, ranks_done)

    async def _too_late(self) -> CallTimeout:
        error = CallTimeout("the start of the workers", self._config.start_timeout, started=True)
        stacks = dict(self.group.stacks())
        if self.hellos:
            stacks |= await self.fanout.ask("dump", lambda _: Dump(), lane=Lane.LIVENESS, timeout=STACK_GRACE)
        for info in self._board.ranks():
            stack = stacks.get(info.rank, "").rstrip()
            note(error, f"rank {info.rank} (pid {info.pid}) is at {info.phase}" + (f"\n{stack}" if stack else ""))
        return error
