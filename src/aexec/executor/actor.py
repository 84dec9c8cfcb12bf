"""The executor as an actor: one worker group at a time, whatever the backend.

Every call is checked before anything is sent, then handed to the fan-out of the present
generation. A death ends all calls first; only then is anything cleaned up, and rebuilt
where ``ExecutorConfig.on_failure`` says so.
"""

from __future__ import annotations

import copy
import inspect
import itertools
import time
from collections.abc import Callable
from typing import Any

import anyio

from aexec.actor import Actor, Deferred, Exit, handles
from aexec.config import ExecutorConfig, Restart
from aexec.errors import AexecError, ExecutorClosed, ProtocolError, UnknownMethod, WorkerDied, note
from aexec.executor.board import Board
from aexec.executor.calls import CheckHealth, Close, Collective, Open, Wake
from aexec.executor.collective import Answers, Call, Lane
from aexec.executor.fanout import Fanout
from aexec.executor.generation import Generation
from aexec.executor.group import WorkerGroup
from aexec.executor.health import report
from aexec.executor.lifecycle import ExecutorEvent, ExecutorState, advance, refusal
from aexec.executor.restart import RestartBudget
from aexec.messages.base import Message
from aexec.messages.control import CallMethod, Ping
from aexec.messages.lifecycle import GroupRestarted, HealthReport, WorkerStarted
from aexec.messages.step import ExecuteModel, ForwardLaunched, SampleTokens, StepResult
from aexec.worker.context import Progress
from aexec.worker.names import name_of

__all__ = ("ExecutorActor",)


