"""The executor as an actor: one worker group at a time, whatever the backend.

Every call is checked before anything is sent, then handed to the fan-out of the present
generation; steps go through the gate. Its life is in ``executor.life``.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, TypeVar

from aexec.actor import Deferred, Exit, handles
from aexec.errors import AexecError, ExecutorClosed, ExecutorUnavailable, UnknownMethod
from aexec.executor.calls import Agree, CheckHealth, Collective, Pause, Resume, Sleep, Stacks, WakeUp, WeightsLoaded
from aexec.executor.collective import Answers, Lane
from aexec.executor.direct import Reply
from aexec.executor.health import report
from aexec.executor.life import ExecutorLife
from aexec.executor.lifecycle import ExecutorState
from aexec.executor.memory import Memory, Operation
from aexec.messages.base import Message
from aexec.messages.control import CallMethod, Dump, Ping
from aexec.messages.lifecycle import HealthReport, RoundResult
from aexec.messages.step import ExecuteModel, ForwardLaunched, SampleTokens, StepResult
from aexec.worker.names import name_of

__all__ = ("ExecutorActor",)

R = TypeVar("R")


class ExecutorActor(ExecutorLife):
    """Takes calls, steps and operations for the worker group."""

    self_explanatory = (AexecError,)  # they name call and rank, and come by the short way as they are

    async def on_start(self) -> None:
        """Be there for those who take the short way, too."""
        await super().on_start()
        self._board.taker = self

    async def on_stop(self, reason: Exit) -> None:
        """Be there no longer."""
        self._board.taker = None
        await super().on_stop(reason)

    @handles(Collective)
    def collective(self, message: Collective) -> Deferred[list[Any]]:
        """Call a worker method on ranks; see :meth:`take_call`."""
        reply: Deferred[list[Any]] = self.context.defer(message)
        self.take_call(message, reply, self.context.deadline)
        return reply

    @handles(ExecuteModel)
    def execute_model(self, message: ExecuteModel) -> Deferred[ForwardLaunched | StepResult]:
        """Launch a step on all ranks; see :meth:`take_step`."""
        reply: Deferred[ForwardLaunched | StepResult] = self.context.defer(message)
        self.take_step(message, reply, self.context.deadline)
        return reply

    @handles(SampleTokens)
    def sample_tokens(self, message: SampleTokens) -> Deferred[StepResult]:
        """Sample a step on all ranks; see :meth:`take_sampling`."""
        reply: Deferred[StepResult] = self.context.defer(message)
        self.take_sampling(message, reply, self.context.deadline)
        return reply

    def take_call(self, message: Collective, reply: Reply, until: float | None) -> None:
        """Call a worker method on ranks; ``until``: when its asker's own deadline passes.

        Raises:
            UnknownMethod: The worker class has no such method; nothing was sent.
            ModelNotReady: It brings weights, and they sleep.
            AexecError: The executor is not ready.
        """
        fanout = self._fanout()
        method, memory = message.method, self._memory
        lane = self._lane(method)
        memory.check_method(method)
        number = fanout.new_id()
        call = fanout.submit(
            method if isinstance(method, str) else name_of(method),
            _call_method(message, number),
            reply,
            lane=lane,
            ranks=message.ranks,
            timeout=_remaining(message.timeout, until),
            shape=_by_rank if message.reply_rank is None else partial(_of_rank, message.reply_rank),
            on_end=partial(memory.called, method) if memory.follows(method) else None,
            call_id=number,
        )
        reply.on_cancel(partial(fanout.abandon, call))

    def take_step(self, message: ExecuteModel, reply: Reply, until: float | None) -> None:
        """Launch a step on all ranks, as soon as the gate lets it.

        Raises:
            UnknownMethod: The worker class runs no steps.
            ModelNotReady: A part of the model is asleep or missing.
            AexecError: The executor is not ready.
        """
        self._fanout()
        self._lane("execute_model")
        if self._steps.gate.paused is None:  # whatever waits is checked by resume()
            self._memory.check("execute_model")
        self._steps.execute(message, reply, until)

    def take_sampling(self, message: SampleTokens, reply: Reply, until: float | None) -> None:
        """Sample a step on all ranks.

        Raises:
            ExecutorPaused: A pause has ended the step.
            AexecError: The executor is not ready.
        """
        if not (self._board.state is ExecutorState.DRAINING and message.step in self._steps.gate.flying):
            self._fanout()
        self._steps.sample(message, reply, until)

    @handles(Agree)
    def agree(self, message: Agree) -> Deferred[RoundResult]:
        """Find out what the processes of all ranks say in this round.

        Raises:
            AexecError: The executor is not ready.
        """
        self._fanout()
        group = self._generation.group
        return self._work(message, lambda _: group.agree(message.keys, message.timeout))

    @handles(CheckHealth)
    def check_health(self, message: CheckHealth) -> Deferred[HealthReport]:
        """Ask all ranks for their pulse.

        Raises:
            ExecutorClosed: It is.
        """
        if self._board.state in (ExecutorState.CLOSING, ExecutorState.CLOSED):
            raise ExecutorClosed("the executor is closed")
        return self._work(message, lambda _: self._health(message.timeout))

    @handles(Stacks)
    def stacks(self, message: Stacks) -> Deferred[dict[int, str]]:
        """Ask all ranks where they are; those that give no answer are missing."""
        return self._work(message, lambda _: self._all_stacks(message.timeout))

    @handles(Sleep)
    def sleep(self, message: Sleep) -> Deferred[list[Any]]:
        """Let go of memory on all ranks, once no step is in flight.

        Raises:
            UnknownMethod: The worker class has no ``sleep``.
            AexecError: The executor is not ready.
        """
        self._fanout()
        self._lane("sleep")
        memory = self._memory
        ask = partial(self._ask_all, memory)
        return self._work(message, partial(memory.sleep, message.level, ask, message.timeout))

    @handles(WakeUp)
    def wake_up(self, message: WakeUp) -> Deferred[list[Any]]:
        """Bring back on all ranks what sleeps.

        Raises:
            UnknownMethod: The worker class has no ``wake_up``.
            AexecError: The executor is not ready.
        """
        self._fanout()
        self._lane("wake_up")
        memory = self._memory
        return self._work(message, partial(memory.wake, message.tags, partial(self._ask_all, memory), message.timeout))

    @handles(WeightsLoaded)
    def weights_loaded(self, message: WeightsLoaded) -> None:  # noqa: ARG002
        """Take the caller's word for it.

        Raises:
            ModelNotReady: The weights sleep.
            AexecError: The executor is not ready.
        """
        self._fanout()
        self._memory.weights_loaded()

    @handles(Pause)
    def pause(self, message: Pause) -> Deferred[None]:
        """Send no more steps; answered when none is in flight, or at once under ``keep``.

        Raises:
            AexecError: The executor is not ready.
        """
        self._fanout()
        steps = self._steps
        steps.pause(message.mode)

        async def settle(_: Operation) -> None:
            if message.mode != "keep":
                await steps.until_idle(f"pause(mode={message.mode!r})", message.timeout)

        return self._work(message, settle)

    @handles(Resume)
    def resume(self, message: Resume) -> None:  # noqa: ARG002
        """Send steps again; nothing happens unless it is paused.

        Raises:
            ModelNotReady: A part of the model is asleep or missing.
            AexecError: The executor is not ready.
        """
        self._fanout()
        self._memory.check("resume")
        self._steps.resume()

    def _lane(self, method: str | Callable[..., Any]) -> Lane:
        if not isinstance(method, str):
            return Lane.ASYNC if inspect.iscoroutinefunction(method) else Lane.SYNC
        hello = self._generation.hellos[0]
        if method not in hello.methods and not hello.dynamic:
            raise UnknownMethod(method, hello.worker, hello.public_methods, method in hello.attributes)
        return Lane.ASYNC if hello.methods.get(method) else Lane.SYNC

    def _work(self, message: Message[R], work: Callable[[Operation], Awaitable[R]]) -> Deferred[R]:
        """Reply with what comes of ``work``; whoever asked may leave, which ends it unless it was sent."""
        reply: Deferred[R] = self.context.defer(message)
        operation = Operation()

        async def run() -> None:
            try:
                value = await work(operation)
            except AexecError as error:
                reply.fail(error)
            else:
                reply.resolve(value)

        task = self.context.start_task(run())

        def left() -> None:
            if not operation.is_sent:
                task.cancel()
                reply.fail(ExecutorClosed("the caller is gone"))

        reply.on_cancel(left)
        return reply

    async def _ask_all(self, memory: Memory, method: str, args: tuple[Any, ...], timeout: float | None) -> list[Any]:
        fanout = self._fanout()
        if memory is not self._memory:
            raise ExecutorUnavailable("the workers were restarted meanwhile", 0.0)
        lane = self._lane(method)
        answers = await fanout.ask(
            method, lambda call: CallMethod(call=call, method=method, args=args), lane=lane, timeout=timeout
        )
        return _by_rank(answers)

    async def _health(self, timeout: float) -> HealthReport:
        board, generation = self._board, self._generation
        everyone = set(range(board.world_size))
        dead = frozenset(generation.dead if self._is_up else everyone)
        pongs: Answers = {}
        if alive := sorted(everyone - dead):
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

    async def _all_stacks(self, timeout: float) -> dict[int, str]:
        generation = self._generation
        stacks = dict(generation.group.stacks())
        alive = sorted(set(range(self._board.world_size)) - generation.dead - stacks.keys())
        if self._is_up and alive:
            stacks |= await generation.fanout.ask(
                "dump", lambda _: Dump(), lane=Lane.LIVENESS, ranks=alive, timeout=timeout
            )
        return stacks

    @property
    def _is_up(self) -> bool:
        return self._board.state in (ExecutorState.READY, ExecutorState.DRAINING)


def _call_method(message: Collective, call: int) -> CallMethod:
    return CallMethod(
        call=call, method=message.method, args=message.args, kwargs=message.kwargs, reply_rank=message.reply_rank
    )


def _remaining(timeout: float | None, until: float | None) -> float | None:
    """The lesser of a limit and of the deadline that the asker itself is under."""
    if until is None:
        return timeout
    left = max(until - time.monotonic(), 0.0)
    return left if timeout is None else min(timeout, left)


def _by_rank(answers: Answers) -> list[Any]:
    return [answers[rank] for rank in sorted(answers)]


def _of_rank(rank: int, answers: Answers) -> list[Any]:
    return [answers[rank]]
