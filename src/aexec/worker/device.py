"""The main thread of a worker process, on which its device is used: a blocking loop over the work line.

No thread hop, no event loop: what comes is done, in order. Each message is answered on the
line it came on, but for plain methods that return something to await: the control thread
awaits it, and answers.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Callable
from time import monotonic
from typing import Any, Protocol

from aexec.errors import ActorStopped, AexecError, ChannelClosed, ProtocolError, StepStateError
from aexec.messages.control import CallMethod
from aexec.messages.process import Ended, PhaseReached
from aexec.messages.step import ExecuteModel, PairedStep, SampleTokens, StepId, StepResult
from aexec.model.order import Forward, Sampling, StepBook
from aexec.observe import get_logger
from aexec.transport import Frame, Kind
from aexec.worker.answers import Answers
from aexec.worker.compute import enter_inference_mode, now_runs
from aexec.worker.context import WorkerContext
from aexec.worker.control import ControlThread
from aexec.worker.exits import exit_code
from aexec.worker.host import WorkerHost
from aexec.worker.rank import RankState, new_pulse

__all__ = ("DeviceThread", "StepRoad")


_MESSAGE = Kind.MESSAGE  # looked up once


class StepRoad(Protocol):
    """Where the device thread's work comes from, and its answers go: a ``BlockingChannel``, or what acts as one."""

    def receive(self) -> Frame | None:
        """Wait for the next frame; None: somebody has called ``wake`` on the work line.

        Raises:
            ChannelClosed: The driver is gone.
        """
        ...

    def send(self, kind: Kind, call: int, value: Any = None, /) -> None:
        """Send a frame.

        Raises:
            ChannelClosed: The driver is gone.
            Exception: What is wrong with the value; something else may be sent instead.
        """
        ...


