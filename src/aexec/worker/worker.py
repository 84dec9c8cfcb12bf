"""The worker actor: one rank, its three lanes, and a plain worker class behind them.

* Steps go to the compute thread, in order (``ModelRunnerActor``).
* Control calls: plain methods go to the same thread, in order of acceptance with the
  steps; ``async def`` methods run on the loop, beside plain methods and each other, once
  the steps that were accepted before them have ended.
* The liveness lane is answered by the loop, whatever the compute thread does.
"""

from __future__ import annotations

import inspect
import os
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import anyio

from aexec.actor import Deferred, Exit, handles
from aexec.errors import ActorStopped, AexecError, WorkerDied
from aexec.messages.control import CallMethod, Dump, Greet, Hello, Ping, Pong, Revoke, Shutdown
from aexec.model.actor import ModelRunnerActor
from aexec.worker.compute import ComputeThread, Job, Pulse
from aexec.worker.context import WorkerContext
from aexec.worker.coroutines import AsyncCall
from aexec.worker.host import Target, WorkerHost
from aexec.worker.remote import caller_error

__all__ = ("WorkerActor",)


_NONE: Mapping[str, Any] = {}


class _Queued(NamedTuple):
    job: Job
    reply: Deferred[Any]


class _AfterSteps(NamedTuple):
    jobs: int  # jobs of steps that have to end first
    call: AsyncCall


