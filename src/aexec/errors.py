"""Every error of aexec on one screen, grouped by who must act.

You (the caller) mend a :class:`ConfigError`, a :class:`RequestError` or a
:class:`StepStateError`; the operator looks at :class:`WorkerDied`, at
:class:`ModelLoadError` and at :class:`OutOfMemory`; your own code answers for a
:class:`RemoteError`; a caller may simply try again after :class:`ExecutorUnavailable`.
Errors keep all they know as attributes, print one readable sentence and pickle.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

__all__ = (
    "ActorDied",
    "ActorError",
    "ActorRestarted",
    "ActorStopped",
    "AexecError",
    "CallCycle",
    "CallTimeout",
    "ConfigError",
    "ExecutorClosed",
    "ExecutorUnavailable",
    "InvalidRequest",
    "MailboxFull",
    "MessageNotPortable",
    "MissingExtra",
    "ModelLoadError",
    "ModelNotFound",
    "OutOfMemory",
    "ProtocolError",
    "QueueFull",
    "RemoteError",
    "RequestAborted",
    "RequestError",
    "RequestFailed",
    "RestartsExhausted",
    "StepStateError",
    "UnhandledMessage",
    "UnknownMethod",
    "UnsupportedModel",
    "WorkerDied",
    "WrongLoop",
)


class AexecError(Exception):
    """The root: ``except AexecError`` catches whatever aexec raises on purpose."""


# ---------------------------------------------------------------- you mend the set-up


class ConfigError(AexecError, ValueError):
    """A setting is wrong; the text names the value, what was expected and the remedy."""


class MissingExtra(ConfigError):
    """An optional dependency is not installed.

    Attributes:
        what: What needs it, as in "the torch model runner".
        extra: The extra that brings it, as in ``models``.
    """

    def __init__(self, what: str, extra: str, missing: str = "") -> None:
        super().__init__(what, extra, missing)
        self.what, self.extra, self.missing = what, extra, missing

    def __str__(self) -> str:
        because = f" ({self.missing} is not installed)" if self.missing else ""
        return f"{self.what} needs the extra {self.extra!r}{because}: pip install 'aexec[{self.extra}]'"


class ModelNotFound(ConfigError):
    """A model name or directory leads nowhere."""


class UnsupportedModel(ConfigError):
    """The model is readable, and its architecture is not one that aexec has tested."""


class ModelLoadError(AexecError):
    """The model's files are damaged or incomplete; no weight is ever left random."""


class OutOfMemory(AexecError, MemoryError):
    """Something does not fit.

    Attributes:
        what: What does not fit.
        need_bytes: Bytes it takes.
        have_bytes: Bytes there are.
        remedy: What to change.
    """

    def __init__(self, what: str, need_bytes: int, have_bytes: int, remedy: str) -> None:
        super().__init__(what, need_bytes, have_bytes, remedy)
        self.what, self.need_bytes, self.have_bytes, self.remedy = what, need_bytes, have_bytes, remedy

    def __str__(self) -> str:
        need, have = self.need_bytes / 2**20, self.have_bytes / 2**20
        return f"{self.what} needs {need:,.1f} MiB and {have:,.1f} MiB are available: {self.remedy}"


# ---------------------------------------------------------------- you mend the request


class RequestError(AexecError):
    """One request ends; all others go on."""


class InvalidRequest(RequestError, ValueError):
    """A prompt or a sampling value is wrong; the text names value, expectation and remedy."""


class RequestAborted(RequestError):
    """The engine was closed before the request had finished.

    An abort by the request's id is no error: its stream ends with the finish reason ``abort``.
    """


class QueueFull(RequestError):
    """As many requests wait as may wait: try again later.

    Attributes:
        request_id: The request that was turned away.
        limit: How many may wait.
    """

    def __init__(self, request_id: str, limit: int) -> None:
        super().__init__(request_id, limit)
        self.request_id, self.limit = request_id, limit

    def __str__(self) -> str:
        return (
            f"request {self.request_id} was turned away, as {self.limit} requests are waiting already: "
            "send it again later, or open the engine with a larger max_num_waiting"
        )


class RequestFailed(RequestError):
    """The model could not go on with this request, as with logits that are not numbers."""


# ---------------------------------------------------------------- actors


class ActorError(AexecError):
    """A message did not end in a reply."""


class ActorDied(ActorError):
    """The actor failed, and with it every message that waited for it.

    Attributes:
        actor: Its name.
        reason: Why it ended.
    """

    def __init__(self, actor: str, reason: str) -> None:
        super().__init__(actor, reason)
        self.actor, self.reason = actor, reason

    def __str__(self) -> str:
        return f"actor {self.actor} is dead: {self.reason}"


class ActorStopped(ActorDied):
    """The actor was stopped on purpose before it came to this message."""


class ActorRestarted(ActorError):
    """The actor was restarted while it had the message in hand, so that nobody knows how far it came.

    Attributes:
        actor: Its name.
        message: The type of the message.
        reason: Why it was restarted.
    """

    def __init__(self, actor: str, message: str, reason: str) -> None:
        super().__init__(actor, message, reason)
        self.actor, self.message, self.reason = actor, message, reason

    def __str__(self) -> str:
        return (
            f"actor {self.actor} was restarted while it had {self.message} in hand: {self.reason}; "
            "it lives, and may have done a part of it"
        )


