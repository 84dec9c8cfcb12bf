"""The way of steps to the ranks: bounded, in order, and closed while the executor is paused."""

from __future__ import annotations

import math
import time
from functools import partial
from typing import Any

import anyio

from aexec.actor import Context
from aexec.errors import ActorStopped, AexecError, CallTimeout, ExecutorPaused, note
from aexec.executor.calls import Wake
from aexec.executor.collective import Answers, Call, Lane, Waiter
from aexec.executor.copies import own_copy
from aexec.executor.direct import Reply
from aexec.executor.fanout import Fanout, Pending
from aexec.executor.gate import Flight, Held, StepGate
from aexec.executor.kv_output import KVOutputs
from aexec.messages.operations import PauseMode
from aexec.messages.step import ExecuteModel, ForwardLaunched, SampleTokens, StepId

__all__ = ("StepLine",)


_STEP = Lane.STEP  # looked up once


class StepLine:
    """Sends steps through a gate; one for the executor's life, attached to each generation.

    Args:
        gate: Decides which steps may go.
        actor: The executor's context.
        world_size: Ranks.
        output_rank: Whose answer is the step's.
    """

    def __init__(self, gate: StepGate, actor: Context, *, world_size: int, output_rank: int) -> None:
        self.gate = gate
        self._actor, self._world_size, self._output_rank = actor, world_size, output_rank
        self._fanout: Fanout  # from the first generation on
        self._samples = True
        self._is_replicated = False
        self._outputs = KVOutputs(world_size, output_rank)
        self._changed: anyio.Event | None = None  # while somebody waits for it
        self._armed = math.inf

    def __repr__(self) -> str:
        return f"<StepLine: {self.gate!r}, {self._outputs!r}>"

    def attach(self, fanout: Fanout, *, samples: bool) -> None:
        """A new generation is ready.

        Args:
            fanout: The way to its ranks.
            samples: False: its worker class has no ``sample_tokens``.
        """
        self._fanout, self._samples = fanout, samples
        self._is_replicated = fanout.group.is_replicated
        self._outputs = KVOutputs(self._world_size, self._output_rank)

    def execute(self, message: ExecuteModel, reply: Reply, until: float | None) -> None:
        """Send a step as soon as it may go.

        Args:
            message: The step.
            reply: Where its end goes.
            until: When its asker's own deadline passes.
        """
        now = time.monotonic()
        if self.gate.is_clear:
            limit = self.gate.timeout if until is None else _left_of(self.gate.expiry(now), until)
            call = self._launch(message, reply, limit)
            if call is not None and call.waiter is not None:
                reply.on_cancel(partial(self._fanout.abandon, call))
            return
        held = Held(message, reply, now=now, until=until)
        self.gate.line_up(held, now)
        self._admit()
        if held.call is None:
            self._arm(held.expires)
        reply.on_cancel(partial(self._left, held))

    def sample(self, message: SampleTokens, reply: Reply, until: float | None) -> None:
        """Sample a step at once: it is in flight, or the ranks will refuse it.

        Raises:
            ExecutorPaused: A pause has ended it meanwhile.
        """
        if message.step in self.gate.aborted:
            self.gate.aborted.discard(message.step)
            raise _aborted(message.step)
        flight = self.gate.flying.get(message.step)
        launch = None if flight is None else flight.launch
        if flight is not None and launch is not None and launch.errors:
            self._get_rid_of(flight, launch)
            raise next(iter(launch.errors.values()))
        call = self._send_sampling(message, reply, until)
        reply.on_cancel(partial(self._fanout.abandon, call))

    def pause(self, mode: PauseMode) -> None:
        """Send no steps from now on; ``abort`` ends those that wait and those in flight."""
        self.gate.pause(mode)
        if mode == "abort":
            self._abort()

    def resume(self) -> None:
        """Send steps again, those that have waited first."""
        self.gate.resume(time.monotonic())
        self._admit()
        self._arm(self.gate.next_wake())

    async def until_idle(self, what: str, timeout: float | None, *, waiting_too: bool = False) -> None:
        """Wait until no step is in flight.

        Args:
            what: For the error: what needs it.
            timeout: Seconds; None: no limit.
            waiting_too: Until none waits either, unless they wait for the end of a pause.

        Raises:
            CallTimeout: Steps are in flight still; its notes say which.
        """
        with anyio.move_on_after(timeout):
            while self.gate.flying or (waiting_too and self.gate.waiting and not self.gate.paused):
                if self._changed is None:
                    self._changed = anyio.Event()
                await self._changed.wait()
            return
        error = CallTimeout(what, timeout or 0.0, started=False)
        raise note(error, self.gate.in_the_way())

    def wake(self) -> None:
        """The timer: end what has waited too long."""
        self._armed = math.inf
        for held in self.gate.due(time.monotonic()):
            error = CallTimeout(f"execute_model of step {held.message.step}", self.gate.timeout or 0.0, started=False)
            held.reply.fail(note(error, self.gate.in_the_way()))
        self._arm(self.gate.next_wake())
        self._tell()

    def fail_all(self, error: AexecError) -> None:
        """The ranks are gone, or will be: end what waits, each with its own copy of ``error``."""
        for held in self.gate.clear():
            held.reply.fail(own_copy(error, f"while step {held.message.step} waited to be sent"))
        self._tell()

    def fail_waiting(self, error: AexecError) -> None:
        """End what waits to be sent."""
        for held in list(self.gate.waiting):
            self.gate.withdraw(held)
            held.reply.fail(own_copy(error, f"while step {held.message.step} waited to be sent"))
        self._tell()

    def _admit(self) -> None:
        for held in self.gate.admit():
            held.call = self._launch(held.message, held.reply, _left_of(held.expires, held.until))

    def _launch(self, message: ExecuteModel, reply: Waiter, timeout: float | None) -> Call | None:
        """Give a step its place, and send it; None: it cannot travel, and its asker was told."""
        step = message.step
        flight = self.gate.take_off(step, is_whole=message.num_tokens == 0 or not self._samples)
        try:
            call = self._fanout.submit(
                "execute_model",
                message,
                reply,
                lane=_STEP,
                timeout=timeout,
                shape=self._outputs.result,
                on_end=partial(self._launched, flight),
                early=None if flight is None or flight.is_whole else ForwardLaunched(step),
            )
        except AexecError as error:
            if flight is not None:
                self.gate.take_back(flight)
            reply.fail(error)
            return None
        if flight is not None:
            flight.launch = call
        return call

    def _send_sampling(self, message: SampleTokens, reply: Any, until: float | None) -> Call:
        flight = self.gate.flying.get(message.step)
        call = self._fanout.submit(
            "sample_tokens",
            message,
            reply,
            lane=_STEP,
            timeout=self.gate.timeout if until is None else _left_of(self.gate.expiry(time.monotonic()), until),
            shape=self._outputs.result,
            on_end=partial(self._sampled, flight),
        )
        if flight is not None and flight.sampling is None:
            flight.sampling = call
        return call

    def _launched(self, flight: Flight | None, call: Call) -> None:
        if not call.delivered:
            self._collect(call)
        if flight is None:
            return
        if not call.sent:
            if not call.missing:  # each rank counts as failed, one after the other
                self.gate.take_back(flight)
                self._land(flight)
        elif flight.is_whole or not (call.missing or call.delivered):
            self._land(flight)
        elif call.errors and flight.sampling is not None:  # its ranks know no such step: this is why
            flight.sampling.fail(next(iter(call.errors.values())))

    def _sampled(self, flight: Flight | None, call: Call) -> None:
        if not call.delivered:
            self._collect(call)
        if flight is None or flight.sampling is not call:
            return
        if call.sent:
            self._land(flight)
        else:  # the ranks wait for it still, and sample in order
            flight.sampling = None

    def _collect(self, call: Call) -> None:
        """What the ranks report goes out with the next step, if it did not with this one."""
        if self._world_size > 1:
            answers: Answers = call.answers
            self._outputs.collect(answers)

    def _land(self, flight: Flight) -> None:
        self.gate.land(flight)
        if flight.launch is not None:
            self._fanout.book.forget(flight.launch)
        flight.launch = flight.sampling = None  # these know the flight: a cycle would keep all of the step alive
        if self.gate.waiting:
            self._admit()
        if self._changed is not None:
            self._tell()

    def _get_rid_of(self, flight: Flight, launch: Call) -> None:
        """Its launch was refused; ranks that took it have to sample it, or they would sample no later one.

        Where all have to be asked alike, it must not matter who has answered by now.
        """
        if not launch.missing and not self._is_replicated:
            self._land(flight)
        elif flight.sampling is None:
            self._send_sampling(SampleTokens(flight.step), Pending(), None)

    def _tell(self) -> None:
        if self._changed is not None:
            self._changed.set()
            self._changed = None

    def _left(self, held: Held) -> None:
        """Its asker has gone."""
        if held.call is not None:
            self._fanout.abandon(held.call)
        elif self.gate.withdraw(held):
            held.reply.fail(ActorStopped("execute_model", "its caller is gone"))
            self._tell()

    def _abort(self) -> None:
        self.gate.forget_aborted()
        for held in list(self.gate.waiting):
            self.gate.withdraw(held)
            held.reply.fail(_aborted(held.message.step))
        for flight in list(self.gate.flying.values()):
            self._abort_flight(flight)
        self._tell()

    def _abort_flight(self, flight: Flight) -> None:
        """End its waiters; the device cannot be stopped, so it is sampled all the same, for nobody."""
        told = False
        for call in (flight.launch, flight.sampling):
            if call is not None and call.waiter is not None:
                call.fail(_aborted(flight.step))
                told = True
        if flight.sampling is None and not flight.is_whole:
            if not told:
                self.gate.aborted.add(flight.step)
            self._send_sampling(SampleTokens(flight.step), Pending(), None)

    def _arm(self, when: float) -> None:
        if when < self._armed:
            self._armed = when
            self._actor.after(max(when - time.monotonic(), 0.0), Wake())


def _left_of(expires: float, until: float | None) -> float | None:
    """Seconds until the earlier of two times; None: no limit."""
    earlier = expires if until is None else min(expires, until)
    return None if math.isinf(earlier) else max(earlier - time.monotonic(), 0.0)


def _aborted(step: StepId) -> ExecutorPaused:
    return ExecutorPaused(f"step {step} was ended by pause(mode='abort')")
