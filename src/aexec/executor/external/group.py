"""Backend ``external_launcher``: torchrun or SLURM has started this process as one rank of many.

Nothing is started here. Every rank's process has an executor of its own over *all* ranks of
its replica, and all of them make the same calls in the same order. What is for this rank runs
on a worker in this process, as with ``uni``; its answer is shared with the other processes, so
that each of them sees the answers, errors and ends of all ranks, as the executor of a group of
its own would.

A call counts from its acceptance, in the program's order, for when it is sent depends on what
has been answered by then. What is asked of a rank's event loop (``Ping``, ``Dump``) is not counted.
"""

from __future__ import annotations

import asyncio
import platform
import secrets
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import anyio
import msgspec

from aexec.config import ExecutorConfig
from aexec.errors import ActorStopped, AexecError, CallTimeout, ConfigError, RanksDiverged, WorkerDied, note
from aexec.executor.copies import own_copy
from aexec.executor.external.launcher import Launched, layout_of
from aexec.executor.external.ledger import Ledger
from aexec.executor.external.peers import Answer, Peers
from aexec.executor.external.refusals import refuse_foreign_settings
from aexec.executor.external.store import TorchStore
from aexec.executor.external.surroundings import Card, address_of, device_of, launched_here, store_of
from aexec.executor.group import GroupPlan, WorkerGroup
from aexec.executor.local import LocalWorker
from aexec.messages.base import Message
from aexec.messages.control import CallMethod, Dump, Hello, Ping, Revoke
from aexec.messages.lifecycle import RankPlace, RoundResult
from aexec.messages.operations import WEIGHT_METHODS
from aexec.messages.step import ExecuteModel, ForwardLaunched, SampleTokens
from aexec.parallel.rendezvous import PortReservation
from aexec.worker.context import WorkerContext, place_worker
from aexec.worker.names import name_of

__all__ = ("ExternalGroup",)

_TO_SAY_WHO = 3.0  # seconds before the limit of the whole start, which cannot tell who has not come
_PARTING = 0.25  # seconds for this process to be through as well, where another one is and a call is pending


