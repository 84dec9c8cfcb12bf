"""The executor that users hold: checks what can be checked here, and asks the actor."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import warnings
from collections.abc import Callable, Coroutine, Mapping, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar

import anyio

from aexec.actor import ActorSystem, Ref
from aexec.actor.envelope import here
from aexec.config import ExecutorConfig
from aexec.errors import ActorDied, AexecError, ConfigError, ExecutorClosed, WrongLoop
from aexec.executor.actor import ExecutorActor
from aexec.executor.base import ExecutorEvent, FailureCallback
from aexec.executor.board import Board, ExecutorStatistics
from aexec.executor.calls import Agree, CheckHealth, Close, Collective, Open
from aexec.executor.describe import Description, describe
from aexec.executor.direct import DirectReply, Reply, Taker
from aexec.executor.dump import dump_text
from aexec.executor.generation import RETIRE_BUDGET, stop_budget
from aexec.executor.group import WorkerGroup
from aexec.executor.lifecycle import ExecutorState
from aexec.executor.limits import (
    check_arguments,
    check_drain,
    check_method,
    check_ranks,
    check_reply_rank,
    check_timeout,
)
from aexec.executor.operations import Operations
from aexec.messages.base import Message
from aexec.messages.batch import GrammarOutput
from aexec.messages.lifecycle import HealthReport, RankInfo, RoundResult
from aexec.messages.step import ExecuteModel, ForwardLaunched, SampleTokens, StepId, StepResult
from aexec.observe.hub import EventStream
from aexec.worker.context import Progress

__all__ = ("ExecutorHandle", "start_executor")

R = TypeVar("R")

_OVER = (ExecutorState.CLOSING, ExecutorState.CLOSED)


class ExecutorHandle(Operations):
    """A running worker group; see :class:`aexec.executor.base.Executor`.

    Args:
        config: Its settings.
        ref: Its actor.
        board: What may be read without asking.
        system: The actor system to close with it.
    """

    def __init__(self, config: ExecutorConfig, ref: Ref[ExecutorActor], board: Board, system: ActorSystem) -> None:
        self.config = config
        self._ref, self._board, self._system = ref, board, system
        self._loop = asyncio.get_running_loop()
        self._closing: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        return repr(self._board)

    async def __aenter__(self) -> Self:
        """Itself: it is open already.

        Raises:
            ExecutorClosed: It is closed.
        """
        if self._closing is not None:
            raise ExecutorClosed("the executor is closed: open another one with `async with open_executor(config)`")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Close it."""
        await self.close()

    def __del__(self) -> None:
        if self._closing is None:
            text = f"{self!r} was never closed: use 'async with open_executor(...)', or await its close()"
            warnings.warn(text, ResourceWarning, source=self, stacklevel=2)

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self._board.world_size

    @property
    def output_rank(self) -> int:
        """The rank whose reply is the step's result."""
        return self._board.output_rank

    @property
    def generation(self) -> int:
        """Counts the worker groups of this executor, from 1."""
        return self._board.generation

    @property
    def state(self) -> ExecutorState:
        """Whether it takes steps now; see ``ExecutorState``."""
        return self._board.state

    @property
    def ranks(self) -> Sequence[RankInfo]:
        """Pid, node, phase and state of each rank, in rank order."""
        return self._board.ranks()

    @property
    def is_replicated(self) -> bool:
        """True: every rank's process has an executor of its own, and all of them have to be asked alike; see :meth:`agree`."""
        return self._board.is_replicated

    async def collective_rpc(
        self,
        method: str | Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        timeout: float | None = None,
        ranks: Sequence[int] | None = None,
        reply_rank: int | None = None,
    ) -> list[Any]:
        """Call a worker method by name, or a callable that takes the worker, on many ranks.

        Plain methods run on the worker's compute thread, in order with the steps;
        ``async def`` methods on its loop, beside them. A call that is given up before
        it began never runs; a plain method that runs can ask ``aexec.worker.cancelled()``.

        Args:
            method: Name of a method of the worker class, or a callable.
            args: Positional arguments.
            kwargs: Keyword arguments.
            timeout: One limit in seconds for the whole call; None takes ``rpc_timeout``.
            ranks: Which ranks, None for all.
            reply_rank: The one whose reply is wanted; those of the others stay where they
                are, and their errors count all the same. None: all.

        Returns:
            The replies in rank order; with a ``reply_rank`` just that one.

        Raises:
            UnknownMethod: The worker class has no such method; nothing was sent.
            CallTimeout: The limit has passed; the notes say what the ranks were doing.
            RemoteError: The first error that any rank raised, which also is an instance
                of its original type.
            WorkerDied: A rank ended meanwhile.
            ExecutorUnavailable: The group is being rebuilt.
            ExecutorClosed: The executor is closed.
            ConfigError: An argument cannot be meant.
        """
        name = check_method(method)
        limit = check_timeout(name, self.config.rpc_timeout if timeout is None else timeout)
        where = check_ranks(ranks, self.world_size)
        check_reply_rank(reply_rank, where)
        given, named = check_arguments(name, args, kwargs)
        call = Collective(method=method, args=given, kwargs=named, timeout=limit, ranks=where, reply_rank=reply_rank)
        taker = self._taker()
        if taker is None:
            return await self._ask(call)
        reply = DirectReply(self._loop)
        taker.take_call(call, reply, None)
        answers: list[Any] = await reply
        return answers

    async def execute_model(self, step: ExecuteModel) -> ForwardLaunched | StepResult:
        """Launch the forward pass of a step on all ranks; see ``messages.step``.

        Raises:
            StepStateError: The step was sent before, or its id does not increase.
            CallTimeout: ``step_timeout`` has passed.
            WorkerDied: A rank ended meanwhile.
            ExecutorUnavailable: The group is being rebuilt.
            ExecutorClosed: The executor is closed.
        """
        taker = self._taker()
        if taker is None:
            return await self._ask(step)
        reply = DirectReply(self._loop)
        taker.take_step(step, reply, None)
        launched: ForwardLaunched | StepResult | None = reply.value
        return await reply if launched is None else launched

    async def sample_tokens(self, step_id: StepId, grammar: GrammarOutput | None = None) -> StepResult:
        """Sample a launched step; the result is the output rank's.

        Raises:
            StepStateError: The step is unknown, sampled already, or was dropped.
            RemoteError: What its forward pass or its sampling raised on any rank.
            CallTimeout: ``step_timeout`` has passed.
            WorkerDied: A rank ended meanwhile.
            ExecutorUnavailable: The group is being rebuilt.
            ExecutorClosed: The executor is closed.
        """
        message, taker = SampleTokens(step_id, grammar), self._taker()
        if taker is None:
            return await self._ask(message)
        reply = DirectReply(self._loop)
        taker.take_sampling(message, reply, None)
        sampled: StepResult = await reply
        return sampled

    def post(self, message: ExecuteModel | SampleTokens, reply: Reply, /) -> bool:
        """Take a step call at once, on this loop, for whoever can do without a task that awaits it.

        Args:
            message: What :meth:`execute_model` and :meth:`sample_tokens` would send.
            reply: Given what they would return or raise, at the earliest before this returns.

        Returns:
            False: it was not taken, as there is no short way now; await one of these.
        """
        taker = self._taker()
        if taker is None:
            return False
        try:
            if isinstance(message, ExecuteModel):
                taker.take_step(message, reply, None)
            else:
                taker.take_sampling(message, reply, None)
        except AexecError as error:
            reply.fail(error)
        return True

    async def agree(self, keys: Sequence[str], timeout: float | None = None) -> RoundResult:
        """What all processes of a replicated executor have said in this round; elsewhere ``keys`` as they are.

        The n-th round of each process belongs together, whatever it says, so a round may be
        empty; one at a time. It goes past the workers, and so may be asked while steps run.

        Args:
            keys: What this process has to say, each once.
            timeout: Seconds; None: ``distributed_timeout``. A round that is late is the end of the group.

        Returns:
            The keys that all have in common, in the order of the first rank; and who lacks which of the others.

        Raises:
            RanksDiverged: The ranks are not asked alike.
            CallTimeout: The limit has passed.
            WorkerDied: A rank ended meanwhile.
            ExecutorClosed: The executor is closed.
        """
        limit = check_timeout("agree", timeout) or self.config.distributed_timeout
        if not self._board.is_replicated:
            return RoundResult(list(keys), {})
        return await self._ask(Agree(tuple(keys), limit))

    async def check_health(self, timeout: float = 1.0) -> HealthReport:
        """Ask the liveness lane of each rank; never raises for a rank that is unwell.

        Raises:
            ExecutorClosed: The executor is closed.
            ConfigError: ``timeout`` is not a number of seconds.
        """
        limit = check_timeout("check_health", timeout)
        if limit is None:
            raise ConfigError("timeout of check_health is None: expected a number of seconds, for silence is an answer")
        return await self._ask(CheckHealth(limit))

    def events(self) -> EventStream[ExecutorEvent]:
        """What happens to the group from now on, until it is closed."""
        return self._board.events.listen()

    def add_failure_callback(self, callback: FailureCallback) -> None:
        """Call this, plain or async, once the executor has failed for good, or at once if it has."""
        self._board.callbacks.add(callback)

    def dump(self, stacks: Mapping[int, str] | None = None) -> str:
        """Pending calls and steps with their ages, ranks, queue fill, the workers' stacks, and tasks of this loop.

        Args:
            stacks: Of the workers, as from ``await executor.stacks()``; None: those that can
                be had without waiting.
        """
        return dump_text(self._board, self._loop, stacks)

    def describe(self) -> Description:
        """Every setting, the value that is used, and where it came from."""
        board = self._board
        chosen: dict[str, Any] = {"backend": board.backend}
        if board.gate is not None:
            chosen["max_concurrent_steps"] = board.gate.limit
        if board.group is None:
            return describe(self.config, chosen, self.config.env)
        group = board.group
        return describe(self.config, {**chosen, **group.settings()}, group.environment(), group.places())

    def statistics(self) -> ExecutorStatistics:
        """Counts of calls, errors, timeouts and late answers."""
        return self._board.statistics()

    async def close(self, drain: float = 0.0) -> None:
        """End all workers within the budget; may be called twice, and from any task of its loop.

        Args:
            drain: Seconds for what runs: new calls are refused at once, those that were taken
                and the samplings of launched steps end by themselves, and what has not by
                then ends with ``ExecutorClosed``. A later, more impatient call shortens it.

        Raises:
            WrongLoop: It was opened on another loop.
            ConfigError: ``drain`` is no number of seconds.
        """
        limit = check_drain(drain)
        here = asyncio.get_running_loop()
        if here is not self._loop:
            raise WrongLoop(self._system.name, repr(self._loop), repr(here))
        if self._closing is None:
            self._closing = _undisturbed(self._close(limit), "close executor")
        elif not self._closing.done():
            with contextlib.suppress(ActorDied):
                self._ref.tell_nowait(Close(limit))
        await asyncio.shield(self._closing)
        await self._board.callbacks.drain(self.config.close_grace)

    async def _close(self, drain: float) -> None:
        with contextlib.suppress(ActorDied):
            await self._ref.ask(Close(drain), timeout=None)
        await self._system.aclose()

    def _taker(self) -> Taker | None:
        """The short way to the actor, if it may be taken here and now."""
        origin = here.get()
        if not self._ref.is_idle or (origin is not None and origin.deadline is not None):
            return None
        return self._board.taker

    async def _ask(self, message: Message[R]) -> R:
        try:
            return await self._ref.ask(message, timeout=None)
        except ActorDied:
            if self._closing is not None or self._board.state in _OVER:
                raise ExecutorClosed("the executor is closed") from None
            raise


