"""What may be done with a running executor beside calls and steps: sleep, wake it, pause it, look at it."""

from __future__ import annotations

import abc
import contextlib
from collections.abc import AsyncGenerator, Collection
from typing import Any, TypeVar

from anyio import move_on_after

from aexec.executor.calls import Pause, Resume, Sleep, Stacks, WakeUp, WeightsLoaded
from aexec.executor.gate import check_pause_mode
from aexec.executor.limits import check_timeout
from aexec.messages.base import Message
from aexec.messages.operations import PauseMode
from aexec.model.residency import sleep_event, wake_tags

__all__ = ("Operations",)

R = TypeVar("R")

_RESUME_SECONDS = 10.0  # far more than the executor's actor takes


class Operations(abc.ABC):
    """The operations of ``ExecutorHandle``."""

    async def sleep(self, level: int = 1, timeout: float | None = None) -> list[Any]:
        """Let go of device memory on all ranks; they stay alive, and take calls.

        New steps are refused from now on, and steps in flight are waited for. Plain calls
        that are under way end first; running ``async def`` methods are not waited for. If
        a rank fails on the way, the weights count as discarded on all of them.

        Args:
            level: 1 keeps the weights in host memory and drops the KV cache; 2 discards
                both, so that ``wake_up`` has to be followed by new weights.
            timeout: Seconds for all of it; None: no limit.

        Returns:
            What the worker's ``sleep(level)`` returned, in rank order.

        Raises:
            UnknownMethod: The worker class has no ``sleep``.
            ModelNotReady: It is in a state that does not allow it; says what to do.
            CallTimeout: The limit has passed; while steps were in flight, nothing has changed.
            ConfigError: There is no such level.
        """
        sleep_event(level)
        return await self._ask(Sleep(level, check_timeout("sleep", timeout)))

    async def wake_up(self, tags: Collection[str] | None = None, timeout: float | None = None) -> list[Any]:
        """Bring back on all ranks what sleeps.

        After sleep level 2 the weights have room and no values: steps are refused until
        ``load_weights`` or ``update_weights`` was called on all ranks; see :meth:`weights_loaded`.

        Args:
            tags: ``weights`` and ``kv_cache``, or one of them, so that new weights come
                before the cache takes its memory; None: both.
            timeout: Seconds; None: no limit.

        Returns:
            What the worker's ``wake_up(tags)`` returned, in rank order.

        Raises:
            UnknownMethod: The worker class has no ``wake_up``.
            CallTimeout: The limit has passed; wake it up again.
            ConfigError: There is no such tag.
        """
        wanted = None if tags is None else tuple(sorted(wake_tags(tags)))
        return await self._ask(WakeUp(wanted, check_timeout("wake_up", timeout)))

    async def weights_loaded(self) -> None:
        """Say that all ranks have whole weights again, where no method told it.

        ``load_model``, ``load_weights``, ``reload_weights`` and ``update_weights`` called by
        name on all ranks tell it by themselves.

        Raises:
            ModelNotReady: The weights sleep: wake them up first.
        """
        await self._ask(WeightsLoaded())

    async def pause(self, mode: PauseMode = "keep", timeout: float | None = None) -> None:
        """Send no more steps until :meth:`resume`; calls work meanwhile.

        Steps that come while it is paused wait for the resume, in order, and the clock of
        ``step_timeout`` stands still for them. A step that was launched may be sampled.

        Args:
            mode: ``keep`` returns at once. ``finish`` returns when the steps in flight were
                sampled. ``abort`` ends all steps that wait or are in flight with
                ``ExecutorPaused``, which is retryable, and returns when the ranks are through
                with them; their results are dropped.
            timeout: Seconds for steps in flight to end; None: no limit.

        Raises:
            CallTimeout: Steps are in flight still; it is paused all the same.
            ConfigError: There is no such mode.
        """
        await self._ask(Pause(check_pause_mode(mode), check_timeout("pause", timeout)))

    async def resume(self) -> None:
        """Send steps again, those that have waited first; nothing happens unless it is paused.

        Raises:
            ModelNotReady: A part of the model is asleep or missing: nothing could run.
        """
        await self._ask(Resume())

    @contextlib.asynccontextmanager
    async def paused(self, mode: PauseMode = "keep", timeout: float | None = None) -> AsyncGenerator[None]:
        """Paused for a block: ``async with executor.paused("finish"): ...``; see :meth:`pause`."""
        try:
            await self.pause(mode, timeout)
            yield
        finally:
            with move_on_after(_RESUME_SECONDS, shield=True):  # cancelled or not: nobody else resumes it
                await self.resume()

    async def stacks(self, timeout: float = 1.0) -> dict[int, str]:
        """Where each rank is: the stacks of its compute thread and of its running ``async def`` methods.

        Args:
            timeout: Seconds; ranks that have not answered by then are missing.
        """
        return await self._ask(Stacks(check_timeout("stacks", timeout) or timeout))

    @abc.abstractmethod
    async def _ask(self, message: Message[R]) -> R:
        """Ask the executor's actor."""
