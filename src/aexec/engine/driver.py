"""The driver: the actor that runs the step loop, between those who ask and the executor.

A step is a chain of messages to itself: schedule a batch and have the executor launch it
(:class:`RunStep`), then have it sampled (:class:`StepLaunched`), then take its tokens and
schedule the next (:class:`StepEnded`). Between these, requests come and go, as each is a
message like any other. What to run is the scheduler's decision, which is pure; this actor
only acts. Without requests nothing runs at all.
"""

from __future__ import annotations

import contextlib
import copy
from dataclasses import dataclass
from typing import NamedTuple

from aexec.actor import Actor, Deferred, Exit, handles
from aexec.engine.admission import RequestLimits, make_request
from aexec.engine.calls import (
    Abort,
    Generate,
    GetStatistics,
    Hold,
    Release,
    RunStep,
    StepEnded,
    StepFailed,
    StepLaunched,
)
from aexec.engine.request import Request, RequestStatus
from aexec.engine.scheduler import RequestUpdate, Scheduler, SchedulerStatistics
from aexec.engine.stream import TokenStream
from aexec.engine.text import RequestText, TextDelta, Tokenizer
from aexec.errors import AexecError, InvalidRequest, ProtocolError, RequestAborted, RequestFailed, StepStateError
from aexec.executor.base import Executor
from aexec.messages.batch import ModelRunnerOutput, SchedulerOutput
from aexec.messages.operations import PauseMode
from aexec.messages.request import TokenLogprobs
from aexec.messages.step import ExecuteModel, StepId, StepResult

__all__ = ("EngineDriver",)


@dataclass(slots=True)
class _Live:
    """A request that somebody waits for."""

    stream: TokenStream
    text: RequestText
    wants_prompt_logprobs: bool

    def take_prompt_logprobs(self, request: Request) -> tuple[TokenLogprobs | None, ...]:
        """Of the whole prompt, once: with the request's first token."""
        self.wants_prompt_logprobs = False
        return (None, *request.prompt_logprobs)


class _Delta(NamedTuple):
    """What one request's reader gets from one step."""

    live: _Live
    update: RequestUpdate
    text: TextDelta


