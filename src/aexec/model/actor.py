"""The two-phase step as an actor: queue the forward pass, answer, sample when asked.

The actor decides, on the loop, by the table of ``messages.step``; the device works, on
a compute thread, first in first out. So an accepted step costs its asker no waiting: the
reply says that the forward pass is queued, and the grammar bitmask is filled meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, Protocol

from aexec.actor import Actor, Deferred, handles
from aexec.messages.batch import GrammarOutput
from aexec.messages.step import ExecuteModel, ForwardLaunched, SampleTokens, StepId, StepResult
from aexec.model.steps import StepTable

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


class _Forward:
    """One forward pass, queued or done, until its step is sampled."""

    __slots__ = ("error",)

    def __init__(self) -> None:
        self.error: Exception | None = None

    def run(self, runner: StepRunner, step: ExecuteModel) -> Any:
        """On the compute thread, where the sampling that may be next in line has to see the error."""
        try:
            return runner.execute_model(step)
        except Exception as error:
            self.error = error
            raise


class _Sampling(NamedTuple):
    grammar: GrammarOutput | None
    reply: Deferred[StepResult]
    forward: _Forward


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
        self.steps = StepTable()
        self._forwards: dict[StepId, _Forward] = {}
        self._asked: dict[StepId, _Sampling] = {}  # asked before an older step was: they wait for it
        self._executed = self._finished = self._failed = 0
        self.jobs_queued = self.jobs_ended = 0

    def step_statistics(self) -> StepStatistics:
        """Counts so far."""
        return StepStatistics(len(self.steps.pending), self._executed, self._finished, self._failed)

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
        if message.num_tokens == 0 or not self.runner.samples:
            self.steps.execute(step, whole=True)
            self._executed += 1
            return self._run_whole(message)
        self.steps.execute(step)
        self._executed += 1
        forward = self._forwards[step] = _Forward()
        call = partial(forward.run, self.runner, message)
        self._submit("execute_model", call, partial(self._forward_ended, step), step)
        return ForwardLaunched(step)

    @handles(SampleTokens)
    def sample_tokens(self, message: SampleTokens) -> Deferred[StepResult]:
        """Queue the sampling of a step, after that of every older step.

        Raises:
            StepStateError: The step is unknown, sampled already, or was dropped.
            Exception: What its forward pass raised; the step is dropped.
        """
        step = message.step
        forward = self._forwards.pop(step, None)
        if forward is not None and forward.error is not None:
            self._failed += 1
            self.steps.drop(step, _raised("execute_model", forward.error))
            raise self.failure("execute_model", forward.error)
        self.steps.sample(step)
        assert forward is not None
        reply: Deferred[StepResult] = self.context.defer(message)
        self._asked[step] = _Sampling(message.grammar, reply, forward)
        self._sample_asked()
        return reply

    def failure(self, method: str, error: Exception) -> Exception:  # noqa: ARG002 - for those who say where it was
        """What the asker is given for what ``method`` raised."""
        return error

    def step_job_ended(self) -> None:
        """Called after each job of a step; :attr:`jobs_ended` counts it."""

    def drop_steps(self, why: str) -> None:
        """Give up all steps that wait for their sampling; later messages for them are told why."""
        for step in self.steps.pending:
            self.steps.drop(step, why)
        self._forwards.clear()
        self._sample_asked()

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

    def _forward_ended(self, step: StepId, _: Any, error: Exception | None) -> None:
        if error is None:
            self.steps.forward_done(step)
        else:
            self._sample_asked()  # it holds up no younger step any longer

    def _sample_asked(self) -> None:
        """Queue what was asked for and has no older step before it that may yet be sampled."""
        waiting = [step for step, forward in self._forwards.items() if forward.error is None]
        oldest = min(waiting, default=None)
        for step in sorted(self._asked):
            if oldest is not None and oldest < step:
                break
            asked = self._asked.pop(step)
            call = partial(self._sample, step, asked)
            self._submit("sample_tokens", call, partial(self._ended, step, asked.reply, asked.forward), step)

    def _sample(self, step: StepId, asked: _Sampling) -> Any:
        """On the compute thread."""
        if asked.forward.error is not None:
            raise asked.forward.error
        return self.runner.sample_tokens(step, asked.grammar)

    def _ended(
        self, step: StepId, reply: Deferred[Any], forward: _Forward | None, value: Any, error: Exception | None
    ) -> None:
        phase = "execute_model" if forward is None or forward.error is not None else "sample_tokens"
        if error is None:
            self._finished += 1
            reply.resolve(StepResult(step, value))
        else:
            self._failed += 1
            self.steps.spoil(step, _raised(phase, error))
            reply.fail(self.failure(phase, error))


def _raised(phase: str, error: Exception) -> str:
    return f"its {phase} raised {type(error).__name__}"
