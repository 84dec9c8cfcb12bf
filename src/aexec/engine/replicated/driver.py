"""The driver of a rank whose process has an engine of its own, as has every other rank's.

All of them have to give their workers the same steps in the same order, or these wait for each
other in vain. What a scheduler decides follows from what it was told before; so all are told
the same before each decision, whatever the timing of their loops:

* **What callers want** (requests, aborts, holds, time that is up) goes on an agenda first, and is
  done once all ranks have been asked for it: at the same decision on all of them.
* **What steps bring** is taken with a fixed lag. There is one decision for each step that has
  ended, in their order, however many results are there by then. A decision fills the pipeline:
  with ``depth`` steps in flight, step n is decided upon with exactly the results up to n - depth.
* **What clocks and threads say** decides nothing: a request's time-out is put on the agenda, its
  grammar is made before it counts as there, a mask that cannot be made fails its request when
  the step is taken.

Steps go out in the order of their decisions, each behind the sampling of the one before it, so
that the row of calls is the same everywhere. While steps run, each decision asks the ranks for
the next one, and the answer comes while the model computes. Without steps nothing is asked
until somebody wants something; the others join in as soon as they are asked for it too.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from aexec.actor import Deferred, handles
from aexec.engine.calls import (
    Abort,
    Drain,
    Expire,
    Generate,
    Hold,
    MaskReady,
    Release,
    ResetPrefixCache,
    StepFailed,
    TakeRequests,
)
from aexec.engine.grammar.following import RequestGrammar
from aexec.engine.live import Delta
from aexec.engine.replicated.agenda import Item, Vote, never
from aexec.engine.replicated.answers import FirstAnswer
from aexec.engine.replicated.calls import EndTurn, GrammarsMade, TakeTurn
from aexec.engine.replicated.coming import Arrivals, Coming
from aexec.engine.replicated.rounds import RankRounds
from aexec.engine.replicated.turns import Turn, Turns
from aexec.engine.request import Request
from aexec.engine.stream import TokenStream
from aexec.errors import AexecError, CallTimeout, ProtocolError, QueueFull, RequestFailed
from aexec.executor.copies import own_copy
from aexec.executor.direct import Reply
from aexec.messages.base import Message
from aexec.messages.step import ExecuteModel, SampleTokens, StepId

__all__ = ("ReplicatedDriver",)

R = TypeVar("R")
_MOST_COMING = 1 << 16  # far beyond any queue, so that which of them are too many is for all ranks to say


class ReplicatedDriver(RankRounds):
    """Runs requests on an executor that other processes run likewise; see ``EngineDriver`` for its arguments."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._arrivals, self._turns = Arrivals(), Turns()
        self._unsent: deque[ExecuteModel] = deque()
        self._spoilt: dict[StepId, list[tuple[Request, Exception]]] = {}  # whose masks could not be made
        self._streams.on_abandoned = self._left

    # ------------------------------------------------------------ requests come and go

    def generate(self, message: Generate) -> Deferred[None] | None:
        """Queue a request once it has come to all ranks, and its grammar is there on all of them."""
        if message.streams[0].is_abandoned:
            return None
        self._outages.check(message.request_id)
        if len(self._arrivals) >= _MOST_COMING:
            raise QueueFull(message.request_id, _MOST_COMING, "requests wait for other ranks")
        samples = self._samples(message)
        reply: Deferred[None] = self.context.defer(message)
        coming = Coming(message, samples, FirstAnswer(reply))
        self._arrivals.add(coming)
        if message.sampling.structured is None:
            self._arrived(coming)
        else:
            task = self.context.pipe_to_self(
                self._grammars(coming.samples),
                lambda grammars: GrammarsMade(coming, grammars),
                lambda error: GrammarsMade(coming, {}, error),
            )
            coming.stop = task.cancel
        return reply

    async def _grammars(self, samples: list[Request]) -> dict[str, RequestGrammar]:
        return {sample.request_id: await self._masks.compile(sample) for sample in samples}

    @handles(GrammarsMade)
    def grammars_made(self, message: GrammarsMade) -> None:
        """The request is here, be it that it cannot be run: the ranks have to agree upon that too."""
        coming = message.coming
        coming.stop = None
        if not coming.is_left and self._arrivals.find(coming.message.streams[0]) is coming:
            coming.grammars, coming.error = message.grammars, message.error
            self._arrived(coming)

    def _arrived(self, coming: Coming) -> None:
        run = self._take if coming.message.sampling.structured is None else self._vote
        coming.item = Item(
            f"request {coming.request_id}",
            partial(run, coming),
            self.context.now(),
            partial(self._refuse, coming),
            is_moot=lambda: coming.is_left,
            dropped=partial(self._gone, coming),
        )
        self._put(coming.item)

    def _vote(self, coming: Coming) -> None:
        """It is here on all ranks; its grammar may not be."""
        is_made = coming.error is None
        self._agenda.ask(Vote(f"grammar of {coming.request_id}", is_made, partial(self._take_if, coming)))

    def _take_if(self, coming: Coming, is_made: bool) -> None:  # noqa: FBT001 - what was voted
        if is_made:
            self._take(coming)
        else:
            text = f"the grammar of request {coming.request_id} could not be compiled on another rank, which says why"
            self._refuse(coming, coming.error or RequestFailed(text))

    def _take(self, coming: Coming) -> None:
        """All ranks have it: queue it, or refuse it, as all will."""
        try:
            self._check_open(coming.request_id)
            self._admit(coming.message, coming.samples)
        except AexecError as error:
            self._refuse(coming, error)
            return
        for sample in coming.samples if coming.grammars else ():
            sample.grammar = coming.grammars[sample.request_id]
            self._scheduler.make_ready(sample.request_id)
        self._gone(coming)

    def _compile(self, request: Request) -> None:
        """Its grammar is there already."""

    def _refuse(self, coming: Coming, error: Exception) -> None:
        self._arrivals.remove(coming)
        coming.reply.fail(error)

    def _gone(self, coming: Coming) -> None:
        self._arrivals.remove(coming)
        coming.reply.resolve(None)

    def expire(self, message: Expire) -> None:
        """A request's time is up by the clock of this rank: it ends once it is by all."""
        request = message.request
        if not request.is_finished:
            run = partial(super().expire, message)
            self._will_be(f"end of the time of {request.request_id}", run, lambda: request.is_finished)

    def abort(self, message: Abort) -> bool | Deferred[bool]:
        """End a request once all ranks want that; one that others want goes on to its end, with no reader here."""
        if message.stream is not None:
            self._left(message.request_id, message.stream)
            return False
        return self._propose(
            message, f"abort of {message.request_id}", partial(self._streams.abort, message.request_id)
        )

    def _left(self, request_id: str, stream: TokenStream) -> None:
        """A reader has left, maybe before the request had come to all ranks."""
        coming = self._arrivals.find(stream)
        if coming is not None and not coming.is_left:
            coming.is_left = True
            if coming.stop is not None:
                coming.stop()
                self._gone(coming)
                return
            if coming.item is not None and self._agenda.withdraw(coming.item):
                return
        key = f"reader of {request_id} has left"
        if coming is None and (not self._streams.follows(request_id, stream) or self._agenda.has(key)):
            return
        run, is_moot = partial(self._streams.abort, request_id, stream), partial(self._is_over, request_id, stream)
        self._put(Item(key, run, presses=False, is_moot=is_moot))

    def _is_over(self, request_id: str, stream: TokenStream) -> bool:
        return self._arrivals.find(stream) is None and not self._streams.follows(request_id, stream)

    def reset_prefix_cache(self, message: ResetPrefixCache) -> bool | Deferred[bool]:
        """Share nothing that is stored, on all ranks from the same step on."""
        return self._propose(message, "reset of the prefix cache", self._scheduler.reset_prefix_cache)

    # ------------------------------------------------------------ holds and turns

    def hold(self, message: Hold) -> Deferred[None]:
        """Launch no step, once all ranks are to; answered when none is in flight."""
        reply: Deferred[None] = self.context.defer(message)
        answer = FirstAnswer(reply)
        self._agreed(answer, f"hold: {message.reason}, {message.mode}", partial(self._begin_hold, message, answer))
        return reply

    def release(self, message: Release) -> None:
        """Launch steps again once all ranks may, be it that nobody waits for that."""
        self._will_be(f"release: {message.reason}", partial(self._end_hold, message))

    def _leave_hold(self, reply: Reply, message: Hold) -> None:
        """Whoever wanted it has gone; it is the ranks', and stays until all release it."""
        del message
        self._holders.remove(reply)
        reply.resolve(None)

    def drain(self, message: Drain) -> Deferred[None]:
        """Take no new requests, once all ranks are not to; answered when all have ended."""
        reply: Deferred[None] = self.context.defer(message)
        answer = FirstAnswer(reply)
        self._agreed(answer, "drain", partial(self._begin_drain, answer))
        return reply

    def take_requests(self, message: TakeRequests) -> None:
        """Take new requests again, from the same on."""
        del message
        self._will_be("take requests", self._end_drain)

    @handles(TakeTurn)
    def take_turn(self, message: TakeTurn) -> Deferred[None]:
        """Let nobody else near the executor, once all ranks want the same."""
        reply: Deferred[None] = self.context.defer(message)
        turn = self._turns.wanted(message.key, FirstAnswer(reply))
        self._agreed(turn.reply, f"turn: {message.what}", partial(self._grant, turn))
        reply.on_cancel(partial(self._end_turn, message.key))
        return reply

    @handles(EndTurn)
    def end_turn(self, message: EndTurn) -> None:
        """Whoever had it, or wanted it, is through."""
        self._end_turn(message.key)

    def _end_turn(self, key: int) -> None:
        turn = self._turns.left(key)
        if turn is not None and turn.is_granted:
            self._will_be("end of a turn", self._turns.pop)

    def _grant(self, turn: Turn) -> None:
        self._turns.granted(turn)
        if turn.is_left:  # whoever wanted it had gone when it was said already
            self._will_be("end of a turn", self._turns.pop)

    @property
    def _is_held(self) -> bool:
        return bool(self._turns) or super()._is_held

    # ------------------------------------------------------------ what all have to want

    def _propose(self, message: Message[R], key: str, act: Callable[[], R]) -> Deferred[R]:
        """Do something once it is on all agendas, and answer with what it returns."""
        reply: Deferred[R] = self.context.defer(message)
        answer = FirstAnswer(reply)

        def run() -> None:
            try:
                answer.resolve(act())
            except AexecError as error:
                answer.fail(error)

        self._agreed(answer, key, run)
        return reply

    def _will_be(self, key: str, run: Callable[[], object], is_moot: Callable[[], bool] = never) -> None:
        """Do something once all ranks want it, which they will; at once if there is nothing left to be agreed."""
        if self._outages.recovery.failure is not None:
            run()
        else:
            self._put(Item(key, run, self.context.now(), is_moot=is_moot))

    def _agreed(self, answer: FirstAnswer[Any], key: str, run: Callable[[], object]) -> None:
        item = Item(key, run, self.context.now(), answer.fail, dropped=partial(answer.resolve, None))
        if self._outages.recovery.failure is not None:  # there is nothing left to be agreed
            run()
            self._after_loss()
        else:
            self._put(item)
            answer.on_cancel(partial(self._agenda.withdraw, item))

    # ------------------------------------------------------------ the step loop

    def _decide(self, todo: list[Callable[[], object]]) -> None:
        """The one place where what runs is decided: after a step, or when there is none, with what all ranks know."""
        deltas: list[Delta] = []
        if self._in_flight:
            flight = self._in_flight.take_landed()
            for request, error in self._spoilt.pop(flight.step, ()):
                self._fail_one(request, error)
            deltas = self._outcomes.take(flight)
        if todo:
            self._hand_out(deltas)
            deltas = []
            self._do(todo)
        while self._in_flight.num_free and self._launch():
            pass
        if not self._in_flight:
            self._in_flight.rest()
        self._advance()
        self._hand_out(deltas)

    def _do(self, todo: list[Callable[[], object]]) -> None:
        try:
            for run in todo:
                run()
        except Exception as error:  # noqa: BLE001  # a fault of ours; nobody may wait for what comes behind it
            self._give_up(error)

    def _hand_out(self, deltas: list[Delta]) -> None:
        for delta in deltas:
            self._streams.hand_out(delta)

    def _settle(self, step: StepId, output: object, error: Exception | None = None) -> None:
        """A step has ended: its outcome is taken when it is its turn."""
        if self._in_flight.mark_landed(step, output, error):
            self._advance()
            self._proceed()

    def _send(self, message: ExecuteModel) -> None:
        self._unsent.append(message)

    def _advance(self) -> None:
        """Send what may be sent, which decides nothing."""
        self._ask_for_masks()
        for flight in self._in_flight.due_samples():
            self._replies.sample(SampleTokens(flight.step, flight.mask))
        while self._unsent and self._in_flight.may_follow(self._unsent[0].step):
            self._replies.launch(self._unsent.popleft())
        self._answer_holders()
        if not self._in_flight:
            self._turns.begin()

    def _wake(self) -> None:
        """The decision that this is part of goes on to launch what there is."""

    def _take_masks(self, message: MaskReady) -> None:
        """The step may be sampled; whoever has no mask fails when its outcome is taken."""
        step, masks = message.step, message.masks
        flight = next((flight for flight in self._in_flight.flights if flight.step == step), None)
        if flight is None:
            return
        if masks is None:
            error = message.error or ProtocolError("its grammar made no bitmask")
            constrained = self._in_flight.unmask(step)
            wanted = (each for each in self._scheduler.sampled(flight.batch) if each.request_id in constrained)
            self._spoilt[step] = [(request, error) for request in wanted]
            return
        if masks.failed:
            self._spoilt[step] = list(masks.failed.items())
        if masks.output.request_ids:
            self._in_flight.masked(step, masks.output)
        else:
            self._in_flight.unmask(step)

    # ------------------------------------------------------------ the end of it all

    def step_failed(self, message: StepFailed) -> None:
        """End what the error ends; a limit that has passed by this rank's clock ends all, as others may know nothing of it."""
        if isinstance(message.error, CallTimeout) and self._in_flight.knows(message.step):
            self._give_up(message.error)
        else:
            super().step_failed(message)

    def _after_loss(self) -> None:
        failure = self._outages.recovery.failure
        if failure is not None:
            self._unsent.clear()
            self._spoilt.clear()
            for item in self._agenda.clear():
                if item.fail is not None:
                    item.fail(own_copy(failure, f"while it waited for other ranks ({item.key})"))
            for coming in self._arrivals.clear():
                if coming.stop is not None:
                    coming.stop()
                coming.reply.fail(own_copy(failure, f"while request {coming.request_id} was coming"))
            self._turns.clear()
        self._answer_holders()
