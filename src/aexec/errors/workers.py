"""Executors and workers: who died, who raised, and when to try again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from aexec.errors.root import AexecError

__all__ = (
    "ExecutorClosed",
    "ExecutorPaused",
    "ExecutorUnavailable",
    "PeerLost",
    "ProtocolError",
    "RanksDiverged",
    "RanksMissing",
    "RemoteError",
    "StepStateError",
    "UnknownMethod",
    "WorkerDied",
)


class ProtocolError(AexecError):
    """Two parts of aexec disagree: a fault of ours, or of a third-party executor."""


class PeerLost(AexecError):
    """A rank waited for another one in vain; the other one's own error or death says why.

    Attributes:
        rank: The rank that waited.
        peer: Whom it waited for; None: any of its group.
        doing: What it was about, as in ``receive the hidden states of step 7``.
        detail: What the transport said.
    """

    def __init__(self, rank: int, peer: int | None, doing: str, detail: str = "") -> None:
        super().__init__(rank, peer, doing, detail)
        self.rank, self.peer, self.doing, self.detail = rank, peer, doing, detail

    def __str__(self) -> str:
        whom = "its group" if self.peer is None else f"rank {self.peer}"
        return f"rank {self.rank} could not {self.doing}: {whom} is gone or too late ({self.detail})"


class RanksDiverged(AexecError, RuntimeError):
    """Ranks that have to make the same calls in the same order did not; their executors are lost.

    Attributes:
        rank: The one that differs, as far as that can be told: out of two, the higher one.
        call: The call at which they differ, counted from 1 in each rank.
        step: The step that is in question; None outside of steps.
        asked: What ranks asked for with that call, or what became of them instead, by rank.
        problem: What is wrong, in words.
    """

    def __init__(
        self, rank: int, call: int, step: int | None = None, asked: Mapping[int, str] | None = None, problem: str = ""
    ) -> None:
        asked = dict(asked or {})
        super().__init__(rank, call, step, asked, problem)
        self.rank, self.call, self.step, self.asked, self.problem = rank, call, step, asked, problem

    def __str__(self) -> str:
        step = "" if self.step is None else f", step {self.step}"
        sides: dict[str, list[int]] = {}
        for rank, text in self.asked.items():
            sides.setdefault(text, []).append(rank)
        said = "; ".join(f"{_ranks(ranks)} {text}" for text, ranks in sides.items())
        return (
            f"rank {self.rank} {self.problem or 'does not do what the others do'} (call {self.call}{step}): {said}; "
            "all ranks have to make the same calls with the same arguments in the same order"
        )


class RanksMissing(AexecError, TimeoutError):
    """Ranks that a launcher has started, or should have, did not come to where all have to be.

    Attributes:
        missing: Who, counted over all replicas.
        after: The limit, seconds; None: it was not reached, for they have said that they will not come.
        doing: What the others wait to do, as in ``meet``.
        why: What is known of them.
    """

    def __init__(self, missing: Sequence[int], after: float | None, doing: str, why: str = "") -> None:
        super().__init__(tuple(missing), after, doing, why)
        self.missing, self.after, self.doing, self.why = tuple(missing), after, doing, why

    def __str__(self) -> str:
        when = "" if self.after is None else f" within {self.after:g} s"
        why = self.why or "does the launcher run a process for each of them, and does it get to open the executor?"
        return f"{_ranks(self.missing)} did not come to {self.doing}{when}: {why}"


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks)) or 'unknown'}"


class StepStateError(AexecError, RuntimeError):
    """A step message came in a state that does not allow it.

    Attributes:
        step: The step that the message names.
        problem: What is wrong with it.
        pending: Steps that were executed and wait for their sampling.
    """

    def __init__(self, step: int, problem: str, pending: Sequence[int] = ()) -> None:
        super().__init__(step, problem, tuple(pending))
        self.step, self.problem, self.pending = step, problem, tuple(pending)

    def __str__(self) -> str:
        return f"step {self.step} {self.problem} (pending: {', '.join(map(str, self.pending)) or 'none'})"


class UnknownMethod(AexecError, AttributeError):
    """The worker class has no such method; found before anything is sent.

    Attributes:
        method: The name that was asked for.
        worker: The worker class.
        known: Methods that it has.
        is_attribute: It has an attribute of that name.
    """

    def __init__(
        self,
        method: str,
        worker: str,
        known: Sequence[str] = (),
        is_attribute: bool = False,  # noqa: FBT002 - errors travel by their arguments
    ) -> None:
        super().__init__(method, worker, tuple(known), is_attribute)
        self.method, self.worker, self.known, self.is_attribute = method, worker, tuple(known), is_attribute

    def __str__(self) -> str:
        hint = f" but an attribute, which `lambda worker: worker.{self.method}` reads" if self.is_attribute else ""
        return f"{self.worker} has no method {self.method!r}{hint}; it has {', '.join(self.known) or 'none'}"


class ExecutorClosed(AexecError):
    """The executor was closed, or was never opened."""


class ExecutorUnavailable(AexecError):
    """The worker group is down and is being rebuilt: retry after ``retry_after`` seconds.

    Attributes:
        reason: What brought it down.
        retry_after: Seconds after which a retry is worth it; None when nobody knows.
    """

    def __init__(self, reason: str, retry_after: float | None = None) -> None:
        super().__init__(reason, retry_after)
        self.reason, self.retry_after = reason, retry_after

    def __str__(self) -> str:
        when = "" if self.retry_after is None else f"; retry after {self.retry_after:.3g} s"
        return f"the executor is not available: {self.reason}{when}"


class ExecutorPaused(ExecutorUnavailable):
    """``pause(mode="abort")`` has ended the step: plan it again, and send it after ``resume()``."""


class RemoteError(AexecError):
    """An exception that the user's code raised in a worker.

    What is raised is also an instance of the original type wherever that type can be
    imported, so ``except ValueError`` works; see ``aexec.worker.remote``.

    Attributes:
        rank: The rank that raised it.
        method: The worker's method.
        type_name: Qualified name of the original type.
        text: ``str()`` of the original.
        traceback_text: The remote traceback, as text.
    """

    rank: int
    method: str
    type_name: str
    text: str
    traceback_text: str

    def __str__(self) -> str:
        said = f": {self.text}" if self.text else ""
        return f"rank {self.rank}, {self.method}: {self.type_name}{said}"


class WorkerDied(AexecError):
    """A worker process ended, or its compute thread did.

    Attributes:
        rank: Its rank.
        pid: Its process id.
        exit_code: Its exit code; None when a signal ended it, or when nobody is left who knows.
        signal: Name of the signal that ended it, as in ``SIGKILL``.
        phase: What it was doing.
        step: The step it was at; None outside of steps.
        stderr_tail: The last lines it wrote to its standard error, or where they are.
        node: Its node, where that is not this one by nature.
        cause: What the system that made the process says of its end.
    """

    def __init__(
        self,
        rank: int,
        pid: int,
        exit_code: int | None = None,
        signal: str | None = None,
        phase: str = "unknown",
        step: int | None = None,
        stderr_tail: str = "",
        node: str = "",
        cause: str = "",
    ) -> None:
        super().__init__(rank, pid, exit_code, signal, phase, step, stderr_tail, node, cause)
        self.rank, self.pid, self.exit_code, self.signal = rank, pid, exit_code, signal
        self.phase, self.step, self.stderr_tail = phase, step, stderr_tail
        self.node, self.cause = node, cause

    def __str__(self) -> str:
        how = f"ended by {self.signal}" if self.signal else f"ended with exit code {self.exit_code}"
        if self.signal is None and self.exit_code is None:
            how = "ended" if self.cause else "ended, and nobody has said in time how,"
        where = self.phase if self.step is None else f"{self.phase}, step {self.step}"
        cause = f": {self.cause}" if self.cause else ""
        tail = f"\nlast lines of its stderr:\n{self.stderr_tail}" if self.stderr_tail else ""
        node = f" on node {self.node}" if self.node else ""
        return f"rank {self.rank} (pid {self.pid}{node}) {how} during {where}{cause}{tail}"
