"""Backend ``mp`` over several nodes, as the leader has it.

Its own ranks are what ``mp`` has on one node; those of each other node are behind a line to that
node's agent, which has them in the same way. A message travels once to each node.
"""

from __future__ import annotations

import asyncio
import platform
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any, ClassVar

from aexec.config import ExecutorConfig
from aexec.errors import AexecError, ConfigError, PeerLost, TransportError, note
from aexec.executor.group import GroupPlan, WorkerGroup
from aexec.executor.lines.group import is_beside
from aexec.executor.lines.launch import import_path, portable
from aexec.executor.multiproc.group import MultiprocGroup
from aexec.executor.multiproc.nodes.join import worker_command
from aexec.executor.multiproc.nodes.proxy import NodeProxy
from aexec.executor.multiproc.nodes.roster import Roster
from aexec.executor.multiproc.nodes.spread import names_of, spread
from aexec.executor.multiproc.share import NodeShare
from aexec.messages.base import Message
from aexec.messages.control import Dump, Hello, Ping
from aexec.messages.lifecycle import RankPlace
from aexec.messages.nodes import Begin
from aexec.messages.step import SampleTokens
from aexec.observe import get_logger
from aexec.parallel.rendezvous import PortReservation
from aexec.transport import Kind
from aexec.transport.curve import NodeKey, broadcast, check_installed
from aexec.transport.meeting import new_secret

__all__ = ("NodesGroup",)

_AFTERMATH = 0.1  # seconds in which other nodes may fail for the same reason, or because of it
_URGENT = (Ping, Dump)  # and not Revoke: it is about a call that has to come before it
_PATIENCE = 5.0  # seconds of waiting for nodes after which it is said what is missing
_SLACK = 1.0  # seconds for the last words of a node, beyond what its workers may take


