"""What the outcome of a step means for its requests: new tokens, an end, or an error."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from aexec.engine.inflight import Flight
from aexec.engine.live import Delta, LiveStreams
from aexec.engine.masks import StepMasks
from aexec.engine.outages import Outages
from aexec.engine.recovery import is_again
from aexec.engine.scheduler import Scheduler
from aexec.errors import ProtocolError
from aexec.messages.batch import ModelRunnerOutput

__all__ = ("StepOutcomes",)


class StepOutcomes:
    """Takes the outcomes of steps, in step order.

    Args:
        scheduler: Told first: what a request has now decides the next step.
        streams: Where the tokens will go.
        masks: Told the tokens of requests that have a grammar.
        outages: Told who went on.
        fail: Ends the streams of requests with an error.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        streams: LiveStreams,
        masks: StepMasks,
        outages: Outages,
        fail: Callable[[Iterable[str], Exception], None],
    ) -> None:
        self._scheduler, self._streams, self._masks, self._outages, self._fail = (
            scheduler, streams, masks, outages, fail,
        )  # fmt: skip

    def __repr__(self) -> str:
        """As in ``<StepOutcomes for <LiveStreams: 3 open>>``."""
        return f"<StepOutcomes for {self._streams!r}>"

    def take(self, flight: Flight) -> list[Delta]:
        """Take the tokens of a step, or see to it that nobody waits for those that it does not bring."""
        error = flight.error
        if error is None:
            try:
                return self._read(flight)
            except ProtocolError as caught:  # it makes no sense, and nothing of it was taken
                error = caught
            except Exception as fault:  # noqa: BLE001  # a fault of ours; no stream may hang for it
                self._scheduler.reset_prefix_cache()  # it may hold what was never computed
                self._fail(self._streams.request_ids, fault)
                return []
        self._step_error(flight, error)
        return []

    def _read(self, flight: Flight) -> list[Delta]:
        if not isinstance(flight.output, ModelRunnerOutput):
            raise ProtocolError(
                f"the output rank answered step {flight.step} with {type(flight.output).__name__}: expected a "
                "ModelRunnerOutput; AsyncLLM needs a worker class that runs a model runner"
            )
        updates = self._scheduler.update(flight.batch, flight.output)
        self._outages.went_on(updates)
        return self._streams.read(self._masks.accept(updates))

    def _step_error(self, flight: Flight, error: Exception) -> None:
        """An error of a step that is none of the workers': it ends the requests of this step, and no others."""
        if is_again(error):
            self._scheduler.repeat(flight.batch)
        else:
            self._fail(self._scheduler.lose(flight.batch), error)
