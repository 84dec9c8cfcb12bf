"""The control plane of an external launcher's ranks: one of them, as it sees the others.

Each process makes the same calls in the same order. Whoever makes one says so
(:meth:`Peers.called`), runs it on its own worker, and shares the outcome
(:meth:`Peers.replied`); the sink hears the outcomes of all ranks of the replica, its own
included, each under the number of the call. All of it runs on the executor's loop, and
nothing polls.

* A reply is released only when all ranks of the replica have made that call alike
  (``check=True``). A failure is released at once to every rank that has made the call.
* Ranks that differ: ``sink.diverged`` on all of them, once; no call can be made any more.
* A rank that dies: ``sink.died`` on all ranks of all replicas, once.
* A rank that is through (:meth:`Peers.close`) is no death; calls that it has not made fail
  (``sink.failed``), and so do those that it has made and left unanswered.

The first rank of each replica has its :class:`~aexec.executor.external.hub.Hub`, to which the
others keep a line each; the hubs keep one to rank 0's. So a replica whose script ends sooner
takes no other with it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from typing import Any, Final

import anyio
from msgspec import structs

from aexec.errors import (
    AexecError,
    ArenaFull,
    ExecutorClosed,
    MessageNotPortable,
    RanksDiverged,
    RanksMissing,
    WorkerDied,
)
from aexec.executor.aside import run_aside
from aexec.executor.copies import own_copy
from aexec.executor.external.digest import describe, digest, step_of
from aexec.executor.external.hub import NOT_READY
from aexec.executor.external.once import Anew, Once
from aexec.executor.external.outcomes import Outcome, Outcomes, TooManyHeld
from aexec.executor.external.questions import Questions
from aexec.executor.external.rounds import Rounds
from aexec.executor.external.sink import Answer, Launched, PeerSink, PeersStatistics
from aexec.executor.external.standing import Standing
from aexec.executor.external.verdicts import as_rank, reads_nothing, seen_from, too_far_behind, why_through, without
from aexec.executor.external.ways import Store
from aexec.messages.base import Message
from aexec.messages.control import Hello
from aexec.messages.lifecycle import RoundResult
from aexec.messages.peers import (
    Answered,
    Asked,
    Assembled,
    Cards,
    Departed,
    Departing,
    Farewell,
    Lost,
    Parted,
    Present,
    pack_call,
    unpack_call,
)
from aexec.parallel.layout import RankLayout
from aexec.transport import Kind
from aexec.worker.remote import RemoteFailure, departing, rebuild

__all__ = ("Answer", "Launched", "PeerSink", "Peers", "PeersStatistics", "Store")

_LAST_WORDS: Final = 0.5  # seconds that closing gives what was said to get to the kernel, whatever the grace
_REPLY, _FAILURE, _MESSAGE = Kind.REPLY, Kind.FAILURE, Kind.MESSAGE


class Peers:
    """One rank among those that the launcher has started.

    Args:
        place: Which it is.
        layout: Of all replicas.
        sink: Where to report.
        store: How the ranks find each other; see :mod:`aexec.executor.external.store`.
        check: Compare calls, and hold replies until all ranks have made theirs.
        timeout: Seconds for :meth:`connect`, and for :meth:`open`.
        host: This node's address, for ranks of other nodes; None: all ranks are on this node.
        heartbeat: Seconds after which a cut link is known, if the other end is on another node.
    """

    def __init__(
        self,
        place: Launched,
        layout: RankLayout,
        sink: PeerSink,
        *,
        store: Store,
        check: bool = True,
        timeout: float = 600.0,
        host: str | None = None,
        heartbeat: float = 3.0,
    ) -> None:
        self._world_rank, self._layout, self._sink = place.rank, layout, sink
        self._replica, self._rank = divmod(place.rank, layout.replica_size)
        self._first = place.rank - self._rank
        self._check, self._timeout, self._store = check, timeout, store
        self._standing = Standing(
            place.rank, layout, store, check=check, host=host, heartbeat=heartbeat, hear=self._hear,
            lost=self._on_lost, full=self._hub_reads_nothing,
        )  # fmt: skip
        self._outcomes = Outcomes(check=check)
        self._questions = Questions(self._rank, self._standing, sink)
        self._error: RanksDiverged | WorkerDied | None = None
        self._departed: dict[int, Departed] = {}
        self._cards, self._hellos = Once[list[Any]](), Once[list[Hello]]()
        self._rounds = Rounds(lambda number, keys: self._standing.send(_MESSAGE, -number, keys))
        self._closed = False
        self._heard: dict[type[Any], Callable[[Any], None]] = {
            Cards: lambda message: self._cards.set(message.cards),
            Assembled: lambda message: self._hellos.set(message.hellos),
            Asked: self._questions.heard,
            Answered: self._questions.answered,
            Lost: self._on_lost,
            Parted: lambda message: self._end(message.error),
            Departed: self._on_departed,
            Farewell: self._on_farewell,
        }

    def __repr__(self) -> str:
        state = "closed" if self._closed else "ended" if self._error else f"{self._outcomes!r}"
        return f"<Peers of rank {self._world_rank} of {self._layout.size}: {state}, {self._standing!r}>"

    @property
    def error(self) -> RanksDiverged | WorkerDied | None:
        """Why no call can be made any more; None: they can."""
        return self._error

    def statistics(self) -> PeersStatistics:
        """What went on."""
        hub, own, size = self._standing.hub, self._outcomes, self._layout.replica_size
        ranks = {} if hub is None else {rank: hub.lockstep.position(rank) for rank in range(size)}
        held = own.num_held + (0 if hub is None else hub.num_held)
        return PeersStatistics(own.made, own.agreed, own.num_open, held, self._questions.num_open, ranks)

    # Coming together.

    async def connect(self, card: Any = None) -> list[Any]:
        """Meet the others, before the worker is made; the cards of all ranks of all replicas, by rank.

        Args:
            card: What this rank has to tell all others. It is small, and pickled.

        Raises:
            RanksMissing: A rank has not come in time, or has given up: says why.
            WorkerDied: A rank has ended.
        """
        try:
            return await self._meet(card)
        except BaseException as error:
            self._hang_up(str(error).partition("\n")[0] if isinstance(error, AexecError) else "")
            raise
        finally:
            self._store.close()

    async def open(self, hello: Hello) -> list[Hello]:
        """Say that the worker is there, and wait for those of the replica: their hellos, in rank order.

        Raises:
            RanksMissing: A rank was not ready in time, or has given up: says why.
            WorkerDied: A rank has ended.
        """
        self._standing.say(Present(hello))
        with anyio.move_on_after(self._timeout):
            hellos = await self._hellos.get()
            self._standing.hub_pid = hellos[0].pid
            return hellos
        missing = [self._first + rank for rank, text in (await self.whereabouts()).items() if text == NOT_READY]
        raise RanksMissing(missing, self._timeout, "be ready", "no worker is there yet")

    async def _meet(self, card: Any) -> list[Any]:
        with anyio.move_on_after(self._timeout):
            while True:
                with contextlib.suppress(Anew):
                    return await self._attempt(card)
                self._hang_up("")
        raise RanksMissing(self._standing.missing, self._timeout, "meet", self._store.problem)

    async def _attempt(self, card: Any) -> list[Any]:
        self._cards, self._departed = Once[list[Any]](), {}
        return await self._standing.attempt(self._cards, Cards(self._world_rank, [card]), self._timeout)

    # Calls.

    def called(self, message: Message[Any], ranks: Sequence[int], *, arguments: bool = True) -> int:
        """This rank makes its next call; its number, from 1.

        Args:
            message: ``CallMethod``, ``ExecuteModel`` or ``SampleTokens``.
            ranks: Those of the replica that will answer; empty: none, as for an
                ``ExecuteModel`` that is going to be sampled (it may fail nevertheless).
            arguments: They have to be the same; False: each rank has its own, as its own tensors.

        Raises:
            RanksDiverged: Ranks have differed, or one of them is through.
            WorkerDied: One has ended.
            ExecutorClosed: This end is closed.
        """
        text = describe(message)
        self._check_that_all_are_there(text)
        released, seq = self._outcomes.make(ranks), self._outcomes.made
        if self._check:
            answers = 0 if self._rank not in ranks else 2 if len(ranks) == 1 else 1
            same = digest(message, ranks, arguments=arguments)
            self._standing.send(_MESSAGE, seq, (same, text, step_of(message), answers))
        self._tell_soon(released)
        for departed in self._departed.values():
            self._fail_without(departed)
        return seq

    def replied(self, seq: int, value: Any) -> None:
        """This rank's own worker has answered: share it; the sink gets it too, in its time."""
        if self._is_over:
            return
        try:
            self._standing.send(_REPLY, pack_call(seq, self._rank), value)
        except (MessageNotPortable, ArenaFull) as error:
            self.failed(seq, error)
            return
        self._take(Outcome(seq, self._rank, value), soon=True)

    def failed(self, seq: int, error: BaseException) -> None:
        """This rank's own worker has raised: share it; the sink gets it too."""
        if self._is_over:
            return
        sent = departing(error, rank=self._rank, method=f"call {seq}")
        self._standing.send(_FAILURE, pack_call(seq, self._rank), sent)
        self._take(Outcome(seq, self._rank, error, is_error=True), soon=True)

    def died(self, error: WorkerDied) -> None:
        """This rank's own worker has ended: all ranks of all replicas hear of it, this one's sink not."""
        if not self._is_over:
            self._standing.say(Lost(self._world_rank, as_rank(error, self._world_rank, error.cause)))
            self._end(error, quietly=True)

    async def agree(self, keys: Sequence[str]) -> RoundResult:
        """What came of a round in which this rank has said these keys; ends once all ranks of the replica have come.

        The n-th call of each rank belongs together with that of the others. One call at a time.

        Raises:
            RanksDiverged: A rank is through, or they have differed.
            WorkerDied: A rank has ended.
            ProtocolError: The call before has not ended, maybe because its caller was cancelled.
        """
        self._check_that_all_are_there("agree")
        return await self._rounds.agree(keys)

    def ask(self, rank: int, call: int, message: Message[Any]) -> None:
        """Hand a message (``Ping``, ``Dump``, ``Revoke``) to one rank's loop; ``sink.answered`` hears the answer.

        Not counted as a call. Never blocks.
        """
        if not self._is_over:
            self._questions.ask(rank, call, message)

    async def whereabouts(self, timeout: float = 1.0) -> dict[int, str]:
        """Which call each rank of the replica has made last, as its hub knows; empty: no answer in time."""
        return await self._questions.whereabouts(timeout)

    # The end.

    async def close(self, grace: float, why: str = "") -> None:
        """Be through: say so, wait up to ``grace`` seconds for what has to be said, and hang up. Twice is once.

        A hub waits so long for its ranks to be through as well; nobody waits after an error.

        Args:
            grace: Seconds.
            why: What was wrong, if this rank gives up, as ``ModelLoadError: …``: others are told.
        """
        if self._closed:
            return
        self._closed = True
        self._standing.say(Departing(self._outcomes.made, why))
        try:
            if self._error is None:
                with anyio.move_on_after(grace):
                    await self._standing.until_known()
            with anyio.move_on_after(_LAST_WORDS):
                await self._standing.flushed(_LAST_WORDS)
        finally:
            self._hang_up(why)
            await run_aside(self._standing.close)

    def _hang_up(self, why: str) -> None:
        self._standing.hang_up(Departing(self._outcomes.made, why))

    @property
    def _is_over(self) -> bool:
        return self._closed or self._error is not None

    def _check_that_all_are_there(self, text: str) -> None:
        if self._error is not None:
            raise own_copy(self._error)
        if self._closed:
            raise ExecutorClosed("the executor was closed")
        for departed in self._departed.values():
            if self._outcomes.made >= departed.last:
                raise without(departed, self._outcomes.made + 1, self._rank, text)

    def _end(self, error: RanksDiverged | WorkerDied, *, quietly: bool = False, here: bool = True) -> None:
        """Nothing goes on: every wait ends, and the sink hears why, unless it knows."""
        if self._error is not None:
            return
        self._error = error
        self._outcomes.clear()
        self._questions.end()
        for wait in (self._cards, self._hellos, self._rounds):
            wait.fail(error)
        self._standing.farewell.set()
        if quietly or self._closed:
            return
        self._sink.died(error, here=here) if isinstance(error, WorkerDied) else self._sink.diverged(error)

    # What comes in.

    def _hear(self, kind: Kind, call: int, value: Any) -> None:
        if kind is _REPLY:
            seq, rank = unpack_call(call)
            if self._check:
                self._tell(self._outcomes.agree(seq))
            self._take(Outcome(seq, rank, value))
        elif kind is _FAILURE:
            seq, rank = unpack_call(call)
            error = rebuild(value) if isinstance(value, RemoteFailure) else value
            self._take(Outcome(seq, rank, error, is_error=True))
        elif kind is _MESSAGE:
            self._rounds.heard(value)
        elif call:
            self._tell(self._outcomes.agree(call))
        else:
            self._heard[type(value)](value)

    def _take(self, outcome: Outcome, *, soon: bool = False) -> None:
        if self._error is not None:
            return
        try:
            released = self._outcomes.hear(outcome)
        except TooManyHeld:
            self._standing.say(Parted(too_far_behind(self._rank, self._outcomes.made, outcome.rank, outcome.seq)))
            return
        (self._tell_soon if soon else self._tell)(released)

    def _tell_soon(self, outcomes: Sequence[Outcome]) -> None:
        if outcomes:
            asyncio.get_running_loop().call_soon(self._tell, outcomes)

    def _tell(self, outcomes: Sequence[Outcome]) -> None:
        for outcome in outcomes:
            if self._is_over:
                return
            if outcome.is_error:
                self._sink.failed(outcome.seq, outcome.rank, outcome.value)
            else:
                self._sink.replied(outcome.seq, outcome.rank, outcome.value)

    def _on_lost(self, lost: Lost) -> None:
        error, here = seen_from(self._replica, lost, self._layout.replica_size)
        self._end(error, here=here)

    def _on_departed(self, message: Departed) -> None:
        if not self._cards.is_there:
            failure = RanksMissing([max(message.rank, 0) + self._first], None, "meet", message.why)
            self._cards.fail(failure if message.why else Anew())
            return
        self._departed[message.rank] = message
        self._hellos.fail(RanksMissing([message.rank + self._first], None, "be ready", why_through(message)))
        self._rounds.fail(without(message, self._outcomes.made + 1, self._rank, self._rounds.text))
        self._fail_without(message)

    def _fail_without(self, departed: Departed) -> None:
        """Calls that a rank that is through has not answered will not be."""
        for seq in self._outcomes.waiting_for(departed.rank):
            error = without(departed, seq, self._rank, "it, and waits for an answer")
            self._take(Outcome(seq, departed.rank, error, is_error=True), soon=True)

    def _on_farewell(self, message: Farewell) -> None:
        self._standing.bid_farewell()
        if not self._cards.is_there:
            self._cards.fail(RanksMissing([self._first], None, "meet", message.why) if message.why else Anew())
        else:  # and with it go the lines to the others
            last = Departed(0, self._outcomes.made, message.why)
            for rank in range(self._layout.replica_size):
                if rank not in self._departed and rank != self._rank:
                    self._on_departed(structs.replace(last, rank=rank))

    def _hub_reads_nothing(self, queued: int) -> None:
        asyncio.get_running_loop().call_soon(self._end, reads_nothing(0, self._outcomes.made, queued))