class EngineDriver(Actor):
    """Runs requests on one executor.

    Args:
        executor: Runs the steps.
        scheduler: Decides them; the driver is its only user.
        limits: What a request has to satisfy.
        tokenizer: Turns tokens into text; None: there is no text.
        last_step: The last step that the executor has seen; ids go on from there.
        is_guest: The executor outlives the driver: leave nothing unfinished in it.
    """

    def __init__(
        self,
        executor: Executor,
        scheduler: Scheduler,
        limits: RequestLimits,
        tokenizer: Tokenizer | None,
        *,
        last_step: int = 0,
        is_guest: bool = False,
    ) -> None:
        self._executor, self._scheduler, self._is_guest = executor, scheduler, is_guest
        self._limits, self._tokenizer = limits, tokenizer
        self._live: dict[str, _Live] = {}
        self._step = StepId(last_step)
        self._batch: SchedulerOutput | None = None  # in flight
        self._is_woken = False
        self._holds: dict[str, PauseMode] = {}  # by reason
        self._holders: list[Deferred[None]] = []  # told when no step is in flight

    async def on_stop(self, reason: Exit) -> None:
        """End all streams: nobody will fill them any longer."""
        for request_id, live in list(self._live.items()):
            self._end(request_id, RequestStatus.FINISHED_ABORTED)
            error = RequestAborted(f"request {request_id} was aborted: the engine ended ({reason.reason})")
            error.__cause__ = reason.error
            live.stream.fail(error)
        if self._is_guest:
            with contextlib.suppress(AexecError):
                await self._leave_executor()

    # ------------------------------------------------------------ requests come and go

    @handles(Generate)
    def generate(self, message: Generate) -> None:
        """Queue a request.

        Raises:
            InvalidRequest: The model cannot run it.
            QueueFull: Too many wait.
        """
        if message.stream.is_abandoned:
            return
        if message.sampling.stop and self._tokenizer is None:
            raise InvalidRequest("stop texts need a tokenizer, and this model has none: use stop_token_ids")
        request = make_request(message.request_id, message.prompt, message.sampling, self._limits)
        self._scheduler.add(request)
        self._live[request.request_id] = self._follow(request, message.stream)
        self._wake()

    @handles(Abort, lane="urgent")
    def abort(self, message: Abort) -> bool:
        """End a request and free its blocks; its stream says ``abort``."""
        live = self._live.get(message.request_id)
        if live is None or message.stream not in (None, live.stream):
            return False
        self._end(message.request_id, RequestStatus.FINISHED_ABORTED)
        live.stream.put(live.text.flush())
        live.stream.finish("abort")
        return True

    @handles(GetStatistics)
    def statistics(self, message: GetStatistics) -> SchedulerStatistics:
        """The engine in numbers."""
        del message
        return self._scheduler.statistics()

    # ------------------------------------------------------------ holds

    @handles(Hold)
    def hold(self, message: Hold) -> Deferred[None]:
        """Launch no step; answered when none is in flight."""
        self._holds[message.reason] = message.mode
        if message.mode == "abort":
            for request_id in list(self._live):
                self.abort(Abort(request_id=request_id))
        reply: Deferred[None] = self.context.defer(message)
        self._holders.append(reply)
        self._answer_holders()
        return reply

    @handles(Release)
    def release(self, message: Release) -> None:
        """Launch steps again, if nothing else holds them."""
        self._holds.pop(message.reason, None)
        if message.recompute:
            self._scheduler.preempt_all()
        self._wake()

    @property
    def _is_held(self) -> bool:
        """True when nothing is to be launched: under ``finish`` only once nothing runs any longer."""
        return any(mode != "finish" or not self._scheduler.is_running for mode in self._holds.values())

    def _answer_holders(self) -> None:
        if self._batch is None and (self._is_held or not self._holds):
            holders, self._holders = self._holders, []
            for reply in holders:
                reply.resolve(None)

    # ------------------------------------------------------------ the step loop

    @handles(RunStep)
    def run_step(self, message: RunStep) -> None:
        """Begin a step, unless one is in flight."""
        del message
        self._is_woken = False
        if self._batch is None:
            self._launch()

    @handles(StepLaunched)
    def step_launched(self, message: StepLaunched) -> None:
        """Have the step sampled, if it was not run whole."""
        if isinstance(message.reply, StepResult):
            self.step_ended(StepEnded(message.step, message.reply.output))
            return
        self.context.pipe_to_self(
            self._executor.sample_tokens(message.step),
            lambda result: StepEnded(message.step, result.output),
            lambda error: StepFailed(message.step, error),
        )

    @handles(StepEnded)
    def step_ended(self, message: StepEnded) -> None:
        """Take the tokens, launch the next step, then hand the tokens out while it runs."""
        batch, self._batch = self._batch, None
        try:
            deltas = self._take(batch, message.output)
        except Exception as error:  # noqa: BLE001  # whatever it is, no stream may hang
            self._fail_all(error)
            self._answer_holders()
            return
        self._launch()
        for delta in deltas:
            self._hand_out(delta)

    @handles(StepFailed)
    def step_failed(self, message: StepFailed) -> None:
        """End all streams with the executor's error."""
        batch, self._batch = self._batch, None
        if batch is not None:
            self._scheduler.lose(batch)
        self._fail_all(message.error)
        self._answer_holders()

    def _wake(self) -> None:
        """Run a step soon: after the requests that are in the mailbox by now, so that they share it."""
        if self._batch is None and not self._is_woken:
            self._is_woken = True
            self.context.after(0.0, RunStep())

    def _launch(self) -> None:
        if self._is_held or not self._scheduler.has_work:
            self._answer_holders()
            return
        try:
            self._batch = batch = self._scheduler.schedule(admits=not self._holds)
        except Exception as error:  # noqa: BLE001  # a fault of ours; no stream may hang for it
            self._fail_all(error)
            return
        self._step = step = StepId(self._step + 1)
        self.context.pipe_to_self(
            self._executor.execute_model(ExecuteModel(step, batch, batch.total_num_scheduled_tokens)),
            lambda reply: StepLaunched(step, reply),
            lambda error: StepFailed(step, error),
        )

    async def _leave_executor(self) -> None:
        """No step waits for its sampling and no request is remembered: whoever comes next starts afresh."""
        if self._batch is not None:
            with contextlib.suppress(StepStateError):  # it had not begun, or was sampled by now
                await self._executor.sample_tokens(self._step)
        farewell = self._scheduler.farewell()
        if farewell.finished_request_ids:
            await self._executor.execute_model(ExecuteModel(StepId(self._step + 1), farewell, 0))

    # ------------------------------------------------------------ from outputs to streams

    def _take(self, batch: SchedulerOutput | None, output: object) -> list[_Delta]:
        if batch is None or not isinstance(output, ModelRunnerOutput):
            raise ProtocolError(
                f"the output rank answered step {self._step} with {type(output).__name__}: expected a "
                "ModelRunnerOutput; AsyncLLM needs a worker class that runs a model runner"
            )
        updates = self._scheduler.update(batch, output)
        deltas = [self._read(update) for update in updates]
        for delta in deltas:
            if delta.live.stream.is_abandoned:  # and the mailbox had no room for its Abort
                self.abort(Abort(request_id=delta.update.request.request_id, stream=delta.live.stream))
        return deltas

    def _read(self, update: RequestUpdate) -> _Delta:
        """Turn new tokens into text, and end the request at a stop text."""
        live = self._live[update.request.request_id]
        text = live.text.feed(update.token_ids)
        if text.stop is not None and not update.request.is_finished:
            self._scheduler.finish(update.request.request_id, RequestStatus.FINISHED_STOPPED)
        return _Delta(live, update, text)

    def _hand_out(self, delta: _Delta) -> None:
        live, (request, token_ids, logprobs, error), (text, stop) = delta
        prompt_logprobs = live.take_prompt_logprobs(request) if live.wants_prompt_logprobs else None
        if not request.is_finished:
            live.stream.put(text, token_ids, logprobs, prompt_logprobs)
            return
        self._live.pop(request.request_id, None)
        if error is not None:
            live.stream.fail(RequestFailed(f"request {request.request_id} failed: {error}"))
            return
        live.stream.put(text + live.text.flush(), token_ids, logprobs, prompt_logprobs)
        if stop is not None:
            live.stream.finish("stop", stop)
        elif request.finish_reason is not None:
            live.stream.finish(request.finish_reason, request.stop_reason)

    def _follow(self, request: Request, stream: TokenStream) -> _Live:
        sampling, decoder = request.sampling, None
        if self._tokenizer is not None:
            decoder = self._tokenizer.decoder(request.token_ids, skip_special_tokens=sampling.skip_special_tokens)
        text = RequestText(decoder, sampling.stop, sampling.min_tokens)
        return _Live(stream, text, sampling.prompt_logprobs is not None)

    def _end(self, request_id: str, status: RequestStatus) -> None:
        self._scheduler.finish(request_id, status)
        del self._live[request_id]

    def _fail_all(self, error: Exception) -> None:
        self.context.log.error("a step failed, and with it all requests", step=self._step, error=str(error))
        for request_id, live in list(self._live.items()):
            self._end(request_id, RequestStatus.FINISHED_FAILED)
            live.stream.fail(_again(error))

    def __repr__(self) -> str:
        """As in ``<EngineDriver: step 12 in flight, <Scheduler: 3 running, ...>>``."""
        state = (
            "in flight" if self._batch is not None else f"held by {', '.join(self._holds)}" if self._holds else "idle"
        )
        return f"<EngineDriver: step {self._step} {state}, {self._scheduler!r}>"


def _again(error: Exception) -> Exception:
    """The same error for one more reader: raising one object in many tasks mixes their tracebacks."""
    try:
        raised = copy.copy(error)
    except Exception:  # noqa: BLE001  # it cannot be copied, as its arguments do not fit its constructor
        return error
    raised.__cause__, raised.__notes__ = error.__cause__, list(getattr(error, "__notes__", ()))
    return raised