class DeviceThread:
    """Brings the worker class to life, runs what comes for it, and ends it.

    Args:
        line: The work line, or what stands for it.
        rank: What both threads know.
        control: The other thread.
    """

    def __init__(self, line: StepRoad, rank: RankState, control: ControlThread) -> None:
        self._line, self._rank, self._control = line, rank, control
        self._answers = Answers(line, rank.rank)
        self._steps: StepBook[int] = StepBook()
        self._inference = False
        self._handlers: dict[type[Any], Callable[[int, Any], None]] = {
            ExecuteModel: self._execute,
            SampleTokens: self._sample,
            PairedStep: self._execute_and_sample,
            CallMethod: self._call,
        }

    def __repr__(self) -> str:
        return f"<DeviceThread of {self._rank!r}: {self._steps!r}>"

    def run(self, make_context: Callable[[], WorkerContext]) -> int:
        """Be the worker until it is to end; the exit code of the process.

        Args:
            make_context: Gets the rank's context, which may import anything.

        Raises:
            ChannelClosed: The driver is gone.
        """
        try:
            with contextlib.ExitStack() as guard:
                self._construct(make_context)
                self._serve(guard)
                self._shut_down()
        except ChannelClosed:
            raise
        except BaseException as fatal:  # noqa: BLE001 - sys.exit and its like, in worker code
            return self._ended(fatal)
        return 0

    def _construct(self, make_context: Callable[[], WorkerContext]) -> None:
        phase = "import"
        try:
            self._enter(phase)
            host = self._rank.host = WorkerHost(make_context())
            for phase, work in (("worker_init", host.prepare), ("__init__", host.construct)):
                self._enter(phase)
                work()
        except Exception as error:  # noqa: BLE001 - whatever worker code raises: the greeter hears it
            where = phase if phase == "import" else self._host.at(phase)  # without a context there is no host
            self._control.post(self._control.lane.construction_failed, where, error)
        else:
            self._inference = host.wants_inference_mode
            self._rank.constructed = True
            self._enter("constructed")
            self._control.post(self._control.lane.construction_ended, host.hello())
        self._rank.begin("idle")

    def _enter(self, phase: str) -> None:
        self._rank.begin(phase)
        self._line.send(Kind.EVENT, 0, PhaseReached(phase))

    def _serve(self, guard: contextlib.ExitStack) -> None:
        line, rank, modules = self._line, self._rank, sys.modules
        while not rank.ending:
            frame = line.receive()
            if frame is None or frame.kind is not _MESSAGE:
                continue
            if self._inference and "torch" in modules and enter_inference_mode(guard):
                self._inference = False
            self._handle(frame)
            del frame  # while we wait, its arrays are nobody's, and their memory is free again

    def _handle(self, frame: Frame) -> None:
        message: Any = frame.value
        handler = self._handlers.get(message.__class__)
        if handler is not None and frame.error is None and self._rank.constructed:
            handler(frame.call, message)
        elif frame.error is not None:
            self._answers.fail(frame.call, "a message", frame.error)
        else:
            what = type(message).__name__
            why = "which has no worker" if handler else "and does not belong on its work line"
            self._answers.fail(frame.call, what, ProtocolError(f"{what} was sent to {self._rank!r}, {why}"))

    def _execute(self, call: int, message: ExecuteModel) -> None:
        step, host = message.step, self._host
        try:
            forward = self._steps.execute(message, samples=host.samples)
        except StepStateError as refused:
            self._answers.fail(call, "execute_model", refused)
        else:
            value, error = self._run("execute_model", step, host.execute_model, message)
            if forward is None:
                self._step_ended(step, call, None, value, error)
            else:
                forward.error = error
                self._steps.forward_ended(step, error)
                if error is not None:
                    self._sample_all(self._steps.take_ready())  # it holds up no younger step any longer
        self._rank.step_ended(self._tell_steps)

    def _execute_and_sample(self, call: int, message: PairedStep) -> None:
        rank = self._rank
        rank.is_to_sample = True
        self._execute(call, message.launch)
        rank.is_to_sample = False
        if not rank.ending:
            self._sample(message.sampling, SampleTokens(message.launch.step))

    def _sample(self, call: int, message: SampleTokens) -> None:
        try:
            forward = self._steps.spend(message.step)
        except StepStateError as error:
            self._answers.fail(call, "sample_tokens", error)
        else:
            if forward.error is not None:
                self._answers.fail(call, "execute_model", forward.error)
            else:
                self._sample_all(self._steps.ask(Sampling(message.step, message.grammar, call, forward)))
        self._rank.step_ended(self._tell_steps)

    def _sample_all(self, samplings: list[Sampling[int]]) -> None:
        for ready in samplings:
            value, error = self._run("sample_tokens", ready.step, self._host.sample_tokens, ready.step, ready.grammar)
            self._step_ended(ready.step, ready.reply, ready.forward, value, error)

    def _step_ended(
        self, step: StepId, call: int, forward: Forward | None, value: Any, error: Exception | None
    ) -> None:
        phase = self._steps.ended(step, forward, error)
        if error is None:
            self._answers.reply(call, phase, StepResult(step, value))
        else:
            self._answers.fail(call, phase, error)

    def _tell_steps(self) -> None:
        self._control.post(self._control.lane.start_waiting)

    def _call(self, call: int, message: CallMethod) -> None:
        try:
            target = self._host.target_of(message)
        except AexecError as refused:
            self._answers.fail(call, str(message.method), refused)
            return
        claim = self._rank.claims.take(call)
        if claim is None:
            self._answers.fail(call, target.name, ActorStopped(target.name, "its caller is gone"))
            return
        now_runs(claim)
        value, error = self._run(target.name, None, target.call, *message.args, **message.kwargs)
        now_runs(None)
        self._rank.claims.end()
        if error is not None:
            self._answers.fail(call, target.name, error)
        elif inspect.isawaitable(value):
            self._control.post(self._control.lane.await_for, call, target.name, value)
        else:
            self._answers.reply(call, target.name, value)

    def _run(
        self, phase: str, step: StepId | None, work: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> tuple[Any, Exception | None]:
        """Do it: what it gave, or what it raised."""
        value: Any = None
        error: Exception | None = None
        rank = self._rank
        last = rank.pulse[2] if step is None else step
        rank.pulse = new_pulse((phase, monotonic(), last))  # as begin() does
        try:
            value = work(*args, **kwargs)
        except Exception as raised:  # noqa: BLE001 - it belongs to whoever asked
            error = raised
        rank.pulse = new_pulse(("idle", monotonic(), last))  # after anything worse the phase stays: it is told
        try:
            return value, error
        finally:
            del error  # its traceback holds this frame: no cycle, or tensors outlive the call

    @property
    def _host(self) -> WorkerHost:
        host = self._rank.host
        assert host is not None
        return host

    def _shut_down(self) -> None:
        """The last hook; the control thread runs it if it is ``async def``."""
        self._steps.drop_all("the worker was shut down")
        host = self._rank.host
        if host is not None and self._rank.constructed and host.methods.get("shutdown") is False:
            self._rank.begin("shutdown")
            try:
                host.shutdown()
            except Exception:  # noqa: BLE001 - logged: an end is an end
                get_logger("aexec.worker").exception("the worker's shutdown hook failed", rank=self._rank.rank)
        self._rank.begin("ended")

    def _ended(self, fatal: BaseException) -> int:
        phase, _, step = self._rank.pulse
        code = exit_code(fatal)
        self._line.send(Kind.EVENT, 0, Ended(exit_code=code, phase=phase, step=step))
        return code