class ExecutorActor(Actor):
    """Runs one worker group, and rebuilds it if it is told to.

    Args:
        config: The settings.
        backend: Makes the group.
        board: What the façade reads.
        progress: Told how far a start has come.
    """

    def __init__(
        self, config: ExecutorConfig, backend: type[WorkerGroup], board: Board, progress: Progress | None = None
    ) -> None:
        self._config, self._backend, self._board, self._progress = config, backend, board, progress
        self._ids = itertools.count(1)
        self._now: Generation | None = None
        self._budget = RestartBudget(config.on_failure if isinstance(config.on_failure, Restart) else None)
        self._reason = ""
        self._up_again: float | None = None  # when the next restart begins
        self._rebuild: anyio.CancelScope | None = None
        self._rebuilt = anyio.Event()
        self._closers: list[Deferred[None]] = []

    def __repr__(self) -> str:
        return f"<ExecutorActor {self._board!r}, {self._budget!r}>"

    async def on_stop(self, reason: Exit) -> None:  # noqa: ARG002
        """Close, unless that was done; a close that was cut short is brought to its end."""
        await self._shut()
        if self._now is not None:
            await self._now.stop()

    @handles(Open)
    async def open(self, message: Open) -> None:  # noqa: ARG002
        """Bring up the first generation; its asker's cancellation ends that too.

        Raises:
            CallTimeout: ``start_timeout`` has passed.
            WorkerDied: A rank ended.
            AexecError: What a rank raised.
        """
        await self._bring_up()
        self._ready()

    @handles(Collective)
    def collective(self, message: Collective) -> Deferred[list[Any]]:
        """Call a worker method on ranks.

        Raises:
            UnknownMethod: The worker class has no such method; nothing was sent.
            AexecError: The executor is not ready.
        """
        fanout = self._fanout()
        lane = self._lane(message.method)
        reply: Deferred[list[Any]] = self.context.defer(message)

        def call_method(call: int) -> CallMethod:
            return CallMethod(call=call, method=message.method, args=message.args, kwargs=message.kwargs)

        name = message.method if isinstance(message.method, str) else name_of(message.method)
        timeout = self._remaining(message.timeout)
        ranks = message.ranks
        call = fanout.submit(name, call_method, reply, lane=lane, ranks=ranks, timeout=timeout, shape=_by_rank)
        reply.on_cancel(lambda: fanout.abandon(call))
        return reply

    @handles(ExecuteModel)
    def execute_model(self, message: ExecuteModel) -> Deferred[ForwardLaunched | StepResult]:
        """Launch a step on all ranks.

        Raises:
            UnknownMethod: The worker class runs no steps.
            AexecError: The executor is not ready.
        """
        fanout = self._fanout()
        self._lane("execute_model")
        reply: Deferred[ForwardLaunched | StepResult] = self.context.defer(message)
        self._step(fanout, "execute_model", message, reply)
        return reply

    @handles(SampleTokens)
    def sample_tokens(self, message: SampleTokens) -> Deferred[StepResult]:
        """Sample a step on all ranks.

        Raises:
            AexecError: The executor is not ready.
        """
        fanout = self._fanout()
        reply: Deferred[StepResult] = self.context.defer(message)
        self._step(fanout, "sample_tokens", message, reply)
        return reply

    @handles(CheckHealth)
    def check_health(self, message: CheckHealth) -> Deferred[HealthReport]:
        """Ask all ranks for their pulse.

        Raises:
            ExecutorClosed: It is.
        """
        if self._board.state in (ExecutorState.CLOSING, ExecutorState.CLOSED):
            raise ExecutorClosed("the executor is closed")
        reply: Deferred[HealthReport] = self.context.defer(message)

        async def check() -> None:
            reply.resolve(await self._health(message.timeout))

        self.context.start_task(check())
        return reply

    @handles(Close, lane="urgent")
    def close(self, message: Close) -> Deferred[None]:
        """End all calls and all workers; all who ask wait for the one end."""
        reply: Deferred[None] = self.context.defer(message)
        self._closers.append(reply)
        if self._board.state is ExecutorState.CLOSED:
            self._closed()
        elif self._board.state is not ExecutorState.CLOSING:
            self.context.start_task(self._shut())
        return reply

    @handles(Wake, lane="urgent")
    def wake(self, message: Wake) -> None:  # noqa: ARG002
        """The timer of the calls."""
        self._generation.fanout.wake()

    @property
    def _generation(self) -> Generation:
        assert self._now is not None, "the executor was not opened"
        return self._now

    def _fanout(self) -> Fanout:
        """Where calls go, if any can be taken."""
        state = self._board.state
        wait = None if self._up_again is None else max(self._up_again - time.monotonic(), 0.0)
        refused = refusal(state, self._reason, wait)
        if refused is not None:
            raise refused
        if state is ExecutorState.FAILED:
            failure = self._board.callbacks.failure
            assert failure is not None
            raise _again(failure)
        return self._generation.fanout

    def _lane(self, method: str | Callable[..., Any]) -> Lane:
        if not isinstance(method, str):
            return Lane.ASYNC if inspect.iscoroutinefunction(method) else Lane.SYNC
        hello = self._generation.hellos[0]
        if method not in hello.methods and not hello.dynamic:
            raise UnknownMethod(method, hello.worker, hello.public_methods)
        return Lane.ASYNC if hello.methods.get(method) else Lane.SYNC

    def _step(self, fanout: Fanout, name: str, message: Message[Any], reply: Deferred[Any]) -> None:
        output_rank = self._board.output_rank
        timeout = self._remaining(self._config.step_timeout)

        def output(answers: Answers) -> Any:
            return answers[output_rank]

        call = fanout.submit(name, lambda _: message, reply, lane=Lane.STEP, timeout=timeout, shape=output)
        reply.on_cancel(lambda: fanout.abandon(call))

    def _remaining(self, timeout: float | None) -> float | None:
        """The lesser of a limit and of the deadline that the asker itself is under."""
        inherited = self.context.deadline
        if inherited is None:
            return timeout
        left = max(inherited - time.monotonic(), 0.0)
        return left if timeout is None else min(timeout, left)

    async def _health(self, timeout: float) -> HealthReport:
        board, generation = self._board, self._generation
        everyone = set(range(board.world_size))
        up = board.state is ExecutorState.READY
        dead = frozenset(generation.dead if up else everyone)
        alive = sorted(everyone - dead)
        pongs: Answers = {}
        if alive:
            pongs = await generation.fanout.ask(
                "ping", lambda _: Ping(), lane=Lane.LIVENESS, ranks=alive, timeout=timeout
            )
        found = report(
            generation.number,
            board.world_size,
            pongs,
            dead | generation.dead,
            waited=timeout,
            stuck_after=self._config.step_timeout,
        )
        board.stuck = {rank.rank for rank in found.ranks if rank.state == "stuck"}
        return found

    async def _bring_up(self) -> None:
        self._now = Generation(
            self._backend,
            self._config,
            self.context,
            self._board,
            progress=self._progress,
            ids=self._ids,
            died=self._rank_died,
        )
        await self._now.start()

    def _ready(self) -> None:
        self._board.state = advance(self._board.state, ExecutorEvent.STARTED)
        self.context.log.info(
            "workers ready",
            backend=self._board.backend,
            ranks=self._board.world_size,
            generation=self._generation.number,
        )
        for hello in self._generation.hellos:
            started = WorkerStarted(rank=hello.rank, pid=hello.pid, generation=self._generation.number)
            self._board.events.emit(started)

    def _rank_died(self, error: WorkerDied) -> None:
        """End all calls, then see what becomes of the group."""
        if self._board.state in (ExecutorState.CLOSING, ExecutorState.CLOSED):
            return
        self.context.log.error("worker died", rank=error.rank, pid=error.pid, phase=error.phase, step=error.step)
        self._board.events.emit(error)
        if self._board.state is not ExecutorState.READY:
            return  # another rank of a group that is given up already
        now = time.monotonic()
        delay = self._budget.spend(now)
        if delay is None:
            self._give_up(error)
        else:
            self._board.state = advance(self._board.state, ExecutorEvent.DIED)
            self._reason, self._up_again = str(error).partition("\n")[0], now + delay
        self._generation.fanout.fail_all(lambda call: _for_call(error, call, now))
        self.context.start_task(self._generation.stop() if delay is None else self._restart(error, delay))

    def _give_up(self, error: AexecError) -> None:
        self._board.state = advance(self._board.state, ExecutorEvent.GAVE_UP)
        note(error, self._budget.verdict())
        self._board.callbacks.fire(error)

    async def _restart(self, reason: AexecError, delay: float | None) -> None:
        began = time.monotonic()
        self._rebuilt = anyio.Event()
        try:
            with anyio.CancelScope() as self._rebuild:
                await self._generation.stop()
                failure = await self._rebuild_within_budget(reason, delay)
                if failure is not None:
                    self._give_up(failure)
                    return
                self._ready()
                seconds = time.monotonic() - began
                restarted = GroupRestarted(generation=self._generation.number, reason=self._reason, seconds=seconds)
                self._board.events.emit(restarted)
        finally:
            self._rebuilt.set()
            self._rebuild = None

    async def _rebuild_within_budget(self, failure: AexecError, delay: float | None) -> AexecError | None:
        """Try until it works or the budget is used up: then the last failure."""
        while delay is not None:
            self._up_again = time.monotonic() + delay
            await anyio.sleep(delay)
            try:
                await self._bring_up()
            except AexecError as error:
                failure = error
            except Exception as error:  # noqa: BLE001 - a backend's own; the executor must not hang for it
                failure = note(ProtocolError(f"the backend raised {error!r}"), "while the group was rebuilt")
            else:
                return None
            delay = self._budget.spend(time.monotonic())
        return failure

    async def _shut(self) -> None:
        if self._board.state in (ExecutorState.CLOSING, ExecutorState.CLOSED):
            return
        self._board.state = advance(self._board.state, ExecutorEvent.CLOSE)
        if self._now is not None:
            self._now.fanout.fail_all(_closed_meanwhile)
        if self._rebuild is not None:
            self._rebuild.cancel()
            with anyio.CancelScope(shield=True):
                await self._rebuilt.wait()
        if self._now is not None:
            await self._now.stop()
        self._board.state = advance(self._board.state, ExecutorEvent.GONE)
        self._board.events.close()
        self._closed()

    def _closed(self) -> None:
        for reply in self._closers:
            reply.resolve(None)
        self._closers.clear()


def _closed_meanwhile(call: Call) -> ExecutorClosed:
    return ExecutorClosed(f"the executor was closed while {call.text} was pending")


def _by_rank(answers: Answers) -> list[Any]:
    return [answers[rank] for rank in sorted(answers)]


def _for_call(error: WorkerDied, call: Call, now: float) -> WorkerDied:
    """Each caller has its own, with what was known of the other ranks."""
    own = WorkerDied(*error.args)
    for line in (f"while {call.text} was pending", *call.others(error.rank, now)):
        note(own, line)
    return own


def _again(failure: AexecError) -> AexecError:
    """The failure that is past, for one more caller."""
    again = copy.copy(failure)
    again.__notes__ = list(getattr(failure, "__notes__", ()))
    again.add_note("the executor has failed for good: close it, and open another")
    return again