class WorkerActor(ModelRunnerActor):
    """Hosts the worker class that ``place.config`` names.

    Args:
        place: The rank's place.
        phase: Told what the worker has come to while it starts.
        died: Told when worker code has ended the compute thread, as ``sys.exit`` does.
    """

    self_explanatory = (AexecError,)  # they name rank and method

    def __init__(
        self,
        place: WorkerContext,
        phase: Callable[[str], None],
        died: Callable[[WorkerDied], None],
    ) -> None:
        self.place = place
        self.host = WorkerHost(place)
        self.thread = ComputeThread(f"aexec-worker-{place.rank}")
        super().__init__(self.host, self.thread)
        self._phase, self._died = phase, died
        self._queued: dict[int, _Queued] = {}
        self._coroutines: dict[int, AsyncCall] = {}
        self._after_steps: deque[_AfterSteps] = deque()
        self._revoked: set[int] = set()  # revoked before they came: the liveness lane overtakes
        self._last_call = 0
        self._inner: set[_Errand] = set()
        self._constructed = self._over = self._dead = False

    def __repr__(self) -> str:
        return f"<WorkerActor rank {self.place.rank}: {self.host.worker_name}, {self.thread!r}>"

    async def on_start(self) -> None:
        """Start the compute thread; the worker is constructed when it is greeted."""
        self.thread.start(self.context.system.call_soon_threadsafe, self._thread_died)

    async def on_stop(self, reason: Exit) -> None:  # noqa: ARG002
        """End the worker, unless :class:`~aexec.messages.control.Shutdown` did already."""
        await self._end(self.place.config.close_grace)

    @handles(Greet)
    async def greet(self, message: Greet) -> Hello:  # noqa: ARG002
        """Run ``worker_init`` and construct the worker, on the compute thread, if that is not done yet.

        Raises:
            ConfigError: The worker cannot be made from its settings.
            RemoteError: What the worker's code raised.
        """
        if not self._constructed:
            for phase, work in (("worker_init", self.host.prepare), ("__init__", self.host.construct)):
                self._phase(phase)
                try:
                    await self._on_thread(phase, work)
                except Exception as error:  # noqa: BLE001 - whatever worker code raises
                    raise self.failure(self.host.at(phase), error) from None
            self._constructed = True
            if self.host.wants_inference_mode:
                self.thread.allow_inference_mode()
        return self.host.hello()

    @handles(CallMethod)
    def call_method(self, message: CallMethod) -> Deferred[Any]:
        """Call a method, where and when its kind allows.

        Raises:
            UnknownMethod: The worker has no such method.
        """
        target = self.host.target_of(message)
        reply: Deferred[Any] = self.context.defer(message)
        self._last_call = max(self._last_call, message.call)
        if message.call in self._revoked:
            self._revoked.discard(message.call)
            reply.fail(_revoked(target.name))
        elif target.is_async:
            self._call_async(self._async_call(message.call, target, reply, message.args, message.kwargs))
        else:
            self._call_on_thread(message, target, reply)
        return reply

    @handles(Ping, lane="urgent")
    def ping(self, message: Ping) -> Pong:  # noqa: ARG002
        """How the compute thread is doing."""
        now = self.thread.statistics()
        return Pong(rank=self.place.rank, phase=now.phase, step=now.step, age=now.age, queued=now.queued)

    @handles(Dump, lane="urgent")
    def dump(self, message: Dump) -> str:  # noqa: ARG002
        """Where it is."""
        return self.stack()

    @handles(Revoke, lane="urgent")
    def revoke(self, message: Revoke) -> bool:
        """Take back a control call whose asker is gone."""
        if message.call > self._last_call:
            self._revoked.add(message.call)
            return True
        if message.call in self._queued:
            return self._take_back(message.call)
        call = self._coroutines.get(message.call)
        if call is None:
            return False
        self._cancel(call)
        return not call.has_begun

    @handles(Shutdown, lane="urgent")
    def shut_down(self, message: Shutdown) -> Deferred[bool]:
        """End the worker within its grace."""
        reply: Deferred[bool] = self.context.defer(message)

        async def end() -> None:
            reply.resolve(await self._end(message.grace))

        self.context.start_task(end())
        return reply

    def failure(self, method: str, error: Exception) -> AexecError:
        """What the caller of a method is given for what it raised."""
        return caller_error(error, rank=self.place.rank, method=method)

    def stack(self) -> str:
        """The stacks of the compute thread and of running ``async def`` methods."""
        return self.thread.stack() + "".join(call.stack() for call in self._coroutines.values())

    def step_job_ended(self) -> None:
        """Start the ``async def`` methods that have waited for it."""
        while self._after_steps and self._after_steps[0].jobs <= self.jobs_ended:
            call = self._after_steps.popleft().call
            if call.id in self._coroutines:
                self._start(call)

    def _call_on_thread(self, message: CallMethod, target: Target, reply: Deferred[Any]) -> None:
        call = partial(target.call, *message.args, **message.kwargs)
        job = self.thread.submit(target.name, call, partial(self._called, message.call, target))
        self._queued[message.call] = _Queued(job, reply)

    def _called(self, call: int, target: Target, value: Any, error: Exception | None) -> None:
        reply = self._queued.pop(call).reply
        if error is not None:
            reply.fail(self.failure(target.name, error))
        elif inspect.isawaitable(value):  # a plain function that returned a coroutine
            self._start(self._async_call(call, target._replace(call=lambda: value), reply))
        else:
            reply.resolve(value)

    def _async_call(
        self,
        call: int,
        target: Target,
        reply: Deferred[Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] = _NONE,
    ) -> AsyncCall:
        return AsyncCall(call, target.name, lambda: target.call(*args, **kwargs), reply, self.failure)

    def _call_async(self, call: AsyncCall) -> None:
        self._coroutines[call.id] = call
        if self.jobs_ended < self.jobs_queued:
            self._after_steps.append(_AfterSteps(self.jobs_queued, call))
        else:
            self._start(call)

    def _start(self, call: AsyncCall) -> None:
        self._coroutines[call.id] = call
        call.task = self.context.start_task(self._run(call))

    def _cancel(self, call: AsyncCall) -> None:
        call.cancel()
        if not call.has_begun:
            del self._coroutines[call.id]

    async def _run(self, call: AsyncCall) -> None:
        try:
            await call.run()
        except (SystemExit, KeyboardInterrupt) as fatal:
            self._thread_died(fatal, Pulse(call.name, time.monotonic(), None))
        finally:
            self._coroutines.pop(call.id, None)

    def _take_back(self, call: int) -> bool:
        never_runs = self._queued[call].job.cancel()
        if never_runs:
            queued = self._queued.pop(call)
            queued.reply.fail(_revoked(queued.job.phase))
        return never_runs

    async def _on_thread(self, phase: str, work: Callable[[], Any]) -> Any:
        """Run an errand of the actor itself."""
        errand = _Errand()
        self._inner.add(errand)
        job = self.thread.submit(phase, work, errand.finish)
        try:
            return await errand.result()
        finally:
            job.cancel()
            self._inner.discard(errand)

    def _thread_died(self, fatal: BaseException, pulse: Pulse) -> None:
        died = WorkerDied(self.place.rank, os.getpid(), _exit_code(fatal), None, pulse.phase, pulse.step)
        for errand in self._inner:
            errand.finish(None, died)
        self._dead = True
        self._died(died)
        self.context.stop()  # whoever still waits for an answer has it from the end of the actor

    async def _end(self, grace: float) -> bool:
        if self._over:
            return not self.thread.is_alive
        self._over = True
        self.drop_steps("the worker was shut down")
        self.thread.discard_queued()
        for queued in self._queued.values():  # one of them may run by now: it is told
            queued.job.cancel()
        for errand in self._inner:  # of a start that is given up: it may be among what was discarded
            errand.finish(None, ActorStopped(self.context.ref.name, "the worker was shut down"))
        for call in list(self._coroutines.values()):
            self._cancel(call)
        deadline = time.monotonic() + grace
        with anyio.move_on_after(grace):
            await self._run_shutdown_hook()
        return await self.thread.close(max(deadline - time.monotonic(), 0.0))

    async def _run_shutdown_hook(self) -> None:
        if self._dead or not (self._constructed and "shutdown" in self.host.methods):
            return
        target = self.host.target("shutdown")
        try:
            if target.is_async:
                await target.call()
            else:
                await self._on_thread("shutdown", target.call)
        except Exception:
            self.context.log.exception("the worker's shutdown hook failed", rank=self.place.rank)


class _Errand:
    """A job that the actor itself waits for."""

    def __init__(self) -> None:
        self._done = anyio.Event()
        self._value: Any = None
        self._error: Exception | None = None

    def finish(self, value: Any, error: Exception | None) -> None:
        self._value, self._error = value, error
        self._done.set()

    async def result(self) -> Any:
        await self._done.wait()
        if self._error is not None:
            raise self._error
        return self._value


def _revoked(name: str) -> ActorStopped:
    return ActorStopped(name, "its caller is gone")


def _exit_code(fatal: BaseException) -> int:
    code = fatal.code if isinstance(fatal, SystemExit) else 1
    if code is None:
        return 0
    return code if isinstance(code, int) else 1
