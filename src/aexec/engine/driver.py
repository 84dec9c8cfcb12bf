"""The driver: the actor that runs the step loop, between those who ask and the executor.

A step is a chain of messages to itself: schedule a batch and have the executor launch it
(:class:`RunStep`), then have it sampled (:class:`StepLaunched`, or :class:`MaskReady` when a
request of it has a grammar), then take its tokens and schedule the next (:class:`StepEnded`).
Between these, requests come and go, as each is a message like any other. What to run is the
scheduler's decision, whose turn it is the queue's of steps in flight, and both are pure; this
actor only acts. Without requests nothing runs at all.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable
from functools import partial

from aexec.actor import Deferred, Exit, handles
from aexec.engine.admission import RequestLimits, make_request
from aexec.engine.calls import (
    Abort,
    Expire,
    Generate,
    GetStatistics,
    Hold,
    MaskReady,
    Release,
    ResetPrefixCache,
    RunStep,
    StepEnded,
    StepFailed,
    StepLaunched,
)
from aexec.engine.constraining import ConstrainedRequests
from aexec.engine.events import EngineEvent
from aexec.engine.holds import Holds
from aexec.engine.inflight import FlightState, InFlight
from aexec.engine.live import Delta, LiveStreams
from aexec.engine.masks import StepMasks
from aexec.engine.outcomes import StepOutcomes
from aexec.engine.overlap import NORMAL_LOOP, StepLoop, share
from aexec.engine.replies import StepReplies
from aexec.engine.request import Request, RequestStatus
from aexec.engine.samples import samples_of
from aexec.engine.scheduler import Scheduler
from aexec.engine.statistics import EngineStatistics
from aexec.engine.text import Tokenizer
from aexec.errors import (
    AexecError,
    ConfigError,
    EngineDraining,
    EngineRecovering,
    InvalidRequest,
    RequestAborted,
    RequestError,
    RequestTimeout,
)
from aexec.executor.base import Executor
from aexec.executor.direct import Reply
from aexec.messages.step import ExecuteModel, SampleTokens, StepId, StepResult
from aexec.observe.hub import EventHub

__all__ = ("EngineDriver",)


class EngineDriver(ConstrainedRequests):
    """Runs requests on one executor.

    Args:
        executor: Runs the steps.
        scheduler: Decides them; the driver is its only user.
        limits: What a request has to satisfy.
        tokenizer: Turns tokens into text; None: there is no text.
        masks: Makes the bitmasks of requests that have a grammar.
        loop: How steps follow each other.
        last_step: The last step that the executor has seen; ids go on from there.
        recovery_timeout: Seconds that a request which has not begun waits for workers that are
            being rebuilt; None: no limit.
        events: Told of workers that are lost and rebuilt.
        is_guest: The executor outlives the driver: leave nothing unfinished in it.
    """

    self_explanatory = (RequestError, ConfigError, EngineRecovering, EngineDraining)

    def __init__(
        self,
        executor: Executor,
        scheduler: Scheduler,
        limits: RequestLimits,
        tokenizer: Tokenizer | None,
        *,
        masks: StepMasks | None = None,
        loop: StepLoop = NORMAL_LOOP,
        last_step: int = 0,
        recovery_timeout: float | None = None,
        events: EventHub[EngineEvent] | None = None,
        is_guest: bool = False,
    ) -> None:
        super().__init__(
            executor,
            scheduler,
            InFlight(loop.depth, time.monotonic),
            LiveStreams(scheduler, tokenizer),
            masks=masks,
            recovery_timeout=recovery_timeout,
            events=events or EventHub(),
        )
        self._is_guest = is_guest
        self._limits, self._has_text = limits, tokenizer is not None
        self._loop = loop
        self._step = StepId(last_step)
        self._is_woken = False
        self._holds = Holds()
        self._outcomes = StepOutcomes(scheduler, self._streams, self._masks, self._outages, self._fail)
        self._replies = StepReplies(executor, self)
        self._holders: list[Reply] = []  # told when no step is in flight

    async def on_start(self) -> None:
        """Say how steps follow each other."""
        is_on, why = self._loop.async_scheduling
        self.context.log.info("async scheduling", is_on=is_on, reason=why, depth=self._loop.depth)
        await super().on_start()

    async def on_stop(self, reason: Exit) -> None:
        """End all streams: nobody will fill them any longer."""
        self._replies.leave()
        for request_id in self._streams.request_ids:
            error = RequestAborted(f"request {request_id} was aborted: the engine ended ({reason.reason})")
            error.__cause__ = reason.error
            self._streams.fail((request_id,), error, RequestStatus.FINISHED_ABORTED)
        if self._is_guest:
            with contextlib.suppress(AexecError):
                await self._leave_executor()

    # ------------------------------------------------------------ requests come and go

    @handles(Generate)
    def generate(self, message: Generate) -> Deferred[None] | None:
        """Queue a request.

        Raises:
            InvalidRequest: The model cannot run it.
            QueueFull: Too many wait.
            EngineRecovering: Too many wait for the workers.
            EngineDraining: Nothing new is taken.
            AexecError: The workers, or their weights, are gone for good.
        """
        if not message.streams[0].is_abandoned:
            self._check_open(message.request_id)
            self._admit(message, self._samples(message))
            self._wake()
        return None

    def _samples(self, message: Generate) -> list[Request]:
        """The requests that a caller's one stands for, as far as they can be judged by themselves."""
        if message.sampling.stop and not self._has_text:
            raise InvalidRequest("stop texts need a tokenizer, and this model has none: use stop_token_ids")
        if message.sampling.structured is not None:
            self._masks.check(message.sampling.structured)
        request = make_request(message.request_id, message.prompt, message.sampling, self._limits, message.options)
        return samples_of(request)

    def _admit(self, message: Generate, samples: list[Request]) -> None:
        """Queue them."""
        self._outages.add(*samples)
        for sample, stream in zip(samples, message.streams, strict=True):
            self._streams.follow(sample, stream, self._limit_time(sample, message.options.timeout))
            self._limit_wait(sample.request_id)
            if sample.structured is not None:
                self._compile(sample)

    @handles(Expire, lane="urgent")
    def expire(self, message: Expire) -> None:
        """A request has taken as long as it may."""
        request = message.request
        if not request.is_finished:
            error = RequestTimeout(request.request_id, message.seconds, request.num_output_tokens, request.status.value)
            self._streams.fail((request.request_id,), error, RequestStatus.FINISHED_ABORTED)

    def _limit_time(self, request: Request, seconds: float | None) -> Callable[[], None] | None:
        """End a request after ``seconds``; returns what calls this off."""
        if seconds is None:
            return None
        return self.context.after(seconds, Expire(request, seconds)).cancel

    @handles(Abort, lane="urgent")
    def abort(self, message: Abort) -> bool | Deferred[bool]:
        """End a request and free its blocks; its stream says ``abort``."""
        return self._streams.abort(message.request_id, message.stream)

    @handles(ResetPrefixCache)
    def reset_prefix_cache(self, message: ResetPrefixCache) -> bool | Deferred[bool]:
        """Share nothing that is stored now."""
        del message
        return self._scheduler.reset_prefix_cache()

    @handles(GetStatistics)
    def statistics(self, message: GetStatistics) -> EngineStatistics:
        """The engine in numbers."""
        del message
        return EngineStatistics(
            scheduler=self._scheduler.statistics(),
            steps=self._in_flight.statistics(),
            recovery=self._outages.statistics(),
            grammars=self._masks.statistics(),
            connector=self.connector_statistics(),
            num_streams=len(self._streams),
            async_scheduling=self._loop.async_scheduling,
            held_by=self._holds.reasons,
            is_draining=self._is_draining,
        )

    # ------------------------------------------------------------ holds

    @handles(Hold)
    def hold(self, message: Hold) -> Deferred[None]:
        """Launch no step; answered when none is in flight."""
        reply: Deferred[None] = self.context.defer(message)
        self._begin_hold(message, reply)
        return reply

    def _begin_hold(self, message: Hold, reply: Reply) -> None:
        self._holds.add(message.reason, message.mode, message.key)
        if message.mode == "abort":
            for request_id in self._streams.request_ids:
                self._streams.abort(request_id)
        self._holders.append(reply)
        reply.on_cancel(partial(self._leave_hold, reply, message))
        self._answer_holders()

    def _leave_hold(self, reply: Reply, message: Hold) -> None:
        """Whoever wanted it has gone before they knew that they had it: nobody else will end it."""
        self._holders.remove(reply)
        reply.resolve(None)
        self._holds.remove(message.reason, message.key)
        self._wake()

    @handles(Release)
    def release(self, message: Release) -> Deferred[None] | None:
        """Launch steps again, if nothing else holds them."""
        self._end_hold(message)
        return None

    def _end_hold(self, message: Release) -> None:
        self._holds.remove(message.reason, message.key)
        if message.recompute:
            self._scheduler.preempt_all()
        self._wake()

    @property
    def _is_held(self) -> bool:
        return self._holds.hold_launches(is_running=self._scheduler.is_running)

    def _answer_holders(self) -> None:
        if not self._in_flight and (self._is_held or not self._holds):
            holders, self._holders = self._holders, []
            for reply in holders:
                reply.resolve(None)

    def _after_loss(self) -> None:
        self._wake()
        self._answer_holders()

    # ------------------------------------------------------------ the step loop

    @handles(RunStep)
    def run_step(self, message: RunStep) -> None:
        """There is something to run: launch what there is room for."""
        del message
        self._is_woken = False
        self._fill()

    @handles(StepLaunched)
    def step_launched(self, message: StepLaunched) -> None:
        """Have the step sampled, if it was not run whole, and launch the next one behind it."""
        if isinstance(message.reply, StepResult):
            self._settle(message.step, message.reply.output)
            return
        self._in_flight.launched(message.step)
        self._advance()

    @handles(MaskReady)
    def mask_ready(self, message: MaskReady) -> None:
        """Have the step sampled under its bitmask; without one its constrained requests cannot go on."""
        self._take_masks(message)
        self._advance()

    @handles(StepEnded)
    def step_ended(self, message: StepEnded) -> None:
        """Take the tokens, launch the next step, then hand the tokens out while it runs."""
        self._settle(message.step, message.output)

    @handles(StepFailed)
    def step_failed(self, message: StepFailed) -> None:
        """End what the executor's error ends, which is nothing if the workers are being rebuilt."""
        if not (self._in_flight.knows(message.step) and self._is_explained(message)):
            self._settle(message.step, None, message.error)

    def _wake(self) -> None:
        """Run a step soon: after the requests that are in the mailbox by now, so that they share it."""
        if self._in_flight.num_free and not self._is_woken:
            self._is_woken = True
            self.context.after(0.0, RunStep())

    def _settle(self, step: StepId, output: object, error: Exception | None = None) -> None:
        """A step has ended: what it brought first decides the next step, and goes to the readers then."""
        deltas: list[Delta] = []
        for flight in self._in_flight.land(step, output, error):
            deltas += self._outcomes.take(flight)
        self._advance()
        for delta in deltas:
            self._streams.hand_out(delta)

    def _fill(self) -> None:
        """Launch steps until the pipeline is full or there is nothing to run."""
        while self._loop.may_launch(self._in_flight) and self._launch():
            pass
        if not self._in_flight:
            self._in_flight.rest()
        self._answer_holders()

    def _launch(self) -> bool:
        """Launch one step; False: there is none to launch now."""
        if self._is_held or not self._scheduler.has_work or not self._outages.is_ready():
            return False
        try:
            batch = self._outages.schedule(admits=not self._holds, max_num_requests=self._share())
        except Exception as error:  # noqa: BLE001  # a fault of ours; no stream may hang for it
            self._scheduler.reset_prefix_cache()  # it may hold what was never computed
            self._fail(self._streams.request_ids, error)
            return False
        if not batch.num_scheduled_tokens and (self._in_flight or not batch.finished_request_ids):
            self._scheduler.lose(batch)  # nothing to run before a step lands or a request is ready
            return False
        self._step = step = StepId(self._step + 1)
        self._in_flight.take_off(step, batch, self._masks.constrained(self._scheduler.sampled(batch)))
        self._send(ExecuteModel(step, batch, batch.total_num_scheduled_tokens))
        self._ask_for_masks()
        return True

    def _send(self, message: ExecuteModel) -> None:
        self._replies.launch(message)

    def _share(self) -> int | None:
        """Requests of the next batch at most, where several stages want some each."""
        if self._loop.depth == 1 or self._loop.overlaps:
            return None
        return share(self._scheduler.demand(), depth=self._loop.depth, num_free=self._in_flight.num_free)

    def _advance(self) -> None:
        """Whose turn it is: bitmasks first, then samplings, then the steps behind them."""
        self._ask_for_masks()
        for flight in self._in_flight.due_samples():
            self._replies.sample(SampleTokens(flight.step, flight.mask))
        self._fill()

    async def _leave_executor(self) -> None:
        """No step waits for its sampling and no request is remembered: whoever comes next starts afresh."""
        for flight in self._in_flight.flights:
            if flight.state is not FlightState.LANDED:
                with contextlib.suppress(AexecError):  # it had not begun, was sampled by now, or has failed
                    await self._executor.sample_tokens(flight.step)
        farewell = self._scheduler.farewell()
        if farewell.finished_request_ids:
            await self._executor.execute_model(ExecuteModel(StepId(self._step + 1), farewell, 0))

    def _fail(self, request_ids: Iterable[str], error: Exception) -> None:
        ids = list(request_ids)
        # Without requests it tells nobody anything: as a step behind one that failed, whose tokens never came.
        log = self.context.log.error if ids else self.context.log.debug
        log("a step failed", step=self._step, num_requests=len(ids), error=str(error))
        self._streams.fail(ids, error)

    def __repr__(self) -> str:
        """As in ``<EngineDriver: step 12 in flight, <Scheduler: 3 running, ...>>``."""
        state = f"held by {', '.join(self._holds.reasons)}" if self._holds else "idle"
        if self._in_flight:
            state = "in flight" if len(self._in_flight) == 1 else f"the last of {len(self._in_flight)} in flight"
        return f"<EngineDriver: step {self._step} {state}, {self._scheduler!r}>"