async def start_executor(
    config: ExecutorConfig, backend: type[WorkerGroup], progress: Progress | None = None
) -> ExecutorHandle:
    """Start the workers; whatever goes wrong, or a cancellation, leaves nothing behind.

    Args:
        config: The settings.
        backend: Makes the group.
        progress: Told ``(phase, done, total)`` over all ranks, on this loop.

    Raises:
        ConfigError: The backend cannot serve these settings, or no asyncio loop runs here.
        CallTimeout: ``start_timeout`` has passed.
        WorkerDied: A rank ended.
        AexecError: What a rank raised.
    """
    _check_loop()
    backend.check(config)
    parallel = config.parallel
    board = Board(
        backend.backend, parallel.world_size, parallel.output_rank, is_replicated=backend.is_replicated
    )  # fmt: skip
    stop_timeout = stop_budget(config) + RETIRE_BUDGET + 1.0
    system = ActorSystem(name=f"executor-{backend.backend}", timeout=None, stop_timeout=stop_timeout)
    await system.open()
    try:
        ref = await system.using(name="executor").spawn(ExecutorActor, config, backend, board, progress)
        await ref.ask(Open(), timeout=None)
    except BaseException:
        with anyio.CancelScope(shield=True):
            await asyncio.shield(_undisturbed(system.aclose(), "close executor"))
        raise
    return ExecutorHandle(config, ref, board, system)


def _check_loop() -> None:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        raise ConfigError("executors run on asyncio, uvloop included; this is another kind of event loop") from None


def _undisturbed(coroutine: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
    """A task with a context of its own: whoever asks may be a handler under a deadline."""
    return asyncio.get_running_loop().create_task(coroutine, name=name, context=contextvars.Context())
