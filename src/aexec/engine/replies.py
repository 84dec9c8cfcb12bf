"""The executor's answers about steps, as messages to the driver, without a task for each.

A step is launched and sampled by two calls of the executor, and a task that awaits a call and
tells the driver costs two turns of the loop before and after it, in which stages stand still.
An executor with a ``post`` takes a call at once, in the turn of the driver, and its answer
is a message to the driver as soon as it is there. Every other executor is asked in a task.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from aexec.actor import Actor
from aexec.engine.calls import StepEnded, StepFailed, StepLaunched
from aexec.executor.base import Executor
from aexec.executor.direct import Reply
from aexec.messages.step import ExecuteModel, SampleTokens, StepId

__all__ = ("StepReplies",)


class Post(Protocol):
    """``post`` of an executor."""

    def __call__(self, message: ExecuteModel | SampleTokens, reply: Reply, /) -> bool:
        """Take a call; False: it has to be asked."""
        ...


class StepReplies:
    """Makes calls of the executor, and messages of what comes of them.

    Args:
        executor: What is called.
        driver: Is told; it has its context by the first call.
    """

    def __init__(self, executor: Executor, driver: Actor) -> None:
        self._executor, self._driver = executor, driver
        self._post: Post | None = getattr(executor, "post", None)
        self._open: set[_Reply] = set()

    def __repr__(self) -> str:
        return f"<StepReplies: {len(self._open)} awaited>"

    def launch(self, message: ExecuteModel) -> None:
        """Launch a step: ``StepLaunched`` or ``StepFailed`` follows."""
        step = message.step
        if not self._posted(message, lambda reply: StepLaunched(step, reply)):
            self._driver.context.pipe_to_self(
                self._executor.execute_model(message),
                lambda reply: StepLaunched(step, reply),
                lambda error: StepFailed(step, error),
            )

    def sample(self, message: SampleTokens) -> None:
        """Sample a step: ``StepEnded`` or ``StepFailed`` follows."""
        step = message.step
        if not self._posted(message, lambda result: StepEnded(step, result.output)):
            self._driver.context.pipe_to_self(
                self._executor.sample_tokens(step, message.grammar),
                lambda result: StepEnded(step, result.output),
                lambda error: StepFailed(step, error),
            )

    def leave(self) -> None:
        """Wait for nothing any longer: the driver ends."""
        left, self._open = self._open, set()
        for reply in left:
            reply.leave()

    def _posted(self, message: ExecuteModel | SampleTokens, wrap: Callable[[Any], StepLaunched | StepEnded]) -> bool:
        if self._post is None:
            return False
        reply = _Reply(message.step, wrap, self._tell)
        self._open.add(reply)
        if not self._post(message, reply):
            self._open.discard(reply)
            return False
        return True

    def _tell(self, reply: _Reply, message: StepLaunched | StepEnded | StepFailed) -> None:
        if reply in self._open:
            self._open.discard(reply)
            self._driver.context.post(message)


class _Reply:
    """The way back of one call; see ``executor.direct.Reply``."""

    __slots__ = ("_left", "_step", "_tell", "_wrap")

    def __init__(
        self,
        step: StepId,
        wrap: Callable[[Any], StepLaunched | StepEnded],
        tell: Callable[[_Reply, StepLaunched | StepEnded | StepFailed], None],
    ) -> None:
        self._step, self._wrap, self._tell = step, wrap, tell
        self._left: Callable[[], object] | None = None

    def resolve(self, value: Any, /) -> None:
        self._tell(self, self._wrap(value))

    def fail(self, error: Exception, /) -> None:
        self._tell(self, StepFailed(self._step, error))

    def on_cancel(self, callback: Callable[[], object], /) -> None:
        self._left = callback

    def leave(self) -> None:
        if self._left is not None:
            self._left()
