"""One rank whose process Ray made: its actor, its two lines, and the signs of its end.

One of its threads is in one long call of the actor, ``serve``; what comes of that call tells of
its death, wherever it is. Its lines break besides, and on this machine the kernel tells that its
process has ended, and how.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
from collections.abc import Callable
from functools import partial
from typing import Any

from aexec.errors import AexecError, ProtocolError, WorkerDied
from aexec.executor.lines.rank import RankLines
from aexec.executor.proc import process_state
from aexec.executor.ray.api import actor_errors, answer, kill, on_thread, system_errors, task_error
from aexec.executor.ray.health import Ending, exit_status, log_tail, peer_pidfd, ray_says
from aexec.executor.ray.worker_actor import ActorFacts

__all__ = ("RayRank", "ask")

_UNSAID = "its lines broke off, and Ray has not said why yet: if its node is gone, that takes Ray a while to see"


class RayRank(RankLines):
    """One rank.

    Args:
        rank: Its rank.
        actor: Its actor; this handle keeps it alive.
        facts: What the actor says of its place.
        is_here: It is on this process's node.
        on_death: Told once that it has ended, whoever wanted it.
        on_refusal: Told, with its rank, of an error that kept it from being a worker at all.
    """

    def __init__(
        self,
        rank: int,
        actor: Any,
        facts: ActorFacts,
        *,
        is_here: bool,
        on_death: Callable[[WorkerDied], None],
        on_refusal: Callable[[int, AexecError], None],
    ) -> None:
        super().__init__(rank, on_death)
        self.actor, self.facts, self.is_here = actor, facts, is_here
        self.pid = facts.place.pid
        self.node = facts.place.node_ip
        self._on_refusal = on_refusal
        self._pidfd = -1
        self._ending = Ending()
        self._serving: asyncio.Future[Any] | None = None

    @property
    def is_halted(self) -> bool:
        """True for a process of this machine that ``SIGSTOP`` or a debugger holds."""
        return self._pidfd >= 0 and process_state(self.pid) == "stopped"

    @property
    def is_watched(self) -> bool:
        """It is in its long call, or was: so its end is seen, and :attr:`gone` set with it."""
        return self._serving is not None

    def serve(self, ref: Any) -> None:
        """It is in its long call now.

        Args:
            ref: Stands for what comes of it.
        """
        self._serving = asyncio.wrap_future(ref.future())
        self._serving.add_done_callback(self._served)

    def meet(self, work: socket.socket) -> None:
        """It has come to the meeting; if it is here, the kernel tells of its end from now on."""
        if self.is_here and self._pidfd < 0 and work.family == socket.AF_UNIX:
            self._pidfd = peer_pidfd(work)
            if self._pidfd >= 0:
                self._loop.add_reader(self._pidfd, self._process_ended)

    def kill(self, because: str = "") -> None:
        """End the process at once; one that the kernel here cannot reach, by way of Ray. Never blocks.

        Args:
            because: What its death is to be told with.
        """
        self._ending = self._ending.known_as(Ending(cause=because))
        if self._pidfd >= 0:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
        else:
            on_thread("kill actor", partial(kill, [self.actor]))

    def close(self) -> None:
        """Let go of everything; a process that is still there loses its lines."""
        super().close()
        if self._serving is not None:
            self._serving.remove_done_callback(self._served)
            self._serving.add_done_callback(_hear)
        if self._pidfd >= 0:
            self._loop.remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = -1

    def _served(self, serving: asyncio.Future[Any]) -> None:
        """Its long call has ended: so has its process, or it is about to."""
        if self._closed or serving.cancelled():
            return
        error = serving.exception()
        if isinstance(error, task_error()) and not self._connected:
            self._on_refusal(self.rank, _refusal(self, error))
            return
        if error is not None:
            said = ray_says(error)
            if not isinstance(error, actor_errors()):  # of the call, and not of the actor
                said = Ending(cause=f"Ray: {type(error).__name__}: {error}".partition("\n")[0])
            self._ending = self._ending.known_as(said)
        if self._pidfd < 0:
            self.gone.set()
        self._ask_kernel()
        knows_how = self._pidfd < 0 or not self._ending.is_silent  # Ray may be told before the kernel has the status
        self._sign(self._signs._replace(process=True, status=knows_how))

    def _process_ended(self) -> None:
        self._loop.remove_reader(self._pidfd)
        self._ask_kernel()
        self.gone.set()
        self._sign(self._signs._replace(process=True))  # Ray's word may follow: the cause

    def _ask_kernel(self) -> None:
        """It tells how a process has ended once that was reaped, which may be a while after its end."""
        if self._pidfd >= 0:
            self._ending = exit_status(self._pidfd).known_as(self._ending)

    def _make_end(self) -> None:
        self.kill()

    def _obituary(self) -> WorkerDied:
        self._ask_kernel()
        words, ending = self._last_words, self._ending
        phase, step = (self.doing, self.work.step) if words is None else (words.phase, words.step)
        code, by = (ending.code, ending.signal) if words is None else (words.exit_code, None)
        cause = ending.cause
        if not cause and self._signs.lines and not (self._signs.process or self._signs.status):
            cause = _UNSAID
        return WorkerDied(self.rank, self.pid, code, by, phase, step, self._tail(), self.node, cause)

    def _tail(self) -> str:
        path = self.facts.log
        if not path:
            return ""
        return log_tail(path, self.facts.log_start) if self.is_here else f"they are in {path} on node {self.node}"


async def ask(worker: RayRank, ref: Any) -> Any:
    """What one of the short calls of a rank's actor gives.

    Args:
        worker: The rank.
        ref: Stands for it.

    Raises:
        AexecError: What the call raised.
        WorkerDied: The actor is gone.
    """
    try:
        return await answer(ref)
    except task_error() as error:
        raise _refusal(worker, error) from None
    except system_errors() as error:
        how = ray_says(error)
        detail = how.cause or str(error).strip()
        died = WorkerDied(worker.rank, worker.pid, how.code, how.signal, worker.doing, node=worker.node, cause=detail)
        raise died from None


def _refusal(worker: RayRank, error: Exception) -> AexecError:
    """What kept a living actor from being a worker."""
    cause: object = getattr(error, "cause", None)
    if isinstance(cause, AexecError):
        return cause
    return ProtocolError(f"rank {worker.rank} on node {worker.node} could not be a worker: {cause!r}")


def _hear(serving: asyncio.Future[Any]) -> None:
    """Its error is nobody's any longer."""
    if not serving.cancelled():
        serving.exception()