class ExternalGroup(WorkerGroup):
    """The ranks of one replica, of which this process is one."""

    backend: ClassVar[str] = "external_launcher"
    is_replicated: ClassVar[bool] = True

    def __init__(self, plan: GroupPlan) -> None:
        super().__init__(plan)
        self.launched = self.place()
        self._layout = layout_of(self.launched, plan.config.parallel)
        self._replica, self.rank = divmod(self.launched.rank, self._layout.replica_size)
        self._worker = LocalWorker(self.rank, plan.actor, _OwnAnswers(self))
        self._ledger = Ledger()
        self._refused: dict[int, AexecError] = {}
        self._peers: Peers | None = None
        self._port: PortReservation | None = None
        self._places: list[RankPlace] = []
        self._samples = True
        self._why = ""
        self._stopping = False

    def __repr__(self) -> str:
        replica = f", replica {self._replica} of {self._layout.data}" if self._layout.data > 1 else ""
        return f"<ExternalGroup: {self.launched}{replica}: {self._ledger!r}, {self._worker!r}>"

    @classmethod
    def check(cls, config: ExecutorConfig) -> None:
        """A launcher has started this process, the layout fits, and no setting is of another backend's kind.

        Raises:
            ConfigError: Names what is missing or wrong, and the remedy.
        """
        refuse_foreign_settings(config)
        launched = cls.place()
        layout_of(launched, config.parallel)
        device_of(launched)

    @classmethod
    def place(cls) -> Launched:
        """Which rank this process is.

        Raises:
            ConfigError: Nobody has said, or not all of it.
        """
        return launched_here()

    def store(self) -> TorchStore:
        """How the ranks find each other."""
        return store_of(self.launched)

    async def start(self) -> Sequence[Hello]:
        """Meet the other ranks, make the worker, and wait until all have theirs.

        Raises:
            ConfigError: This rank's settings are not those of rank 0.
            RanksMissing: A rank has not come in time, or has given up: names it.
            WorkerDied: A rank has ended.
            AexecError: What the worker's code raised.
        """
        try:
            return await self._start()
        except BaseException as error:
            self._why = _briefly(error)
            raise

    async def _start(self) -> Sequence[Hello]:
        self.plan.sink.phase(self.rank, "meet")
        host = await address_of(self.launched)
        config = self.plan.config
        peers = self._peers = Peers(
            self.launched,
            self._layout,
            self,
            store=self.store(),
            check=config.divergence_check,
            timeout=max(config.start_timeout - _TO_SAY_WHO, config.start_timeout / 2),
            host=host,
        )
        cards: list[Card] = await peers.connect(self._card(host))
        self._check_settings([card.settings for card in cards])
        hello = await self._worker.start(self._context(cards[0], host))
        self._samples = hello.dynamic or "sample_tokens" in hello.methods
        self.plan.sink.phase(self.rank, "wait for the other ranks")
        hellos = await peers.open(hello)
        own = cards[self._replica * self._layout.replica_size :]
        self._places = [RankPlace(at.rank, at.node, at.pid, card.device) for at, card in zip(hellos, own, strict=False)]
        return hellos

    def places(self) -> Sequence[RankPlace]:
        """The node, process and device of each rank of the replica (G40)."""
        return self._places

    def accepted(self, call: int, message: Message[Any], ranks: Sequence[int]) -> None:
        """Tell the other ranks of a call, in the order in which the program makes it."""
        is_launch = isinstance(message, ExecuteModel) and message.num_tokens != 0 and self._samples
        answering = () if is_launch else ranks
        try:
            seq = self._joined.called(message, answering, arguments=not _brings_weights(message))
        except AexecError as error:
            self._refused[call] = error  # raised once it would be sent
            self.plan.actor.system.call_soon_threadsafe(self._lost, error)
            return
        entry = self._ledger.made(seq, call, answering)
        if is_launch:
            assert isinstance(message, ExecuteModel)
            self._ledger.launched(entry, message.step)
        elif isinstance(message, SampleTokens):
            self._ledger.samples(entry, message.step)

    def withdrawn(self, call: int) -> None:
        """The other ranks may have begun it: they hear that this one never will."""
        self._refused.pop(call, None)
        entry = self._ledger.entry(call)
        if entry is not None and self.rank in entry.missing:
            gone = "its caller is gone, or its time was up before its turn came"
            self._joined.failed(entry.seq, ActorStopped(f"call {entry.seq} of rank {self.rank}", gone))

    def send(self, call: int, message: Message[Any], ranks: Sequence[int]) -> None:
        """Run on this rank what is for it; the others run it by themselves."""
        if isinstance(message, Revoke):
            message = Revoke(self._ledger.number(message.call))
        if isinstance(message, Ping | Dump | Revoke):
            self._ask(call, message, ranks)
            return
        refused = self._refused.pop(call, None)
        if refused is not None:
            raise refused
        if self.rank in ranks:
            seq = self._ledger.number(call)
            if isinstance(message, CallMethod):
                message = msgspec.structs.replace(message, call=seq)
            self._worker.send(seq, message)

    async def agree(self, keys: Sequence[str], timeout: float) -> RoundResult:
        """What all processes of the replica say in this round.

        Raises:
            CallTimeout: Not all have come in time; the group is lost with it, for a round cannot be left out.
        """
        with anyio.move_on_after(timeout):
            return await self._joined.agree(keys)
        error = CallTimeout("agree", timeout, started=True)
        for rank, where in sorted((await self._joined.whereabouts()).items()):
            note(error, f"rank {rank} is at {where}")
        self.plan.sink.lost(own_copy(error))
        raise error

    async def stop(self, grace: float) -> Sequence[str]:
        """End the worker, whose last answers are shared, then be through with the other ranks."""
        self._stopping = True
        lines = await self._worker.stop(grace)
        if self._peers is not None:
            await self._peers.close(grace, self._why)
        if self._port is not None:
            self._port.close()
        return lines

    def phases(self) -> Mapping[int, str]:
        """This rank's; what others do is seen by their calls."""
        return {self.rank: self._worker.phase} if self._worker.phase else {}

    def stacks(self) -> Mapping[int, str]:
        """This rank's."""
        return {self.rank: self._worker.stack} if self._worker.stack else {}

    # What this rank's worker says: see ``_OwnAnswers``.

    def shared(self, seq: int, value: Any) -> None:
        """It has answered."""
        if not isinstance(value, ForwardLaunched):
            self._joined.replied(seq, value)

    def shared_failure(self, seq: int, error: BaseException) -> None:
        """It has raised."""
        if self._stopping and isinstance(error, ActorStopped):
            return  # by this end's close, of which the others hear; theirs may be just about to come
        self._joined.failed(seq, error)

    def own_death(self, error: WorkerDied) -> None:
        """It has ended its thread."""
        if self._peers is not None and not self._stopping:
            self._peers.died(error)
        self.plan.sink.died(error)

    # What is heard of the ranks: see ``PeerSink``.

    def replied(self, seq: int, rank: int, value: Any) -> None:
        """See ``PeerSink``."""
        call = self._ledger.answered(seq, rank)
        if call:
            self.plan.sink.replied(call, rank, value)

    def failed(self, seq: int, rank: int, error: BaseException) -> None:
        """See ``PeerSink``."""
        if isinstance(error, RanksDiverged):  # it is through: nothing that is for all ranks can be done any more
            asyncio.get_running_loop().call_later(_PARTING, self._lost, error)
            return
        call = self._ledger.answered(seq, rank)
        if call:
            self.plan.sink.failed(call, rank, error)

    def died(self, error: WorkerDied, *, here: bool) -> None:
        """See ``PeerSink``."""
        if self._stopping:
            return
        if here:
            self.plan.sink.died(error)
        else:  # its rank is counted over all replicas, and this group may have one of that number
            self.plan.sink.lost(error)

    def diverged(self, error: RanksDiverged) -> None:
        """See ``PeerSink``."""
        self._lost(error)

    def asked(self, source: int, message: Message[Any], answer: Answer) -> None:  # noqa: ARG002 - all are answered
        """See ``PeerSink``."""
        if isinstance(message, Revoke):  # each process takes back its own: whether this one has is what is asked
            self._ledger.ask_given_back(message.call, answer)
        else:
            self.plan.actor.start_task(self._answer(message, answer))

    def answered(self, call: int, rank: int, value: Any) -> None:
        """See ``PeerSink``."""
        self.plan.sink.replied(call, rank, value)

    def refused(self, call: int, rank: int, error: BaseException) -> None:
        """See ``PeerSink``."""
        self.plan.sink.failed(call, rank, error)

    def _lost(self, error: AexecError) -> None:
        if not self._stopping:
            self.plan.sink.lost(error)

    async def _answer(self, message: Message[Any], answer: Answer) -> None:
        try:
            answer.resolve(await self._asked(message))
        except Exception as error:  # noqa: BLE001 - it belongs to whoever asked
            answer.fail(error)

    async def _asked(self, message: Message[Any]) -> Any:
        found = await self._worker.ask(message)
        return f"has made call {self._ledger.last} last\n{found}" if isinstance(message, Dump) else found

    def _ask(self, call: int, message: Ping | Dump | Revoke, ranks: Sequence[int]) -> None:
        for rank in ranks:
            if rank == self.rank:
                self.plan.actor.start_task(self._ask_own(call, message))
            else:
                self._joined.ask(rank, call, message)

    async def _ask_own(self, call: int, message: Ping | Dump | Revoke) -> None:
        try:
            value = await self._worker.ask(message)
        except Exception as error:  # noqa: BLE001 - it belongs to whoever asked
            self.plan.sink.failed(call, self.rank, error)
            return
        if isinstance(message, Revoke):
            self._ledger.given_back(message.call, never_ran=value)
        self.plan.sink.replied(call, self.rank, value)

    # Where it is.

    @property
    def _joined(self) -> Peers:
        assert self._peers is not None, "the group was not started"
        return self._peers

    def _card(self, host: str | None) -> Card:
        device = device_of(self.launched)
        if self.launched.rank:
            return Card(self._settings(), device)
        self._port = PortReservation(host or "127.0.0.1")
        return Card(self._settings(), device, self._port.init_method, secrets.token_bytes(32))

    def _settings(self) -> str:
        config = self.plan.config
        worker = config.worker_cls if isinstance(config.worker_cls, str) else name_of(config.worker_cls)
        return f"{config.parallel}, worker_cls {worker}, divergence_check={config.divergence_check}"

    def _check_settings(self, of_ranks: Sequence[str]) -> None:
        own = self._settings()
        other = next((rank for rank, settings in enumerate(of_ranks) if settings != own), None)
        if other is not None:
            raise ConfigError(
                f"this is {self.launched}, which opens its executor with {own}, and rank {other} with "
                f"{of_ranks[other]}: give all ranks the same settings"
            )

    def _context(self, announced: Card, host: str | None) -> WorkerContext:
        plan, launched = self.plan, self.launched
        return place_worker(
            self.rank,
            plan.config,
            generation=plan.generation,
            local_rank=launched.local_rank,
            local_world_size=launched.local_world_size,
            owns_process=False,
            node_id=platform.node(),
            node_ip=host or "127.0.0.1",
            distributed_init_method=announced.init_method if self._layout.size > 1 else "",
            device=device_of(launched),
            progress=plan.progress_of(self.rank),
            dp_rank=self._replica,
            num_replicas=self._layout.data,
            group_secret=announced.secret,
        )


class _OwnAnswers:
    """The sink of this rank's worker: what it says is for all."""

    def __init__(self, group: ExternalGroup) -> None:
        self._group = group

    def phase(self, rank: int, phase: str) -> None:
        self._group.plan.sink.phase(rank, phase)

    def progress(self, rank: int, phase: str, done: float, total: float) -> None:
        self._group.plan.sink.progress(rank, phase, done, total)

    def replied(self, call: int, rank: int, value: Any) -> None:  # noqa: ARG002 - it is this one
        self._group.shared(call, value)

    def failed(self, call: int, rank: int, error: BaseException) -> None:  # noqa: ARG002 - it is this one
        self._group.shared_failure(call, error)

    def died(self, error: WorkerDied) -> None:
        self._group.own_death(error)

    def lost(self, error: AexecError) -> None:
        self._group.plan.sink.lost(error)


def _brings_weights(message: Message[Any]) -> bool:
    """Each rank may have its own part of them."""
    return isinstance(message, CallMethod) and message.method in WEIGHT_METHODS


def _briefly(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".partition("\n")[0]
