"""Backend ``mp``: each rank in a process of its own, on this node.

The workers are children of a small fork server, which goes with the group. It may hold a part
of a larger world: those ranks of it that are on this node.
"""

from __future__ import annotations

import asyncio
import os
import platform
import sys
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from aexec import environ
from aexec.config import ExecutorConfig
from aexec.errors import ConfigError, ProtocolError
from aexec.executor.group import GroupPlan
from aexec.executor.lines.environment import device_of, rank_environment, visible_devices
from aexec.executor.lines.group import LineGroup
from aexec.executor.lines.launch import launch_of, spin_of
from aexec.executor.multiproc.ladder import bring_down
from aexec.executor.multiproc.output import WorkerOutput, forwarder
from aexec.executor.multiproc.process import WorkerProcess
from aexec.executor.multiproc.recipe import installed_devices, recipe_of
from aexec.executor.multiproc.rendezvous import Rendezvous
from aexec.executor.multiproc.share import NodeShare, whole_world
from aexec.executor.multiproc.spawn import Exit, ForkServerProcess, Recipe, Started
from aexec.messages.control import Hello
from aexec.messages.lifecycle import RankPlace
from aexec.observe import get_logger
from aexec.transport import seqpacket_pair
from aexec.worker.context import WorkerContext, place_worker
from aexec.worker.placement import processors_of_gpu

__all__ = ("MultiprocGroup",)

_SERVER_PATIENCE = 2.0  # seconds that the fork server may take to end, once its workers have


