"""The driver's part for requests that have a grammar: from the wish to the grammar, from the step to its bitmask."""

from __future__ import annotations

import abc

from aexec.actor import handles
from aexec.engine.calls import GrammarReady, MaskReady
from aexec.engine.events import EngineEvent
from aexec.engine.inflight import InFlight
from aexec.engine.life import EngineLife
from aexec.engine.live import LiveStreams
from aexec.engine.masks import NoMasks, StepMasks
from aexec.engine.request import Request
from aexec.engine.scheduler import Scheduler
from aexec.errors import ProtocolError
from aexec.executor.base import Executor
from aexec.messages.step import StepId
from aexec.observe.hub import EventHub

__all__ = ("ConstrainedRequests",)


class ConstrainedRequests(EngineLife):
    """Asks for grammars and bitmasks, and ends the requests that cannot have theirs.

    Args:
        executor: See :class:`~aexec.engine.life.EngineLife`.
        scheduler: Told when a request has its grammar.
        in_flight: The steps that want bitmasks.
        streams: The requests that may fail.
        masks: Compiles grammars and makes bitmasks; None: there are none.
        recovery_timeout: See there.
        events: See there.
    """

    def __init__(
        self,
        executor: Executor,
        scheduler: Scheduler,
        in_flight: InFlight,
        streams: LiveStreams,
        *,
        masks: StepMasks | None,
        recovery_timeout: float | None,
        events: EventHub[EngineEvent],
    ) -> None:
        super().__init__(executor, scheduler, in_flight, streams, recovery_timeout=recovery_timeout, events=events)
        self._masks: StepMasks = masks or NoMasks()

    @abc.abstractmethod
    def _wake(self) -> None:
        """There may be something to run."""

    def _compile(self, request: Request) -> None:
        """Have the grammar of a request made; it waits, and holds up nobody, and takes this with it when it ends."""
        task = self.context.pipe_to_self(
            self._masks.compile(request),
            lambda grammar: GrammarReady(request, grammar),
            lambda error: GrammarReady(request, None, error),
        )
        self._streams.at_end(request.request_id, task.cancel)

    @handles(GrammarReady)
    def grammar_ready(self, message: GrammarReady) -> None:
        """Let the request that waited for it run, or tell it why not."""
        request = message.request
        if request.is_finished:
            return
        if message.error is not None:
            self._streams.fail((request.request_id,), message.error)
            return
        request.grammar = message.grammar
        self._scheduler.make_ready(request.request_id)
        self._wake()

    def _ask_for_masks(self) -> None:
        """Have the bitmasks made that can be made now."""
        for flight in self._in_flight.due_masks():
            self._ask_for_mask(flight.step, flight.constrained)

    def _ask_for_mask(self, step: StepId, request_ids: frozenset[str]) -> None:
        self.context.pipe_to_self(
            self._masks.mask(request_ids),
            lambda masks: MaskReady(step, masks),
            lambda error: MaskReady(step, None, error),
        )

    def _take_masks(self, message: MaskReady) -> None:
        """The step may be sampled; requests that have no mask fail, and it may be sampled without them."""
        masks = message.masks
        if masks is None:
            self._fail_all(message.step, message.error or ProtocolError("its grammar made no bitmask"))
            return
        for request, error in masks.failed.items():
            self._fail_one(request, error)
        if masks.output.request_ids:
            self._in_flight.masked(message.step, masks.output)
        else:
            self._in_flight.unmask(message.step)

    def _fail_all(self, step: StepId, error: Exception) -> None:
        """The constrained requests of a step in flight cannot go on."""
        constrained = self._in_flight.unmask(step)
        for flight in self._in_flight.flights:
            if flight.step == step:
                for request in self._scheduler.sampled(flight.batch):
                    if request.request_id in constrained:
                        self._fail_one(request, error)

    def _fail_one(self, request: Request, error: Exception) -> None:
        if not request.is_finished:  # otherwise its id may be another's by now
            self._streams.fail((request.request_id,), error)
