"""Backend ``ray``: each rank in a process that Ray made, anywhere in a cluster.

Ray gives places, processes and the news of their deaths; everything else is what ``mp`` has, by
the same code: two lines to each rank, the same messages, the same order. Workers on this node
meet the driver by Unix sockets, those elsewhere by TCP.
"""

from __future__ import annotations

import asyncio
import importlib.util
import socket
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from aexec import environ
from aexec.config import ExecutorConfig
from aexec.errors import AexecError, MissingExtra, ProtocolError
from aexec.executor.group import GroupPlan
from aexec.executor.lines.group import LineGroup
from aexec.executor.lines.launch import launch_of, spin_of
from aexec.executor.ray.actors import LIFE, actor_names, gather, make_actors
from aexec.executor.ray.api import off_loop
from aexec.executor.ray.cluster import Cluster
from aexec.executor.ray.environment import SentEnvironment, environment_of_rank, plan_environment
from aexec.executor.ray.estate import Estate
from aexec.executor.ray.graph.plane import GraphPlane
from aexec.executor.ray.placement import Placement
from aexec.executor.ray.plane import StepPlane
from aexec.executor.ray.preflight import choose_transport, preflight
from aexec.executor.ray.rank import RayRank, ask
from aexec.executor.ray.rerank import NodeFacts, Ranking, rerank
from aexec.executor.ray.shutdown import bring_down, end_actors
from aexec.executor.ray.worker_actor import ActorFacts
from aexec.messages.control import Hello
from aexec.messages.lifecycle import RankPlace
from aexec.messages.step import ExecuteModel, SampleTokens
from aexec.observe import get_logger
from aexec.parallel.layout import RankLayout
from aexec.transport.meeting import Meeting, new_secret
from aexec.worker.context import WorkerContext, place_worker

__all__ = ("RayGroup",)

_ACTOR_LIMIT = 30.0  # seconds that Ray may take to hear of an actor