class MultiprocGroup(LineGroup[WorkerProcess]):
    """The processes of one generation, on this node.

    Args:
        plan: What the group is made from.
        share: The ranks that are on this node, and where they meet the others; None: it has all.
    """

    backend: ClassVar[str] = "mp"

    def __init__(self, plan: GroupPlan, share: NodeShare | None = None) -> None:
        self._share = whole_world(plan.config) if share is None else share
        super().__init__(plan, spin=spin_of(plan.config), ranks=self._share.ranks)
        self._outputs: list[WorkerOutput] = []
        self._devices: list[str] = []  # of each rank
        self._recipe: Recipe | None = None
        self._server: ForkServerProcess | None = None
        self._rendezvous: Rendezvous | None = None

    @classmethod
    def check(cls, config: ExecutorConfig) -> None:  # noqa: ARG003 - it is about the node
        """Only where the kernel has what this is made of.

        Raises:
            ConfigError: It has not.
        """
        if sys.platform != "linux" or not hasattr(os, "pidfd_open"):
            raise ConfigError(f"backend 'mp' needs Linux 5.4 or later, and this is {platform.platform()}: take 'uni'")

    async def start(self) -> Sequence[Hello]:
        """Start all processes at once, and wait until each worker is constructed.

        Raises:
            AexecError: The first that any rank raised; those of others are notes.
            ProtocolError: A process could not be made.
        """
        share = self._share
        if share.is_whole:
            recipe = recipe_of(self.plan.config, self._ranks)
        else:  # the kernel is asked about networks
            recipe = await asyncio.to_thread(recipe_of, self.plan.config, self._ranks, share.node_ip)
        self._recipe = recipe
        if share.is_whole:
            self._rendezvous = Rendezvous(self.plan.generation, self._ranks)
        self._server = ForkServerProcess(recipe, self)
        output = self._output("fork server")
        self._server.launch(output.write_end)
        output.close_write_end()
        output.label = f"fork server pid {self._server.pid}"
        devices = visible_devices(recipe.env, installed_devices())
        for rank in share.ranks:
            self._start_worker(rank, devices, self._server)
        return await self._all_greeted()

    def settings(self) -> Mapping[str, Any]:
        """What it chose."""
        return {**super().settings(), **({"preload": self._recipe.preload} if self._recipe else {})}

    def environment(self) -> Mapping[str, str]:
        """What all workers have that this process has not, or has otherwise."""
        if self._recipe is None:
            return {}
        here = environ.inherited()
        return {name: value for name, value in self._recipe.env.items() if here.get(name) != value}

    def places(self) -> Sequence[RankPlace]:
        """Each rank's process and device; they are all on this node."""
        node = self._share.node_id
        return [
            RankPlace(worker.rank, node, worker.pid, device)
            for worker, device in zip(self._workers, self._devices, strict=True)
        ]

    def server_ready(self, failed: Mapping[str, str]) -> None:
        """See ``ServerEvents``."""
        asked = self.plan.config.preload or ()  # of our own choice whoever needs it says so, as where torch is missing
        for module, error in failed.items():
            log = get_logger("aexec.executor")
            (log.warning if module in asked else log.debug)(
                "a module could not be preloaded", module=module, error=error
            )

    def worker_started(self, rank: int, started: Started) -> None:
        """See ``ServerEvents``."""
        self._worker(rank).started(started)

    def worker_refused(self, rank: int, why: str) -> None:
        """See ``ServerEvents``."""
        self._greeting.failed(rank, ProtocolError(f"the process of rank {rank} could not be made: {why}"))

    def worker_ended(self, rank: int, how: Exit) -> None:
        """See ``ServerEvents``."""
        self._worker(rank).exited(how)

    def server_lost(self) -> None:
        """See ``ServerEvents``; the kernel ends its children with it."""
        output = self._outputs[0]
        output.drain()
        tail = f"; the last lines it wrote:\n{output.tail}" if output.tail else ""
        self._greeting.failed(self._first, ProtocolError(f"the {output.label} has ended{tail}"))

    def _start_worker(self, rank: int, devices: Sequence[str], server: ForkServerProcess) -> None:
        worker = WorkerProcess(rank, self._output(f"rank {rank}"), self._died)
        self._workers.append(worker)
        self._reached(worker, "spawn")
        work, worker.work_end = seqpacket_pair()
        control, control_end = seqpacket_pair()
        self._connect(worker, work, control)
        local_rank = rank - self._first
        device = devices[local_rank] if local_rank < len(devices) else ""
        with control_end:
            launch = launch_of(
                self._place(rank, local_rank, devices),
                local_world_size=self._ranks,
                spin=self._spin,
                parent_pid=server.pid,
                cpus=processors_of_gpu(device, os.sched_getaffinity(0)),
            )
            self._launch(worker, launch, (control_end.fileno(),))
        env = rank_environment(rank, local_rank, self.plan.config.parallel.world_size, self._ranks)
        server.start(rank, env, worker.work_end.fileno(), worker.output.write_end)

    def _place(self, rank: int, local_rank: int, devices: Sequence[str]) -> WorkerContext:
        share, chosen = self._share, device_of(local_rank, devices)
        self._devices.append(chosen)
        return place_worker(
            rank,
            self.plan.config,
            generation=self.plan.generation,
            local_rank=local_rank,
            node_id=share.node_id,
            node_ip=share.node_ip,
            distributed_init_method=self._rendezvous.init_method if self._rendezvous else share.init_method,
            device=chosen,
            local_world_size=self._ranks,
            group_secret=share.secret,
        )

    def _output(self, label: str) -> WorkerOutput:
        output = WorkerOutput(label, forwarder(self.plan.config.worker_output))
        self._outputs.append(output)
        return output

    async def _bring_down(self, grace: float) -> list[str]:
        have_process = [worker for worker in self._workers if worker.pid]
        lines = await bring_down(have_process, self.plan.config, grace, lambda worker: self._ask_to_end(worker, grace))
        if self._server is not None and not await self._server.close(_SERVER_PATIENCE):
            lines.append(f"the fork server (pid {self._server.pid}) did not end by itself: it was killed")
        return lines

    def _let_go(self) -> asyncio.Future[None]:
        if self._server is not None and not self._stopped:
            self._server.kill()  # stop() itself was cut short
        done = super()._let_go()
        for output in self._outputs:
            output.close()
        if self._rendezvous is not None:
            self._rendezvous.close()
        return done
