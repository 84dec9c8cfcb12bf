"""The executor's contract: all that an engine, a trainer or a test may rely on.

An executor obtains the workers of one group, sends each call to all of them, takes the
output rank's reply, sees every rank's error, and watches over their lives.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from typing import Any, Protocol

from aexec.errors import AexecError, WorkerDied
from aexec.executor.describe import Description
from aexec.executor.lifecycle import ExecutorState
from aexec.messages.batch import GrammarOutput
from aexec.messages.lifecycle import GroupRestarted, HealthReport, RankInfo, RoundResult, SlowCall, WorkerStarted
from aexec.messages.operations import PauseMode
from aexec.messages.step import ExecuteModel, ForwardLaunched, StepId, StepResult

__all__ = ("Executor", "ExecutorEvent", "FailureCallback")

ExecutorEvent = WorkerStarted | WorkerDied | GroupRestarted | SlowCall
FailureCallback = Callable[[AexecError], Awaitable[None] | None]


class Executor(Protocol):
    """A running worker group.

    Every call ends once, in a result or in one named error: ``CallTimeout``,
    ``WorkerDied``, ``RemoteError``, ``StepStateError``, ``ModelNotReady``,
    ``ExecutorUnavailable`` (``ExecutorPaused`` is one) or ``ExecutorClosed``.
    """

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        ...

    @property
    def output_rank(self) -> int:
        """The rank whose reply is the step's result."""
        ...

    @property
    def generation(self) -> int:
        """Counts the worker groups of this executor, from 1."""
        ...

    @property
    def state(self) -> ExecutorState:
        """Whether it takes steps now; once a step has failed for the loss of the group, this says so already."""
        ...

    @property
    def ranks(self) -> Sequence[RankInfo]:
        """Pid, node, phase and state of each rank, in rank order."""
        ...

    @property
    def is_replicated(self) -> bool:
        """True: every rank's process has an executor of its own, and all of them have to be asked alike; see :meth:`agree`."""
        ...

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
        """
        ...

    async def execute_model(self, step: ExecuteModel) -> ForwardLaunched | StepResult:
        """Launch the forward pass of a step on all ranks; see ``messages.step``."""
        ...

    async def sample_tokens(self, step_id: StepId, grammar: GrammarOutput | None = None) -> StepResult:
        """Sample a launched step; the result is the output rank's."""
        ...

    async def agree(self, keys: Sequence[str], timeout: float | None = None) -> RoundResult:
        """What all processes of a replicated executor have said in this round; elsewhere ``keys`` as they are.

        The n-th round of each process belongs together, whatever it says, so a round may be
        empty; one at a time. It goes past the workers, and so may be asked while steps run.

        Args:
            keys: What this process has to say, each once.
            timeout: Seconds; None: ``distributed_timeout``. A round that is late is the end of the group.

        Returns:
            The keys that all have in common, in the order of the first rank; and who lacks which of the others.
        """
        ...

    async def check_health(self, timeout: float = 1.0) -> HealthReport:
        """Ask the liveness lane of each rank; never raises for a rank that is unwell."""
        ...

    def events(self) -> AsyncIterator[ExecutorEvent]:
        """What happens to the group from now on."""
        ...

    def add_failure_callback(self, callback: FailureCallback) -> None:
        """Call this, plain or async, once the executor has failed for good, or at once if it has."""
        ...

    async def sleep(self, level: int = 1, timeout: float | None = None) -> list[Any]:
        """Let go of device memory on all ranks, once no step is in flight; steps are refused meanwhile.

        Args:
            level: 1 keeps the weights in host memory, 2 discards them too.
            timeout: Seconds for all of it; None: no limit.
        """
        ...

    async def wake_up(self, tags: Collection[str] | None = None, timeout: float | None = None) -> list[Any]:
        """Bring back on all ranks what sleeps.

        Args:
            tags: ``weights``, ``kv_cache``; None: both.
            timeout: Seconds; None: no limit.
        """
        ...

    async def weights_loaded(self) -> None:
        """Say that all ranks have whole weights again, where no method told it."""
        ...

    async def pause(self, mode: PauseMode = "keep", timeout: float | None = None) -> None:
        """Send no more steps until :meth:`resume`; calls work meanwhile.

        Args:
            mode: ``keep``: at once. ``finish``: when the steps in flight were sampled.
                ``abort``: all steps end with ``ExecutorPaused``.
            timeout: Seconds for steps in flight to end; None: no limit.
        """
        ...

    async def resume(self) -> None:
        """Send steps again, those that have waited first."""
        ...

    async def stacks(self, timeout: float = 1.0) -> Mapping[int, str]:
        """Where each rank is; those that give no answer are missing."""
        ...

    def describe(self) -> Description:
        """Every setting, the value that is used, and where it came from."""
        ...

    def dump(self, stacks: Mapping[int, str] | None = None) -> str:
        """Pending calls and their ages, ranks, queue fill, and the workers' stacks."""
        ...

    async def close(self, drain: float = 0.0) -> None:
        """End all workers within the budget; may be called twice, and from any task.

        Args:
            drain: Seconds for what runs to end by itself; new calls are refused at once.
        """
        ...
