"""What befalls an engine beside its steps: its workers are lost and rebuilt, and it is drained.

The driver is this and the step loop; what is done about lost workers is in ``engine.outages``.
"""

from __future__ import annotations

import abc
import asyncio
from collections.abc import AsyncIterator
from functools import partial

from aexec.actor import Deferred, handles
from aexec.engine.calls import Drain, GroupLost, GroupReady, HaveWeights, StepFailed, TakeRequests, WaitedForWorkers
from aexec.engine.connector.host import ConnectorHost
from aexec.engine.events import EngineEvent
from aexec.engine.inflight import InFlight
from aexec.engine.live import LiveStreams
from aexec.engine.outages import Outages
from aexec.engine.recovery import PEER_SECONDS, Fate
from aexec.engine.scheduler import Scheduler
from aexec.errors import EngineDraining, WorkerDied
from aexec.executor.base import Executor, ExecutorEvent
from aexec.executor.direct import Reply
from aexec.messages.lifecycle import GroupRestarted
from aexec.observe.hub import EventHub

__all__ = ("EngineLife",)


class EngineLife(ConnectorHost):
    """The driver's answers to what it did not ask for.

    Args:
        executor: Whose workers may be lost.
        scheduler: See :class:`~aexec.engine.outages.Outages`.
        in_flight: See there.
        streams: Those that have to end before it is drained.
        recovery_timeout: Seconds that a request waits which comes while the workers are being
            rebuilt; None: for as long as that takes.
        events: Told of workers that are lost and rebuilt.
    """

    def __init__(
        self,
        executor: Executor,
        scheduler: Scheduler,
        in_flight: InFlight,
        streams: LiveStreams,
        *,
        recovery_timeout: float | None,
        events: EventHub[EngineEvent],
    ) -> None:
        super().__init__(executor, scheduler)
        self._in_flight, self._streams, self._events = in_flight, streams, events
        self._outages = Outages(executor, scheduler, in_flight, streams, timeout=recovery_timeout, hub=events)
        self._is_draining = False
        self._drainers: list[Reply] = []  # told when no request is left
        streams.on_empty = self._answer_drainers

    async def on_start(self) -> None:
        """Listen to what becomes of the workers, and attach them to the KV connector if there is one."""
        failure: asyncio.Future[Exception] = asyncio.get_running_loop().create_future()
        self._executor.add_failure_callback(lambda error: None if failure.done() else failure.set_result(error))
        self.context.pipe_to_self(failure, lambda error: GroupLost(error, is_final=True), GroupLost)
        self.context.start_task(self._listen(self._executor.events()))
        await super().on_start()

    async def _listen(self, events: AsyncIterator[ExecutorEvent]) -> None:
        async for event in events:
            if isinstance(event, WorkerDied):
                await self.context.ref.tell(GroupLost(event))
            elif isinstance(event, GroupRestarted):
                await self.context.ref.tell(GroupReady())

    # ------------------------------------------------------------ the workers

    @handles(GroupLost, lane="urgent")
    def group_lost(self, message: GroupLost) -> None:
        """Keep the requests for the next workers, or end them, if there will be none."""
        if message.is_final:
            self._outages.failed(message.error)
        else:
            self._outages.died(message.error)
        self._after_loss()

    @handles(GroupReady)
    def group_ready(self, message: GroupReady) -> None:
        """Go on."""
        del message
        self._outages.restored()
        self._after_loss()

    @handles(WaitedForWorkers)
    def waited_for_workers(self, message: WaitedForWorkers) -> None:
        """End a request that has waited for long enough."""
        self._outages.tire(message.outage, message.request_id)

    @handles(HaveWeights)
    def have_weights(self, message: HaveWeights) -> None:
        """Remember whether a restart would bring the same."""
        self._outages.have_weights(message.generation, given=message.given)

    def _is_explained(self, failed: StepFailed) -> bool:
        """A step in flight has failed: True when the loss of the workers explains it, or may turn out to."""
        fate = self._outages.fate_of(failed.error)
        if fate is Fate.UNSURE and not failed.was_waited:
            self.context.after(PEER_SECONDS, StepFailed(failed.step, failed.error, was_waited=True))
            return True
        if not self._outages.follow(fate, failed.error):
            return False
        self._after_loss()
        return True

    def _check_open(self, request_id: str) -> None:
        """Refuse a request that will not be run.

        Raises:
            EngineDraining: Nothing new is taken.
            ModelNotReady: The workers came back without the weights that they had.
            AexecError: They will not come back.
        """
        if self._is_draining:
            raise EngineDraining(f"request {request_id} came after drain(), and resume() has not been called since")
        self._outages.check(request_id)

    def _limit_wait(self, request_id: str) -> None:
        """A request has come: see to it that it does not wait for workers for ever."""
        recovery = self._outages.recovery
        if recovery.outage is not None and recovery.timeout is not None:
            limit = self.context.after(recovery.timeout, WaitedForWorkers(recovery.outage.number, request_id))
            self._streams.at_end(request_id, limit.cancel)

    @abc.abstractmethod
    def _after_loss(self) -> None:
        """Steps were dropped, or may be launched again, or streams have ended."""

    # ------------------------------------------------------------ drain

    @handles(Drain)
    def drain(self, message: Drain) -> Deferred[None]:
        """Take no new requests; answered when all have ended."""
        reply: Deferred[None] = self.context.defer(message)
        self._begin_drain(reply)
        return reply

    def _begin_drain(self, reply: Reply) -> None:
        self._is_draining = True
        self._drainers.append(reply)
        reply.on_cancel(partial(self._leave_drain, reply))
        self._answer_drainers()

    def _leave_drain(self, reply: Reply) -> None:
        """Whoever asked has gone; nothing new is taken all the same."""
        self._drainers.remove(reply)
        reply.resolve(None)

    @handles(TakeRequests)
    def take_requests(self, message: TakeRequests) -> Deferred[None] | None:
        """Take new requests again."""
        del message
        self._end_drain()
        return None

    def _end_drain(self) -> None:
        self._is_draining = False

    def _answer_drainers(self) -> None:
        if not self._streams:
            drainers, self._drainers = self._drainers, []
            for reply in drainers:
                reply.resolve(None)
