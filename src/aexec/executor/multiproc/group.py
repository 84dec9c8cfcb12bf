"""Backend ``mp``: each rank in a process of its own, on this node.

The workers are children of a small fork server, which goes with the group. Each has two
lines: steps and plain methods go down the one, in order, and are answered by the worker's
main thread; what must be answered while that thread computes, or hangs, goes down the
other. All of it runs on the executor's loop, without a thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import os
import platform
import sys
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import msgspec

from aexec import environ
from aexec.config import ExecutorConfig
from aexec.errors import AexecError, ChannelFull, ConfigError, MessageNotDecoded, ProtocolError, WorkerDied
from aexec.executor.group import GroupPlan, WorkerGroup
from aexec.executor.multiproc.environment import device_of, rank_environment, visible_devices
from aexec.executor.multiproc.greeting import Greeting
from aexec.executor.multiproc.ladder import bring_down
from aexec.executor.multiproc.output import WorkerOutput, forwarder
from aexec.executor.multiproc.process import WorkerProcess
from aexec.executor.multiproc.recipe import installed_devices, recipe_of, spin_of
from aexec.executor.multiproc.rendezvous import Rendezvous
from aexec.executor.multiproc.spawn import Exit, ForkServerProcess, Recipe, Started, import_path
from aexec.messages.base import Message
from aexec.messages.control import CallMethod, Greet, Hello, Shutdown
from aexec.messages.process import Ended, Launch, PhaseReached, ProgressMade
from aexec.messages.step import ExecuteModel, SampleTokens, StepId
from aexec.observe import get_logger
from aexec.transport import Frame, HotWindow, Kind, LoopChannel, Writer
from aexec.transport.pickling import pickled
from aexec.worker.context import WorkerContext, place_worker
from aexec.worker.placement import processors_of_gpu
from aexec.worker.remote import RemoteFailure, rebuild

__all__ = ("MultiprocGroup",)

_STEPS = (ExecuteModel, SampleTokens)
_MESSAGE, _REPLY = Kind.MESSAGE, Kind.REPLY  # looked up once, and never hashed
_GREET, _SHUTDOWN = -1, -2  # calls of the group's own
_SERVER_PATIENCE = 2.0  # seconds that the fork server may take to end, once its workers have


class MultiprocGroup(WorkerGroup):
    """The processes of one generation."""

    backend: ClassVar[str] = "mp"

    def __init__(self, plan: GroupPlan) -> None:
        super().__init__(plan)
        self._ranks = plan.config.parallel.world_size
        self._sink_replied = plan.sink.replied
        self._workers: list[WorkerProcess] = []
        self._outputs: list[WorkerOutput] = []
        self._greeting = Greeting(self._ranks)
        self._recipe: Recipe | None = None
        self._server: ForkServerProcess | None = None
        self._rendezvous: Rendezvous | None = None
        self._writer: Writer | None = None
        self._spin = spin_of(plan.config, self._ranks)
        self._hot = HotWindow(self._spin) if self._spin else None
        self._methods: Mapping[str, bool] = {}
        self._steps = 0  # step messages sent so far
        self._stopping = self._stopped = False
        self._stop = asyncio.Lock()

    def __repr__(self) -> str:
        return f"<MultiprocGroup generation {self.plan.generation}: {self._workers!r}>"

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
        config = self.plan.config
        recipe = self._recipe = recipe_of(config, self._ranks)
        self._writer = Writer()
        self._rendezvous = Rendezvous(self.plan.generation, self._ranks)
        self._server = ForkServerProcess(recipe, self)
        output = self._output("fork server")
        self._server.launch(output.write_end)
        output.close_write_end()
        output.label = f"fork server pid {self._server.pid}"
        devices = visible_devices(recipe.env, installed_devices())
        for rank in range(self._ranks):
            self._start_worker(rank, devices, self._writer, self._server)
        hellos = await self._greeting.all(self.phases)
        self._methods = hellos[0].methods
        return hellos

    def send(self, call: int, message: Message[Any], ranks: Sequence[int]) -> None:
        """Encode a message once and send it down the lines that it belongs to."""
        assert self._writer is not None
        chosen = self._workers if len(ranks) == self._ranks else [self._workers[rank] for rank in ranks]
        if isinstance(message, _STEPS):
            self._send_step(call, message, chosen)
            return
        beside = _is_beside(message, self._methods)
        if isinstance(message, CallMethod) and beside:
            message = msgspec.structs.replace(message, after=self._steps)
        lines = [worker.control_line if beside else worker.work_line for worker in chosen]
        self._writer.send(lines, _MESSAGE, call, message)
        for worker in chosen:
            worker.work.sent(call, message, beside=beside)

    def _send_step(self, call: int, message: ExecuteModel | SampleTokens, workers: Sequence[WorkerProcess]) -> None:
        assert self._writer is not None
        if isinstance(message, SampleTokens) and message.grammar is not None and len(workers) > 1:
            self._send_masked(call, message, {worker.rank: worker.work_line for worker in workers})
        else:
            self._writer.send([worker.work_line for worker in workers], _MESSAGE, call, message)
        self._steps += 1
        if self._hot is not None and isinstance(message, ExecuteModel):
            self._hot.unanswered(len(workers))  # those that are answered after all are not waited for
        for worker in workers:
            worker.work.step_sent(call, message)

    def _send_masked(self, call: int, message: SampleTokens, lines: dict[int, LoopChannel]) -> None:
        """A bitmask goes to the rank that samples; the others are told to go on (SO-06)."""
        assert self._writer is not None
        output_rank = self.plan.config.parallel.output_rank
        sampler = [line for rank, line in lines.items() if rank == output_rank]
        self._writer.send(sampler, Kind.MESSAGE, call, message)
        others = [line for rank, line in lines.items() if rank != output_rank]
        self._writer.send(others, Kind.MESSAGE, call, SampleTokens(message.step))

    async def stop(self, grace: float) -> Sequence[str]:
        """Ask, wait, make: whatever state each worker is in."""
        async with self._stop:
            if self._stopped:
                return []
            self._stopping = True
            try:
                have_process = [worker for worker in self._workers if worker.pid]
                lines = await bring_down(have_process, self.plan.config, grace, lambda worker: _ask(worker, grace))
                if self._server is not None and not await self._server.close(_SERVER_PATIENCE):
                    lines.append(f"the fork server (pid {self._server.pid}) did not end by itself: it was killed")
                self._stopped = True
            finally:
                letting_go = self._let_go()
                self._stopped = True  # if this was cut short too: whoever comes next would wait for nothing
            await letting_go
            return lines

    def phases(self) -> Mapping[int, str]:
        """While it starts, what a rank has come to; then the oldest that it was told and has not ended."""
        return {worker.rank: worker.phase or worker.work.phase for worker in self._workers}

    def settings(self) -> Mapping[str, Any]:
        """What it chose."""
        return {"spin": self._spin, **({"preload": self._recipe.preload} if self._recipe else {})}

    def environment(self) -> Mapping[str, str]:
        """What all workers have that this process has not, or has otherwise."""
        if self._recipe is None:
            return {}
        here = environ.inherited()
        return {name: value for name, value in self._recipe.env.items() if here.get(name) != value}

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
        self._workers[rank].started(started)

    def worker_refused(self, rank: int, why: str) -> None:
        """See ``ServerEvents``."""
        self._greeting.failed(rank, ProtocolError(f"the process of rank {rank} could not be made: {why}"))

    def worker_ended(self, rank: int, how: Exit) -> None:
        """See ``ServerEvents``."""
        self._workers[rank].exited(how)

    def server_lost(self) -> None:
        """See ``ServerEvents``; the kernel ends its children with it."""
        output = self._outputs[0]
        output.drain()
        tail = f"; the last lines it wrote:\n{output.tail}" if output.tail else ""
        self._greeting.failed(0, ProtocolError(f"the {output.label} has ended{tail}"))

    def _start_worker(self, rank: int, devices: Sequence[str], writer: Writer, server: ForkServerProcess) -> None:
        config = self.plan.config
        place = place_worker(
            rank,
            config,
            generation=self.plan.generation,
            local_rank=rank,
            node_id=platform.node(),
            node_ip="127.0.0.1",
            distributed_init_method=self._rendezvous.init_method if self._rendezvous else "",
            device=device_of(rank, devices),
        )
        output = self._output(f"rank {rank}")
        worker = WorkerProcess(rank, writer, output, self._heard, self._died, self._hot)
        self._workers.append(worker)
        self._reached(worker, "spawn")
        worker.launch(
            Launch(
                rank=rank,
                local_world_size=self._ranks,
                driver_pid=os.getpid(),
                parent_pid=server.pid,
                context=_portable(place),
                sys_path=tuple(import_path()),
                log_level=environ.LOG_LEVEL.read(),
                log_format=_log_format(),
                cpus=processors_of_gpu(devices[rank] if rank < len(devices) else "", os.sched_getaffinity(0)),
                spin=self._spin,
            )
        )
        worker.control_line.send(Kind.MESSAGE, _GREET, Greet())
        env = rank_environment(rank, rank, self._ranks, self._ranks)
        server.start(rank, env, worker.work_end.fileno(), worker.output.write_end)

    def _heard(self, rank: int, frame: Frame) -> None:
        kind, call, value, _, error = frame
        if error is not None:
            self._failed(rank, call, error)
        elif kind is _REPLY:
            worker = self._workers[rank]
            worker.work.ended(call)
            if call > 0:
                self._sink_replied(call, rank, value)
            elif call == _GREET:
                worker.phase = ""
                self._greeting.answered(rank, value)
        elif frame.kind is Kind.FAILURE:
            failure = frame.value
            step = self._workers[rank].work.step_of(frame.call) if isinstance(failure, MessageNotDecoded) else None
            self._failed(rank, frame.call, rebuild(failure) if isinstance(failure, RemoteFailure) else failure)
            if step is not None:
                self._make_up_for(self._workers[rank], step)
        else:
            self._event(self._workers[rank], frame.value)

    def _failed(self, rank: int, call: int, error: AexecError) -> None:
        self._workers[rank].work.ended(call)
        if call > 0:
            self.plan.sink.failed(call, rank, error)
        elif call == _GREET:
            self._greeting.failed(rank, error)

    def _make_up_for(self, worker: WorkerProcess, step: int) -> None:
        """A rank could not read a step message: it is told one that it can, so that it is through with as many.

        If it knows the step, it samples it, and holds up no later one; else it refuses. Nobody hears of it.
        """
        if worker.work_line.is_open:
            worker.work_line.send(Kind.MESSAGE, 0, SampleTokens(StepId(step)))

    def _event(self, worker: WorkerProcess, event: object) -> None:
        if isinstance(event, PhaseReached):
            if worker.phase:  # its hello may have come first, by its other line
                self._reached(worker, event.phase)
        elif isinstance(event, ProgressMade):
            self.plan.sink.progress(worker.rank, event.phase, event.done, event.total)
        elif isinstance(event, Ended):
            worker.ending(event)

    def _reached(self, worker: WorkerProcess, phase: str) -> None:
        worker.phase = phase
        self.plan.sink.phase(worker.rank, phase)

    def _died(self, error: WorkerDied) -> None:
        if not self._stopping:
            self.plan.sink.died(error)

    def _output(self, label: str) -> WorkerOutput:
        output = WorkerOutput(label, forwarder(self.plan.config.worker_output))
        self._outputs.append(output)
        return output

    def _let_go(self) -> asyncio.Future[None]:
        """Close everything here; done when the shared memory is given back, which takes a while if it is large."""
        if self._server is not None and not self._stopped:
            self._server.kill()  # stop() itself was cut short
        for worker in self._workers:
            worker.close()
        for output in self._outputs:
            output.close()
        if self._rendezvous is not None:
            self._rendezvous.close()
        close = self._writer.close if self._writer is not None else lambda: None
        return asyncio.get_running_loop().run_in_executor(None, close)


def _is_beside(message: Message[Any], methods: Mapping[str, bool]) -> bool:
    """True for what the control line carries."""
    if isinstance(message, CallMethod):
        if isinstance(message.method, str):
            return methods.get(message.method, False)
        return inspect.iscoroutinefunction(message.method)
    return not isinstance(message, _STEPS)


def _ask(worker: WorkerProcess, grace: float) -> None:
    with contextlib.suppress(ChannelFull):  # it has long read nothing: it will be made to end
        worker.control_line.send(Kind.MESSAGE, _SHUTDOWN, Shutdown(grace))


def _portable(place: WorkerContext) -> bytes:
    try:
        return pickled(place)
    except Exception as error:
        raise ConfigError(
            f"worker_cls, worker_kwargs or worker_init cannot travel to a process of their own: {error}. "
            "Give names ('package.module:Class') and plain values, or make such objects in the worker"
        ) from error


def _log_format() -> str:
    form = environ.LOG_FORMAT.read()
    return ("console" if sys.stderr.isatty() else "json") if form == "auto" else form
