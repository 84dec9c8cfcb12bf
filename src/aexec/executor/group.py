"""What a backend has to say: how workers come to exist, and how a message reaches a rank.

Everything else (fan-out, order, deadlines, errors, health, restarts) is written once, in
``ExecutorActor``, and is the same for all backends. A backend is a subclass of
:class:`WorkerGroup`; one object is one generation of workers. It is named in
``ExecutorConfig.backend`` by itself or as ``package.module:Class``, and it is done when
``aexec.testing.check_executor`` passes.
"""

from __future__ import annotations

import abc
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from aexec.actor import Context
from aexec.config import ExecutorConfig
from aexec.errors import AexecError, WorkerDied
from aexec.messages.base import Message
from aexec.messages.control import Hello
from aexec.messages.lifecycle import RankPlace, RoundResult
from aexec.worker.context import Progress

__all__ = ("GroupPlan", "GroupSink", "WorkerGroup")


class GroupSink(Protocol):
    """Where a group reports; called on the loop, and never blocks."""

    def phase(self, rank: int, phase: str) -> None:
        """A rank that is starting has come to ``phase``, as in ``spawned`` or ``import``."""
        ...

    def progress(self, rank: int, phase: str, done: float, total: float) -> None:
        """``done`` of ``total`` units of a long phase are through; see ``WorkerContext.progress``."""
        ...

    def replied(self, call: int, rank: int, value: Any) -> None:
        """A rank has answered a call."""
        ...

    def failed(self, call: int, rank: int, error: BaseException) -> None:
        """A rank has answered a call with an error, live or rebuilt from a ``RemoteFailure``."""
        ...

    def died(self, error: WorkerDied) -> None:
        """A rank has ended without being told to; say so at once, clean up later."""
        ...

    def lost(self, error: AexecError) -> None:
        """The group can do nothing more, though no rank of it has ended."""
        ...


@dataclass(frozen=True, slots=True)
class GroupPlan:
    """What a group is made from.

    Attributes:
        config: The executor's settings.
        generation: Of this group, from 1.
        actor: The executor's context: spawn actors and own tasks with it.
        sink: Where to report.
        previous: The group before it, which has stopped: what generations share is in its hands,
            and is taken over from it. None: this is the first.
    """

    config: ExecutorConfig
    generation: int
    actor: Context
    sink: GroupSink
    previous: WorkerGroup | None = None

    def progress_of(self, rank: int) -> Progress:
        """A ``WorkerContext.progress`` for a rank of this process, to be called from any thread."""
        post = self.actor.system.call_soon_threadsafe

        def progress(phase: str, done: float, total: float) -> None:
            post(self.sink.progress, rank, phase, done, total)

        return progress


class WorkerGroup(abc.ABC):
    """The workers of one generation.

    Attributes:
        backend: Its name, for people.
        is_replicated: Each rank's process has an executor of its own, and all of them make the same
            calls in the same order; the group is told of each by :meth:`accepted`.
    """

    backend: ClassVar[str] = "custom"
    is_replicated: ClassVar[bool] = False

    def __init__(self, plan: GroupPlan) -> None:
        self.plan = plan

    @classmethod  # noqa: B027 - nothing is refused by default
    def check(cls, config: ExecutorConfig) -> None:
        """Refuse settings that this backend cannot serve, before anything is started.

        Raises:
            ConfigError: Names the setting and the remedy.
        """

    @abc.abstractmethod
    async def start(self) -> Sequence[Hello]:
        """Bring all workers to where their class is constructed; what they say, in rank order.

        The executor limits the time by cancelling, and calls :meth:`stop` after any
        failure. What is raised reaches whoever opens the executor; an exception of the
        user's code goes through ``aexec.worker.remote.caller_error``.
        """

    @abc.abstractmethod
    def send(self, call: int, message: Message[Any], ranks: Sequence[int]) -> None:
        """Hand a message to ranks, encoded once; the answers come through the sink.

        Never blocks. Messages to one rank arrive in order, but ``Ping``, ``Dump`` and
        ``Revoke`` overtake, and are answered while the rank's compute thread is busy. An
        ``ExecuteModel`` that will be sampled is launched once it is sent: a rank answers it
        only to refuse it.

        Raises:
            AexecError: The message cannot travel; nobody was sent anything.
        """

    def accepted(self, call: int, message: Message[Any], ranks: Sequence[int]) -> None:  # noqa: B027 - if replicated
        """A call was taken, and will be sent in its turn; called in order of acceptance.

        Liveness calls are not told.
        """

    def withdrawn(self, call: int) -> None:  # noqa: B027 - if replicated
        """A call that was :meth:`accepted` will not be sent: its caller is gone, or its time was up."""

    async def agree(self, keys: Sequence[str], timeout: float) -> RoundResult:  # noqa: ARG002 - nobody else is asked
        """What all processes of a replicated group say in this round; see ``Executor.agree``.

        Raises:
            AexecError: The group is lost.
        """
        return RoundResult(list(keys), {})

    def given_up(self, error: BaseException) -> None:  # noqa: B027 - most have nobody to tell
        """The executor has no more use for its workers, because of this; called before :meth:`stop` or :meth:`retire`."""

    @abc.abstractmethod
    async def stop(self, grace: float) -> Sequence[str]:
        """End all workers, those that are dead, stopped or half started too; may be called twice.

        Args:
            grace: Seconds for running work and ``shutdown`` hooks, before force is used.

        Returns:
            A line on each worker that did not end by itself.
        """

    async def retire(self) -> None:  # noqa: B027 - most generations share nothing
        """Let go of what generations share, for none follows; called after :meth:`stop`, maybe twice."""

    def phases(self) -> Mapping[int, str]:
        """What ranks are doing right now, as far as that can be had without asking them."""
        return {}

    def settings(self) -> Mapping[str, Any]:
        """What it uses where a setting left it the choice, by the setting's name; for ``describe()``."""
        return {}

    def environment(self) -> Mapping[str, str]:
        """The variables that its workers were given on top of what they have; for ``describe()``."""
        return self.plan.config.env

    def places(self) -> Sequence[RankPlace]:
        """Where each rank is, in rank order; for ``describe()``. Empty where there is nothing to tell."""
        return ()

    def is_here(self, hello: Hello) -> bool:
        """True if the rank's process is one of this machine, so that the system can be asked about it."""
        return hello.node == platform.node()

    def node_name(self, hello: Hello) -> str:
        """The rank's node, for people."""
        return hello.node

    def stacks(self) -> Mapping[int, str]:
        """Stacks of ranks, as far as they can be had without waiting."""
        return {}