class RestartsExhausted(ActorError):
    """The actor failed more often than its supervision allows.

    Attributes:
        actor: Its name.
        max_restarts: How many restarts it had.
        within: The window in seconds.
        last: The failure that was one too many, in words; it is the cause as well.
    """

    def __init__(self, actor: str, max_restarts: int, within: float, last: str) -> None:
        super().__init__(actor, max_restarts, within, last)
        self.actor, self.max_restarts, self.within, self.last = actor, max_restarts, within, last

    def __str__(self) -> str:
        return (
            f"actor {self.actor} has used up its {self.max_restarts} restarts within {self.within:g} s "
            f"(Supervision.max_restarts, Supervision.within); its last failure: {self.last}"
        )


class MailboxFull(ActorError):
    """A bounded mailbox has no room now.

    Attributes:
        actor: Whose mailbox.
        depth: Messages in it, which is its bound.
    """

    def __init__(self, actor: str, depth: int) -> None:
        super().__init__(actor, depth)
        self.actor, self.depth = actor, depth

    def __str__(self) -> str:
        return (
            f"the mailbox of {self.actor} is full ({self.depth} messages): "
            "await tell() to wait for room, or spawn the actor with a larger mailbox"
        )


class CallCycle(ActorError):
    """An ask would wait for an actor that waits for this very ask.

    Attributes:
        chain: Names of the actors from the first asker to the repeated one.
    """

    def __init__(self, chain: Sequence[str]) -> None:
        super().__init__(tuple(chain))
        self.chain = tuple(chain)

    def __str__(self) -> str:
        return f"call cycle {' -> '.join(self.chain)}: tell() instead of ask() at one of these hops"


class UnhandledMessage(ActorError, TypeError):
    """The actor has no handler for messages of this type.

    Attributes:
        actor: Its name.
        message: The type of the message.
        handled: Types it has handlers for.
    """

    def __init__(self, actor: str, message: str, handled: Sequence[str]) -> None:
        super().__init__(actor, message, tuple(handled))
        self.actor, self.message, self.handled = actor, message, tuple(handled)

    def __str__(self) -> str:
        return f"{self.actor} has no handler for {self.message}; it handles {', '.join(self.handled) or 'nothing'}"


class MessageNotPortable(ActorError, TypeError):
    """A message or a reply cannot travel between processes, and its system checks that all can.

    Attributes:
        what: Its type.
        where: What of it cannot, as in ``payload['lock']``; empty: itself.
        kind: The type of that.
        why: What the codec says.
    """

    def __init__(self, what: str, where: str, kind: str, why: str) -> None:
        super().__init__(what, where, kind, why)
        self.what, self.where, self.kind, self.why = what, where, kind, why

    def __str__(self) -> str:
        where = f"its {self.where} is" if self.where else "it is"
        return f"{self.what} cannot travel: {where} a {self.kind} ({self.why}); send plain data in its place"


class WrongLoop(ActorError, RuntimeError):
    """An actor system was used from another event loop than its own.

    Attributes:
        system: Its name.
        owner: The loop it was opened on.
        here: The loop it was used from.
    """

    def __init__(self, system: str, owner: str, here: str) -> None:
        super().__init__(system, owner, here)
        self.system, self.owner, self.here = system, owner, here

    def __str__(self) -> str:
        return (
            f"actor system {self.system} belongs to {self.owner} and was used from {self.here}: "
            "reach it with system.call_soon_threadsafe(), or open a system on this loop"
        )


class CallTimeout(AexecError, TimeoutError):
    """A call's deadline passed.

    Attributes:
        call: What was called, as in ``Increment to counter-1`` or ``echo on ranks 0, 2``.
        timeout: The limit in seconds, 0 or less when the deadline was past already.
        started: False: it never ran, so that a retry is safe.
    """

    def __init__(self, call: str, timeout: float, started: bool) -> None:
        super().__init__(call, timeout, started)
        self.call, self.timeout, self.started = call, timeout, started

    def __str__(self) -> str:
        state = "it had started, and may still be running" if self.started else "it never started"
        return f"{self.call} passed its limit of {max(self.timeout, 0.0):.3g} s ({state})"


# ---------------------------------------------------------------- executors and workers


class ProtocolError(AexecError):
    """Two parts of aexec disagree: a fault of ours, or of a third-party executor."""


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
    """

    def __init__(self, method: str, worker: str, known: Sequence[str] = ()) -> None:
        super().__init__(method, worker, tuple(known))
        self.method, self.worker, self.known = method, worker, tuple(known)

    def __str__(self) -> str:
        return f"{self.worker} has no method {self.method!r}; it has {', '.join(self.known) or 'none'}"


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
        return f"rank {self.rank}, {self.method}: {self.type_name}: {self.text}"


class WorkerDied(AexecError):
    """A worker process ended, or its compute thread did.

    Attributes:
        rank: Its rank.
        pid: Its process id.
        exit_code: Its exit code; None when a signal ended it.
        signal: Name of the signal that ended it, as in ``SIGKILL``.
        phase: What it was doing.
        step: The step it was at; None outside of steps.
        stderr_tail: The last lines it wrote to its standard error.
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
    ) -> None:
        super().__init__(rank, pid, exit_code, signal, phase, step, stderr_tail)
        self.rank, self.pid, self.exit_code, self.signal = rank, pid, exit_code, signal
        self.phase, self.step, self.stderr_tail = phase, step, stderr_tail

    def __str__(self) -> str:
        how = f"ended by {self.signal}" if self.signal else f"ended with exit code {self.exit_code}"
        where = self.phase if self.step is None else f"{self.phase}, step {self.step}"
        tail = f"\nlast lines of its stderr:\n{self.stderr_tail}" if self.stderr_tail else ""
        return f"rank {self.rank} (pid {self.pid}) {how} during {where}{tail}"


def note(error: BaseException, text: str) -> Any:
    """Attach a line to an error, once, and return the error, so that it can be raised."""
    if text not in getattr(error, "__notes__", ()):
        error.add_note(text)
    return error