class NodesGroup(WorkerGroup):
    """The workers of one generation, on all nodes."""

    backend: ClassVar[str] = "mp"

    def __init__(self, plan: GroupPlan) -> None:
        super().__init__(plan)
        before = plan.previous
        self._roster = before.hand_over() if isinstance(before, NodesGroup) else None
        self._nodes = spread(plan.config)
        self._own = self._nodes[0]
        self._world = plan.config.parallel.world_size
        self._waiting: dict[int, str] = {}  # by rank: what it waits for before it can be started
        self._local: MultiprocGroup | None = None
        self._proxies: list[NodeProxy] = []
        self._reservation: PortReservation | None = None
        self._methods: Mapping[str, bool] = {}
        self._stopped = False
        self._stop = asyncio.Lock()

    def __repr__(self) -> str:
        return f"<NodesGroup generation {self.plan.generation}: {self._local!r}, {self._proxies!r}, {self._roster!r}>"

    @classmethod
    def check(cls, config: ExecutorConfig) -> None:
        """Only node 0, where each node has ranks and pyzmq is installed.

        Raises:
            ConfigError: Names what is missing, and the remedy.
        """
        MultiprocGroup.check(config)
        if config.node_rank:
            command = worker_command(
                nnodes=config.nnodes,
                node_rank=config.node_rank,
                address=config.master_addr,
                port=config.master_port,
                key_file=config.node_key_file,
            )
            raise ConfigError(
                f"ExecutorConfig.node_rank is {config.node_rank}, and an executor is on node 0: run `{command}` here, "
                "and open the executor there"
            )
        spread(config)
        check_installed()

    async def start(self) -> Sequence[Hello]:
        """Wait for all nodes, have each start its ranks, and wait until each worker is constructed.

        Raises:
            ConfigError: There is no key, or no place to listen.
            AexecError: The first that any node had to tell; those of others are notes.
        """
        config = self.plan.config
        if self._roster is None:
            self._roster = Roster(config, await asyncio.to_thread(NodeKey.find, config.node_key_file))
        roster = self._roster
        await roster.open()
        await self._all_joined(roster)
        hellos = await self._all_up(self._starts(roster))
        roster.failure = ""
        self._methods = hellos[0].methods
        return hellos

    def send(self, call: int, message: Message[Any], ranks: Sequence[int]) -> None:
        """Send a message once to each node that has one of its ranks; a bitmask goes to the node that samples (SO-06)."""
        if isinstance(message, _URGENT):
            self._send_urgent(call, message, ranks)
            return
        bare: Message[Any] = message
        if isinstance(message, SampleTokens) and message.grammar is not None:
            bare = SampleTokens(message.step)
        for proxy in self._proxies:
            if proxy.node.link.is_open:
                proxy.node.link.channel.check_room()
        local, output_rank = self._local, self.plan.config.parallel.output_rank
        own = self._own if len(ranks) == self._world else [rank for rank in ranks if rank in self._own]
        if own and local is not None:
            local.send(call, message if output_rank in self._own else bare, own)
        try:
            if bare is message and len(ranks) == self._world:
                broadcast([proxy.node.link for proxy in self._proxies], Kind.MESSAGE, call, message)
            else:
                self._send_each(call, message, bare, ranks)
        except TransportError as error:
            self._out_of_step(error)
        beside = is_beside(message, self._methods)
        for proxy in self._proxies:
            proxy.sent(call, message, ranks, beside=beside)

    async def stop(self, grace: float) -> Sequence[str]:
        """End all ranks on all nodes, at once."""
        async with self._stop:
            if self._stopped:
                return []
            self._stopped = True
            config = self.plan.config
            limit = grace + config.term_grace + config.kill_grace + _SLACK
            endings: list[Coroutine[Any, Any, Sequence[str]]] = [proxy.stop(grace, limit) for proxy in self._proxies]
            if self._local is not None:
                endings.append(self._local.stop(grace))
            try:
                return [line for lines in await asyncio.gather(*endings) for line in lines]
            finally:
                self._let_go()

    def given_up(self, error: BaseException) -> None:
        """The other nodes are told why, should no generation follow."""
        if self._roster is not None:
            why = f"{type(error).__name__}: {error}".partition("\n")[0]
            self._roster.failure = why if isinstance(error, Exception) else "its start was cancelled"

    async def retire(self) -> None:
        """Dismiss the other nodes, and listen no longer."""
        if self._roster is not None:
            await self._roster.close()

    def hand_over(self) -> Roster | None:
        """The nodes and the door by which they come, for the next generation: this one has them no longer."""
        roster, self._roster = self._roster, None
        return roster

    def phases(self) -> Mapping[int, str]:
        """What each rank waits for, or has come to, or does."""
        if self._local is None:
            return dict(self._waiting)
        phases = dict(self._local.phases())
        for proxy in self._proxies:
            phases |= proxy.phases()
        return phases

    def settings(self) -> Mapping[str, Any]:
        """What it chose."""
        chosen: dict[str, Any] = {"ranks_per_node": tuple(map(len, self._nodes))}
        if self._local is not None:
            chosen |= self._local.settings()
        if self._roster is not None:
            chosen["master_port"] = self._roster.port
        return chosen

    def environment(self) -> Mapping[str, str]:
        """What the workers of this node have on top; each other node has chosen by the same rules."""
        return self._local.environment() if self._local is not None else {}

    def places(self) -> Sequence[RankPlace]:
        """Each rank's node, process and device."""
        places = list(self._local.places()) if self._local is not None else []
        for proxy in self._proxies:
            places += proxy.places()
        return places

    def is_here(self, hello: Hello) -> bool:
        """By its rank: names and addresses prove nothing."""
        return hello.rank in self._own

    def node_name(self, hello: Hello) -> str:
        """Number, name and address."""
        node = next((str(proxy.node) for proxy in self._proxies if hello.rank in proxy.ranks), "")
        return node or f"node {self._own_name()}"

    # Starting.

    async def _all_joined(self, roster: Roster) -> None:
        warning = asyncio.get_running_loop().call_later(_PATIENCE, _warn, roster)
        try:
            while missing := roster.missing:
                for number, ranks in enumerate(self._nodes):
                    waits = f"waiting for node {number}: run `{roster.command(number)}` there"
                    self._wait(ranks, waits if number in missing else "waiting for other nodes")
                await roster.changed()
        finally:
            warning.cancel()

    def _wait(self, ranks: range, phase: str) -> None:
        for rank in ranks:
            if self._waiting.get(rank) != phase:
                self._waiting[rank] = phase
                self.plan.sink.phase(rank, phase)

    def _starts(self, roster: Roster) -> Mapping[range, Coroutine[Any, Any, Sequence[Hello]]]:
        """What starts each node's ranks; nothing is awaited here, so that no node can go meanwhile."""
        plan = self.plan
        settings, path, secret = portable(plan.config), tuple(import_path()), new_secret()
        reservation = self._reservation = PortReservation(roster.place.node_ip)
        share = NodeShare(
            ranks=self._own,
            node_id=self._own_name(),
            node_ip=roster.place.node_ip,
            init_method=reservation.init_method,
            secret=secret,
        )
        local = self._local = MultiprocGroup(GroupPlan(plan.config, plan.generation, plan.actor, plan.sink), share)
        starts: dict[range, Coroutine[Any, Any, Sequence[Hello]]] = {self._own: local.start()}
        for number, ranks in enumerate(self._nodes[1:], start=1):
            proxy = NodeProxy(roster.nodes[number], ranks, plan.generation, plan.sink)
            self._proxies.append(proxy)
            starts[ranks] = proxy.start(
                Begin(
                    generation=plan.generation,
                    config=settings,
                    first_rank=ranks.start,
                    num_ranks=len(ranks),
                    node_id=proxy.node.name,
                    init_method=reservation.init_method,
                    secret=secret,
                    sys_path=path,
                    arena_bytes=int(plan.config.arena_bytes),
                )
            )
        return starts

    async def _all_up(self, starts: Mapping[range, Coroutine[Any, Any, Sequence[Hello]]]) -> Sequence[Hello]:
        """Wait for all nodes, or for the first that fails: that is the cause, and the others follow from it."""
        tasks = {ranks: asyncio.ensure_future(start) for ranks, start in starts.items()}
        try:
            await asyncio.wait(tasks.values(), return_when=asyncio.FIRST_EXCEPTION)
            first = _failures(tasks)
            if not first:
                return [hello for task in tasks.values() for hello in task.result()]
            await asyncio.wait(tasks.values(), timeout=_AFTERMATH)
            raise self._cause({**first, **_failures(tasks)})
        finally:
            for task in tasks.values():
                task.cancel()
            await asyncio.gather(*tasks.values(), return_exceptions=True)

    def _cause(self, failures: Mapping[range, BaseException]) -> BaseException:
        """The first failure that is not about another rank, with what became of the other nodes."""
        ranks = min(failures, key=lambda ranks: isinstance(failures[ranks], PeerLost))
        cause = failures[ranks]
        phases = self.phases()
        for others in self._nodes:
            error = failures.get(others)
            if others == ranks or not isinstance(cause, AexecError):
                continue
            if error is not None:
                note(cause, f"{names_of(others)}: {type(error).__name__}: {error}".partition("\n")[0])
                continue
            for rank in others:
                note(cause, f"rank {rank}: no failure of its own, at {phases.get(rank) or 'ready'}")
        return cause

    def _own_name(self) -> str:
        address = self._roster.place.node_ip if self._roster is not None else ""
        return f"0 ({platform.node()}, {address})"

    # Sending.

    def _send_urgent(self, call: int, message: Message[Any], ranks: Sequence[int]) -> None:
        """What is answered at any time passes whatever is under way to other nodes, however large."""
        own = [rank for rank in ranks if rank in self._own]
        if own and self._local is not None:
            self._local.send(call, message, own)
        for proxy in self._proxies:
            parcel = proxy.parcel(message, ranks)
            if parcel is not None and proxy.node.link.is_open:
                proxy.node.link.send(Kind.MESSAGE, call, parcel, urgent=True)

    def _send_each(self, call: int, message: Message[Any], bare: Message[Any], ranks: Sequence[int]) -> None:
        output_rank = self.plan.config.parallel.output_rank
        for proxy in self._proxies:
            parcel = proxy.parcel(message if output_rank in proxy.ranks else bare, ranks)
            if parcel is not None and proxy.node.link.is_open:
                proxy.node.link.send(Kind.MESSAGE, call, parcel)

    def _out_of_step(self, error: TransportError) -> None:
        """Some ranks have a message that others will not get: they cannot go on together."""
        for proxy in self._proxies:
            proxy.node.lose(f"a message could not be sent to all nodes: {error}")

    # Ending.

    def _let_go(self) -> None:
        for proxy in self._proxies:
            proxy.let_go()
        if self._reservation is not None:
            self._reservation.close()


def _warn(roster: Roster) -> None:
    """Say it to those who look at no progress."""
    for number in roster.missing:
        get_logger("aexec.executor").warning("waiting for a node", node=number, run=roster.command(number))


def _failures(tasks: Mapping[range, asyncio.Future[Any]]) -> dict[range, BaseException]:
    found = {ranks: task.exception() for ranks, task in tasks.items() if task.done() and not task.cancelled()}
    return {ranks: error for ranks, error in found.items() if error is not None}
