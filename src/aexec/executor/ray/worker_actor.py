"""What runs in a process that Ray made: a few short calls, and then a worker like any other.

The class is plain, and made an actor where it is used. The last of its calls,
:meth:`RayWorker.serve`, runs for the worker's whole life, in a concurrency group of its own: so
on a thread of its own, which is the one that uses the device.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import os
import platform
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from aexec import environ
from aexec.executor.ray.api import ray
from aexec.executor.ray.environment import OwnEnvironment, SentEnvironment, node_environment
from aexec.executor.ray.graph.stage import GraphStage
from aexec.executor.ray.preflight import RayFacts, collect
from aexec.executor.ray.rerank import NodeFacts
from aexec.parallel.layout import RankLayout
from aexec.parallel.rendezvous import PortReservation, network_environment
from aexec.transport.meeting import MeetingPlace, dial
from aexec.worker.context import WorkerContext
from aexec.worker.exits import flush_output, vanish
from aexec.worker.process import serve_lines

__all__ = ("VERSION", "ActorFacts", "RayWorker")

VERSION = importlib.metadata.version("aexec")
_DIAL_LIMIT = 30.0  # seconds to reach the driver


@dataclass(frozen=True, slots=True, kw_only=True)
class ActorFacts:
    """What an actor says of itself before it is a worker.

    Attributes:
        place: Where Ray put it.
        host: The name of its machine.
        log: The file that has what it writes to its standard error; empty: it goes elsewhere.
        log_start: Where its part of that file begins, bytes.
        python: Its interpreter's version.
        aexec: Its version of this package.
        ray: What it has of what the compiled graph needs; None: nobody asked.
    """

    place: NodeFacts
    host: str
    log: str
    log_start: int
    python: str
    aexec: str
    ray: RayFacts | None


class RayWorker(GraphStage):
    """One rank's process.

    Args:
        label: What Ray puts before each line that it prints.
    """

    def __init__(self, label: str) -> None:
        self._label = label
        self._reservation: PortReservation | None = None  # held as long as the process lives: nobody else comes there

    def __repr__(self) -> str:
        return self._label

    def facts(self, *, for_graph: bool) -> ActorFacts:
        """Where it is, and what it has.

        Args:
            for_graph: See whether it can be part of a compiled graph too, which takes a second.
        """
        log, start = _log_file()
        return ActorFacts(
            place=_place(),
            host=platform.node(),
            log=log,
            log_start=start,
            python=platform.python_version(),
            aexec=VERSION,
            ray=collect() if for_graph else None,
        )

    def prepare(self, rank: int, address: str, sent: SentEnvironment, own: OwnEnvironment) -> None:
        """Become a rank, in an environment for it, before anything is imported that would look at that.

        Args:
            rank: Which.
            address: By which other ranks reach this process.
            sent: What all workers are sent.
            own: What is this rank's alone.
        """
        self._label = f"rank {rank}"
        for stream in (sys.stdout, sys.stderr):  # how Ray's log monitor learns whose lines follow
            print(f":actor_name:{self._label}", file=stream, flush=True)
        there = environ.inherited()
        environ.change(sent.changes(there, node_environment(there, _raylet_environment(there)), own))
        environ.change(network_environment(address, environ.inherited()))

    def reserve(self, host: str) -> str:
        """Take a port for the ranks to meet at, and hold it until they have; how they find it."""
        self._reservation = PortReservation(host)
        return self._reservation.init_method

    def serve(self, rank: int, place: MeetingPlace, graph: RankLayout | None = None) -> None:
        """Be the rank until the driver says otherwise; the process ends with it.

        Args:
            rank: Which.
            place: Where the driver waits.
            graph: Of the ranks, if steps come by a graph; None: they come by the work line.

        Raises:
            MeetingFailed: It cannot be reached.
        """
        work = dial(place, rank, "work", _DIAL_LIMIT)
        control = dial(place, rank, "control", _DIAL_LIMIT)

        def with_secret(context: WorkerContext) -> WorkerContext:
            return dataclasses.replace(context, group_secret=place.secret)

        if graph is None:
            code = serve_lines(work, control, complete=with_secret)
        else:
            with self.on_graph(graph) as (make_road, complete):
                code = serve_lines(
                    work, control, make_road=make_road, complete=lambda context: complete(with_secret(context))
                )
        if code:  # as worker code has it, with sys.exit
            flush_output()
            vanish(code)
        ray().actor.exit_actor()


def _place() -> NodeFacts:
    context = ray().get_runtime_context()
    ids: Mapping[str, list[str]] = context.get_accelerator_ids()
    devices = next((tuple(map(str, found)) for found in ids.values() if found), ())
    seen = _raylet_environment(environ.inherited()).get("CUDA_VISIBLE_DEVICES", "")
    return NodeFacts(
        node_id=context.get_node_id(),
        node_ip=ray().util.get_node_ip_address(),
        devices=devices,
        visible=tuple(name.strip() for name in seen.split(",") if name.strip()),
        cpus=len(os.sched_getaffinity(0)),
        pid=os.getpid(),
    )


def _raylet_environment(here: Mapping[str, str]) -> dict[str, str]:
    """The environment of the process that started this one; empty if it cannot be read."""
    try:
        text = Path(f"/proc/{here.get('RAY_RAYLET_PID', os.getppid())}/environ").read_bytes().decode(errors="replace")
    except OSError:
        return {}
    pairs = (entry.partition("=") for entry in text.split("\0") if "=" in entry)
    return {name: value for name, _, value in pairs}


def _log_file() -> tuple[str, int]:
    """Ray gives each process a file of its own for its standard error."""
    try:
        sys.stderr.flush()
        path, size = os.readlink("/proc/self/fd/2"), os.fstat(2).st_size  # noqa: PTH115 - it may lead to a pipe
    except OSError:
        return "", 0
    return (path, size) if path.startswith("/") and not path.startswith("/dev/") else ("", 0)
