"""The two-phase step as an actor: queue the forward pass, answer, sample when asked.

The actor decides, on the loop, by the table of ``messages.step``; the device works, on
a compute thread, first in first out. So an accepted step costs its asker no waiting: the
reply says that the forward pass is queued, and the grammar bitmask is filled meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

from aexec.actor import Actor, Deferred, handles
from aexec.messages.batch import GrammarOutput
from aexec.messages.step import ExecuteModel, ForwardLaunched, SampleTokens, StepId, StepResult
from aexec.model.order import Forward, Sampling, StepBook, StepStatistics

__all__ = ("Compute", "ModelRunnerActor", "StepRunner", "StepStatistics")


Done = Callable[[Any, Exception | None], None]


class StepRunner(Protocol):
    """What runs the steps: a worker, or a model runner behind an adapter. It blocks."""

    @property
    def samples(self) -> bool:
        """False: it has no ``sample_tokens``, and each step is whole."""
        ...

    def execute_model(self, step: ExecuteModel, /) -> Any:
        """Run the forward pass; what it returns is the result of a step that is not sampled."""
        ...

    def sample_tokens(self, step: StepId, grammar: GrammarOutput | None, /) -> Any:
        """Sample a step; they are asked for in the order of their forward passes."""
        ...


class Compute(Protocol):
    """Where blocking work is done in order; ``worker.compute.ComputeThread`` is one."""

    def submit(self, phase: str, call: Callable[[], Any], done: Done, step: int | None = None, /) -> Any:
        """Queue ``call()``; ``done(value, error)`` is called on the loop when it has ended."""
        ...


class ModelRunnerActor(Actor):
    """Runs the steps of one rank.

    Args:
        runner: What runs them.
        compute: The thread on which it does.

    Attributes:
        jobs_queued: Jobs of steps that were given to the compute thread.
        jobs_ended: Those that have ended; in the same order.
    """

    def __init__(self, runner: StepRunner, compute: Compute) -> None:
        self.runner, self.compute = runner, compute
        self.steps: StepBook[Deferred[StepResult]] = StepBook()
        self.jobs_queued = self.jobs_ended = 0

    def step_statistics(self) -> StepStatistics:
        """Counts so far."""
        return self.steps.statistics()

    @handles(ExecuteModel)
    def execute_model(self, message: ExecuteModel) -> ForwardLaunched | Deferred[ForwardLaunched | StepResult]:
        """Queue the forward pass.

        Returns:
            At once, that it is queued; for a step without tokens, or a runner that does
            not sample, the result when it is there.

        Raises:
            StepStateError: The step was sent before, or its id does not increase.
        """
        step = message.step
        forward = self.steps.execute(message, samples=self.runner.samples)
        if forward is None:
            return self._run_whole(message)
        call = partial(self._forward, forward, message)
        self._submit("execute_model", call, partial(self._forward_ended, step), step)
        return ForwardLaunched(step)

    @handles(SampleTokens)
    def sample_tokens(self, message: SampleTokens) -> Deferred[StepResult]:
        """Queue the sampling of a step, after that of every older step.

        Raises:
            StepStateError: The step is unknown, sampled already, or was dropped.
            Exception: What its forward pass raised; the step is dropped.
        """
        forward = self.steps.spend(message.step)
        if forward.error is not None:
            raise self.failure("execute_model", forward.error)
        reply: Deferred[StepResult] = self.context.defer(message)
        self._submit_ready(self.steps.ask(Sampling(message.step, message.grammar, reply, forward)))
        return reply

    def failure(self, method: str, error: Exception) -> Exception:  # noqa: ARG002 - for those who say where it was
        """What the asker is given for what ``method`` raised."""
        return error

    def step_job_ended(self) -> None:
        """Called after each job of a step; :attr:`jobs_ended` counts it."""

    def drop_steps(self, why: str) -> None:
        """Give up all steps that wait for their sampling; later messages for them are told why."""
        self.steps.drop_all(why)
        self._submit_ready(self.steps.take_ready())

    def _run_whole(self, message: ExecuteModel) -> Deferred[ForwardLaunched | StepResult]:
        reply: Deferred[ForwardLaunched | StepResult] = self.context.defer(message)
        call = partial(self.runner.execute_model, message)
        self._submit("execute_model", call, partial(self._ended, message.step, reply, None), message.step)
        return reply

    def _submit(self, phase: str, call: Callable[[], Any], done: Done, step: StepId) -> None:
        def ended(value: Any, error: Exception | None) -> None:
            self.jobs_ended += 1
            done(value, error)
            self.step_job_ended()

        self.jobs_queued += 1
        self.compute.submit(phase, call, ended, step)

    def _forward(self, forward: Forward, message: ExecuteModel) -> Any:
        """On the compute thread, where the sampling that may be next in line has to see the error."""
        try:
            return self.runner.execute_model(message)
        except Exception as error:
            forward.error = error
            raise

    def _forward_ended(self, step: StepId, _: Any, error: Exception | None) -> None:
        self.steps.forward_ended(step, error)
        if error is not None:
            self._submit_ready(self.steps.take_ready())  # it holds up no younger step any longer

    def _submit_ready(self, samplings: list[Sampling[Any]]) -> None:
        for sampling in samplings:
            step, forward = sampling.step, sampling.forward
            ended = partial(self._ended, step, sampling.reply, forward)
            self._submit("sample_tokens", partial(self._sample, sampling), ended, step)

    def _sample(self, sampling: Sampling[Any]) -> Any:
        """On the compute thread."""
        if sampling.forward.error is not None:
            raise sampling.forward.error
        return self.runner.sample_tokens(sampling.step, sampling.grammar)

    def _ended(
        self, step: StepId, reply: Deferred[Any], forward: Forward | None, value: Any, error: Exception | None
    ) -> None:
        phase = self.steps.ended(step, forward, error)
        if error is None:
            reply.resolve(StepResult(step, value))
        else:
            reply.fail(self.failure(phase, error))
