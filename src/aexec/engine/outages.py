"""What the driver does about its workers: notices that they are gone, keeps the requests, and goes on after.

Workers are noticed to be gone by a step that fails, by an event of the executor, or by a
look before each launch, whichever comes first; what follows is done once.
"""

from __future__ import annotations

import time
from collections.abc import Iterable

from aexec.engine.events import EngineDown, EngineEvent, EngineFailed, EngineRecovered, RequestCondemned
from aexec.engine.inflight import InFlight
from aexec.engine.live import LiveStreams
from aexec.engine.records import RequestUpdate
from aexec.engine.recovery import Fate, Recovery, RecoveryStatistics, fate_of
from aexec.engine.request import Request
from aexec.engine.scheduler import Scheduler
from aexec.engine.suspects import STRIKES, Suspects
from aexec.errors import ModelNotReady, QueueFull
from aexec.executor.base import Executor
from aexec.executor.copies import own_copy
from aexec.executor.lifecycle import ExecutorState
from aexec.messages.batch import SchedulerOutput
from aexec.observe import get_logger
from aexec.observe.hub import EventHub

__all__ = ("Outages",)

_log = get_logger("aexec.engine")


class Outages:
    """Stands between the driver and the loss of its workers.

    Args:
        executor: Whose workers; asked for its state and its generation, nothing else.
        scheduler: Forgets what the workers had.
        in_flight: The steps that are lost.
        streams: The requests that are not.
        timeout: Seconds that a request which has not begun waits for the workers; None: no limit.
        hub: Told what happens.

    Attributes:
        recovery: What is known.
    """

    def __init__(
        self,
        executor: Executor,
        scheduler: Scheduler,
        in_flight: InFlight,
        streams: LiveStreams,
        *,
        timeout: float | None,
        hub: EventHub[EngineEvent],
    ) -> None:
        self._executor, self._scheduler, self._in_flight, self._streams = executor, scheduler, in_flight, streams
        self._hub = hub
        self.recovery = Recovery(executor.generation, timeout)

    def __repr__(self) -> str:
        return f"<Outages: {self.recovery!r}, {self.suspects!r}>"

    @property
    def suspects(self) -> Suspects:
        """Who may have done it."""
        return self.recovery.suspects

    def statistics(self) -> RecoveryStatistics:
        """Crashes in numbers."""
        return self.recovery.statistics()

    # ------------------------------------------------------------ requests

    def check(self, request_id: str) -> None:
        """Refuse a request for which there will be no workers.

        Raises:
            ModelNotReady: The workers came back without the weights that they had.
            AexecError: They will not come back.
        """
        if self.recovery.failure is not None:
            raise own_copy(self.recovery.failure, "the engine's workers are gone for good: close it, and open another")
        if self.recovery.weights_are_lost:
            raise _without_weights(request_id)

    def add(self, *requests: Request) -> None:
        """Queue a request, or all samples of one.

        Raises:
            EngineRecovering: Too many wait for the workers already.
            InvalidRequest: See the scheduler.
            QueueFull: See the scheduler.
        """
        try:
            self._scheduler.add(*requests)
        except QueueFull as error:
            if self.recovery.outage is None:
                raise
            why = f"{error.limit} requests wait already (max_num_waiting)"
            raise self.recovery.refusal(why, time.monotonic()) from None

    def tire(self, outage: int, request_id: str) -> None:
        """A request has waited for the workers for as long as it may, if it still is for the same outage."""
        recovery = self.recovery
        if recovery.outage is not None and recovery.outage.number == outage:
            why = f"request {request_id} has waited for {recovery.timeout or 0:g} s (recovery_timeout)"
            self._streams.fail((request_id,), recovery.refusal(why, time.monotonic()))

    def went_on(self, updates: Iterable[RequestUpdate]) -> None:
        """Requests have new tokens, or have ended: they are above suspicion."""
        if self.suspects:
            for update in updates:
                self.suspects.clear(update.request.request_id)

    def schedule(self, *, admits: bool, max_num_requests: int | None = None) -> SchedulerOutput:
        """The next batch; as long as there are suspects, the next one of them alone."""
        while (alone := self.suspects.alone) is not None:
            batch = self._scheduler.schedule(admits=admits, alone=alone)
            if batch.num_scheduled_tokens:
                return batch
            self._scheduler.lose(batch)
            self.suspects.clear(alone)  # it has ended, or cannot run by itself
        return self._scheduler.schedule(admits=admits, max_num_requests=max_num_requests)

    # ------------------------------------------------------------ the workers

    def is_ready(self) -> bool:
        """See whether a step may be launched; takes notice of workers that are gone, or are others.

        A suspect runs alone: not before all others have landed, and nobody runs beside it.
        """
        state, generation = self._executor.state, self._executor.generation
        recovery = self.recovery
        if state is ExecutorState.READY and generation == recovery.generation:
            return recovery.is_up and not (self._in_flight and len(self.suspects))
        fate = fate_of(None, state, is_new_generation=generation != recovery.generation)
        if fate is Fate.ALL:
            return True  # the step's own error will say why
        self._go_down("the workers are gone")
        if fate is Fate.REBUILT:
            self.restored()
        return recovery.is_up

    def fate_of(self, error: Exception) -> Fate:
        """What it means that a step in flight ended with ``error``."""
        executor = self._executor
        return fate_of(error, executor.state, is_new_generation=executor.generation != self.recovery.generation)

    def follow(self, fate: Fate, error: Exception) -> bool:
        """Do what has to be done; False: nothing, as the error concerns the step alone.

        The steps behind it are known to the ranks, which sample in order: they have to be sampled too.
        """
        if fate in (Fate.OWN, Fate.UNSURE, Fate.AGAIN):
            return False
        if fate is Fate.ALL:
            self.failed(error)
        else:
            self._go_down(str(error))
            if fate is Fate.REBUILT:
                self.restored()
        return True

    def died(self, error: Exception) -> None:
        """The executor says that a worker died."""
        state = self._executor.state
        if fate_of(error, state) is Fate.WAIT:
            self._go_down(str(error))

    def restored(self) -> None:
        """The executor has workers again: all requests begin afresh, those that had begun first."""
        executor, recovery = self._executor, self.recovery
        if recovery.outage is None or executor.state is not ExecutorState.READY:
            return
        outage = recovery.outage.number
        num_requests, num_tokens = self._scheduler.recover()
        seconds = recovery.restore(executor.generation, time.monotonic())
        self.suspects.keep(set(self._streams.request_ids))
        recovery.recomputes(num_tokens)
        self._hub.emit(
            EngineRecovered(
                outage=outage,
                seconds=seconds,
                generation=executor.generation,
                num_requests=num_requests,
                num_recomputed_tokens=num_tokens,
            )
        )
        _log.info("the workers are back", outage=outage, seconds=round(seconds, 3), requests=num_requests)
        self._end_without_weights()

    def have_weights(self, generation: int, *, given: bool) -> None:
        """The workers of ``generation`` have whole weights; see ``Recovery.have_weights``."""
        self.recovery.have_weights(generation, given=given)
        self._end_without_weights()

    def _end_without_weights(self) -> None:
        if self.recovery.weights_are_lost:
            for request_id in self._streams.request_ids:
                self._streams.fail((request_id,), _without_weights(request_id))

    def failed(self, error: Exception) -> None:
        """The workers will not come back: all streams end with ``error``."""
        recovery = self.recovery
        self._in_flight.clear()
        request_ids = self._streams.request_ids
        if recovery.failure is None:
            recovery.fail(error)
            self._hub.emit(EngineFailed(reason=str(error), num_requests=len(request_ids)))
        self._streams.fail(request_ids, error)

    def _go_down(self, reason: str) -> None:
        """The steps in flight are lost, once."""
        recovery, scheduler = self.recovery, self._scheduler
        if not recovery.is_up:
            return
        lost = {flight.step: flight.batch.num_scheduled_tokens.keys() for flight in self._in_flight.clear()}
        outage = recovery.lose(reason, lost, time.monotonic())
        figures = scheduler.statistics()
        self._hub.emit(
            EngineDown(
                outage=outage.number,
                reason=outage.reason,
                lost_steps=outage.lost_steps,
                num_running=figures.num_running,
                num_waiting=figures.num_waiting,
            )
        )
        if outage.condemned is not None:
            self._condemn(outage.condemned, reason)

    def _condemn(self, request_id: str, reason: str) -> None:
        error = self.recovery.sentence(request_id)
        _log.error("a request has brought the workers down", request=request_id, crashes=STRIKES + 1)
        self._streams.fail((request_id,), error)
        self._hub.emit(RequestCondemned(request_id=request_id, num_crashes=STRIKES + 1, reason=reason))


def _without_weights(request_id: str) -> ModelNotReady:
    return ModelNotReady(
        f"request {request_id}",
        "the workers were restarted and hold the weights of the model's files, not those that they had been given",
        "call update_weights() or load_weights() with them",
    )