class RayGroup(LineGroup[RayRank]):
    """The Ray-placed workers of one generation."""

    backend: ClassVar[str] = "ray"

    def __init__(self, plan: GroupPlan) -> None:
        super().__init__(plan, spin=spin_of(plan.config))
        self._plain_calls_wait = plan.config.ray_step_plane == "compiled_graph"
        before = plan.previous
        self._estate = before.hand_over() if isinstance(before, RayGroup) else Estate()
        self._phase = ""  # of all ranks, before they are workers
        self._actors: list[Any] = []  # by place among the bundles
        self._bundles: tuple[int, ...] = ()  # by rank
        self._sent: SentEnvironment | None = None
        self._ranking: Ranking | None = None
        self._meeting: Meeting | None = None
        self._plane: StepPlane | None = None
        self._making: asyncio.Future[None] | None = None
        self._meetings: list[asyncio.Task[None]] = []
        self._sockets: list[socket.socket] = []  # of the lines, whoever has them by now

    def __repr__(self) -> str:
        return f"{super().__repr__()[:-1]}, {self._plane!r}>"

    @classmethod
    def check(cls, config: ExecutorConfig) -> None:  # noqa: ARG003 - it is about what is installed
        """Only where Ray is installed; what is wrong with it, or missing besides, the start says.

        Raises:
            MissingExtra: It is not.
        """
        if importlib.util.find_spec("ray") is None:
            raise MissingExtra("backend 'ray'", "ray", "ray")

    async def start(self) -> Sequence[Hello]:
        """Join the cluster, take places in it, make the actors, and wait until each worker is constructed.

        Raises:
            ConfigError: Something is missing, or set in a way that cannot work.
            AexecError: The first that any rank raised; those of others are notes.
        """
        config = self.plan.config
        self._sent = plan_environment(environ.inherited(), config, environ.excluded())
        await preflight(config)
        cluster, placement = await self._estate.settle(config, self._report)
        facts = await self._make_actors(cluster, placement)
        ranking = self._rank(facts, cluster, placement)
        await self._prepare(ranking)
        init_method = await self._reserve(ranking)
        self._serve(self._open_meeting(cluster), ranking, init_method)
        hellos = await self._all_greeted()
        if config.ray_step_plane == "compiled_graph":
            self._report("step plane")
            self._plane = await self._make_plane(cluster, placement)
            await self._plane.open()
        return hellos

    def hand_over(self) -> Estate:
        """The cluster and the placement group, for the next generation: this one has them no longer."""
        estate, self._estate = self._estate, Estate()
        return estate

    async def retire(self) -> None:
        """Remove our own placement group, and leave the cluster; one of our own ends with that."""
        await self._estate.give_back()

    def settings(self) -> Mapping[str, Any]:
        """What it chose."""
        chosen = dict(super().settings())
        if self._bundles:
            chosen["bundle_indices"] = self._bundles
        if (placement := self._estate.placement) is not None:
            chosen |= {"ray_resource": placement.resource, "placement_group": repr(placement)}
        if (cluster := self._estate.cluster) is not None:
            chosen["ray_address"] = cluster.address
        return chosen

    def environment(self) -> Mapping[str, str]:
        """What all workers were sent; those of a node that has a value of its own keep that."""
        return self._sent.shown() if self._sent else {}

    def is_here(self, hello: Hello) -> bool:
        """By Ray's id of the node: names and addresses prove nothing."""
        return self._workers[hello.rank].is_here

    def node_name(self, hello: Hello) -> str:
        """Name and address."""
        return _node_of(self._workers[hello.rank].facts)

    def places(self) -> Sequence[RankPlace]:
        """Each rank's node, process and the device that Ray gave it."""
        return [_place_of(worker.rank, worker.facts) for worker in self._workers]

    # Starting.

    def _report(self, phase: str, done: float = 0.0, total: float = 0.0) -> None:
        """All ranks are at something that is done for all of them; that it goes on is progress."""
        for rank in range(self._ranks):
            if self._phase != phase:
                self.plan.sink.phase(rank, phase)
            elif total:
                self.plan.sink.progress(rank, phase, done / self._ranks, total / self._ranks)
        self._phase = phase

    async def _make_actors(self, cluster: Cluster, placement: Placement) -> list[ActorFacts]:
        config = self.plan.config
        self._report("actors")
        addresses = {node.node_id: node.ip for node in await cluster.nodes()}
        places = [NodeFacts(node_id=node, node_ip=addresses.get(node, "")) for node in placement.nodes]
        names = actor_names(config, self.plan.generation, self._ranking_of(places, cluster).order)
        make = off_loop("make actors", make_actors, config, placement, names, self._actors, timeout=_ACTOR_LIMIT)
        self._making = asyncio.ensure_future(make)
        await asyncio.shield(self._making)

        def heard(place: int) -> None:
            self.plan.sink.progress(place, "actors", 1.0, 1.0)

        return await gather(self._actors, heard, for_graph=config.ray_step_plane == "compiled_graph")

    def _ranking_of(self, places: Sequence[NodeFacts], cluster: Cluster) -> Ranking:
        as_given = bool(self.plan.config.bundle_indices)
        return rerank(places, cluster.node_id, cluster.node_ip, keep_order=as_given)

    def _rank(self, facts: Sequence[ActorFacts], cluster: Cluster, placement: Placement) -> Ranking:
        """Which actor is which rank."""
        places = [each.place for each in facts]
        ranking = self._ranking_of(places, cluster)
        get_logger("aexec.executor").debug("ranks are laid out", table=str(ranking))
        self._bundles = tuple(placement.bundles[place] for place in ranking.order)
        for rank, place in enumerate(ranking.order):
            worker = RayRank(
                rank,
                self._actors[place],
                facts[place],
                is_here=places[place].node_id == cluster.node_id,
                on_death=self._died,
                on_refusal=self._greeting.failed,
            )
            self._workers.append(worker)
            self._reached(worker, "environment")
        return ranking

    async def _prepare(self, ranking: Ranking) -> None:
        """Each becomes its rank."""

        def call(worker: RayRank) -> Any:
            address = ranking.address if ranking.num_nodes == 1 else worker.node
            return worker.actor.prepare.remote(
                worker.rank, address, self._sent, environment_of_rank(worker.rank, ranking)
            )

        await asyncio.gather(*(ask(worker, call(worker)) for worker in self._workers))

    async def _reserve(self, ranking: Ranking) -> str:
        """Where the ranks find each other: a port that rank 0's process holds for them."""
        if self._ranks == 1:
            return ""
        first = self._workers[0]
        method: str = await ask(first, first.actor.reserve.remote(ranking.address))
        return method

    def _open_meeting(self, cluster: Cluster) -> Meeting:
        host = None if self._is_on_one_node else cluster.node_ip
        meeting = self._meeting = Meeting(new_secret(), host=host, expect=self._ranks)
        meeting.open()
        return meeting

    def _serve(self, meeting: Meeting, ranking: Ranking, init_method: str) -> None:
        """Let the workers come, each into the call that lasts for its life."""
        for worker in self._workers:
            self._reached(worker, "connect")
            call = worker.actor.serve.options(concurrency_group=LIFE)
            worker.serve(call.remote(worker.rank, meeting.place(here=worker.is_here), self._graph_layout))
            self._meetings.append(asyncio.ensure_future(self._meet(worker, meeting, ranking, init_method)))

    async def _meet(self, worker: RayRank, meeting: Meeting, ranking: Ranking, init_method: str) -> None:
        try:
            work, control = await meeting.lines(worker.rank)
            self._sockets += (work, control)
            worker.meet(work)
            self._connect(worker, work, control)
            launch = launch_of(
                self._place(worker.rank, ranking, init_method),
                local_world_size=ranking.local_world_size(worker.rank),
                spin=self._spin,
                driver_pid=0,  # it knows by its line who that is, if it is on this node
            )
            self._launch(worker, launch)
        except Exception as error:  # noqa: BLE001 - nobody awaits this: whoever waits for the hello is told
            refused = error if isinstance(error, AexecError) else ProtocolError(f"{worker!r} got no lines: {error!r}")
            self._greeting.failed(worker.rank, refused)

    def _place(self, rank: int, ranking: Ranking, init_method: str) -> WorkerContext:
        facts, device = ranking.facts[rank], ranking.device_index(rank)
        resource = self._estate.placement.resource if self._estate.placement else ""
        kind = {"GPU": "xpu" if self.plan.config.ray_resource == "XPU" else "cuda"}.get(resource)
        return place_worker(
            rank,
            self.plan.config,
            generation=self.plan.generation,
            local_rank=ranking.local_ranks[rank],
            node_id=facts.node_id,
            node_ip=facts.node_ip,
            distributed_init_method=init_method,
            device="auto" if device is None or kind is None else f"{kind}:{device}",
        )

    @property
    def _graph_layout(self) -> RankLayout | None:
        """Of the ranks, if steps come to them by a graph."""
        config = self.plan.config
        return RankLayout.of_replica(config.parallel) if config.ray_step_plane == "compiled_graph" else None

    @property
    def _is_on_one_node(self) -> bool:
        """That of the driver."""
        return all(worker.is_here for worker in self._workers)

    async def _make_plane(self, cluster: Cluster, placement: Placement) -> StepPlane:
        config = self.plan.config
        have = [worker.facts.ray for worker in self._workers if worker.facts.ray is not None]
        transport = choose_transport(config, placement.resource, have)
        get_logger("aexec.executor").debug("hidden states travel", by=transport.name, reason=transport.reason)
        if transport.hint:
            get_logger("aexec.executor").info("hidden states could travel faster", hint=transport.hint)
        if not self._is_on_one_node and config.parallel.pipeline_parallel_size > 1:
            get_logger("aexec.executor").info(
                "over several nodes a graph takes one execution at a time, so stages do not overlap",
                hint="ray_step_plane='channel' lets them",
            )
        used = {cluster.node_id, *(worker.facts.place.node_id for worker in self._workers)}
        stores = [node.total.get("object_store_memory") for node in await cluster.nodes() if node.node_id in used]
        return GraphPlane(
            config,
            [worker.actor for worker in self._workers],
            transport=transport.name,
            one_node=self._is_on_one_node,
            store=min((int(each) for each in stores if each), default=None),
            on_reply=self._step_answered,
            on_failure=lambda call, rank, error: self._failed(rank, call, error),
            on_break=self._graph_broke,
            on_progress=lambda done, total: self._report("step plane", float(done), float(total)),
        )

    # Sending.

    def _step_answered(self, call: int, rank: int, value: Any) -> None:
        self._workers[rank].work.ended(call)
        self._sink_replied(call, rank, value)

    def _graph_broke(self, rank: int, error: BaseException) -> None:
        """And nobody has died of it: the rank can run no step any more, which is as good as dead."""
        if self._stopping:
            return
        get_logger("aexec.executor").error("the graph broke off, and its rank is ended", rank=rank, error=repr(error))
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        self._workers[rank].kill(f"it was ended, for its graph broke off: {reason}")

    def _send_step(self, call: int, message: ExecuteModel | SampleTokens, workers: Sequence[RayRank]) -> None:
        if self._plane is None:
            super()._send_step(call, message, workers)
            return
        self._plane.submit(call, message, [worker.work.calls for worker in self._workers])
        self._steps += 1
        for worker in workers:
            worker.work.step_sent(call, message)

    # Ending.

    async def _bring_down(self, grace: float) -> list[str]:
        config = self.plan.config
        for task in self._meetings:
            task.cancel()
        if self._making is not None:
            await asyncio.gather(self._making, return_exceptions=True)  # they come into the world first
        if self._plane is not None:
            await self._plane.rest()
        lines = await bring_down(
            self._workers, grace, config.kill_grace, lambda worker: self._ask_to_end(worker, grace)
        )
        await end_actors(self._actors, config.kill_grace)
        if self._plane is not None:
            await self._plane.close()
        return lines

    def _let_go(self) -> asyncio.Future[None]:
        if self._meeting is not None:
            self._meeting.close()
        if self._plane is not None:
            self._plane.abandon()  # nothing is left of it, unless its close was cut short
        letting_go = super()._let_go()
        for sock in self._sockets:  # of a rank that got no further, too
            sock.close()
        return letting_go


def _node_of(facts: ActorFacts) -> str:
    return f"{facts.host} ({facts.place.node_ip})"


def _place_of(rank: int, facts: ActorFacts) -> RankPlace:
    return RankPlace(rank, _node_of(facts), facts.place.pid, ", ".join(facts.place.devices) or "auto")
