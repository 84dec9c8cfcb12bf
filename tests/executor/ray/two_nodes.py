"""A driver on a cluster of two nodes: it does what it is told, a line at a time, and answers each with a line.

``two_nodes.py MODEL loopback`` makes the cluster itself, of two addresses of this machine;
``two_nodes.py MODEL ADDRESS COMMAND`` joins one that has its first node, and starts the other
by the command. Either has the resource ``near`` on this program's node and ``far`` on the other.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import dataclasses
import faulthandler
import gc
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import time
import traceback
from pathlib import Path

import ray

from aexec import AsyncLLM, ExecuteModel, ExecutorConfig, ParallelConfig, Restart, SamplingParams, open_executor
from aexec.errors import AexecError, WorkerDied
from aexec.executor.ray import cluster as cluster_module
from aexec.executor.ray.group import RayGroup
from aexec.messages.lifecycle import GroupRestarted
from aexec.messages.step import StepId

NEAR, FAR = "127.0.0.2", "127.0.0.3"
OBJECT_STORE = 100 << 20  # bytes
PATIENCE = 30.0
PR_SET_PDEATHSIG = 1  # linux/prctl.h
GREEDY = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
PROMPTS = [[(7 * place + 31 * number) % 512 for place in range(3 + 5 * number)] for number in range(3)]
FAULTY = "aexec.testing.faulty:FaultyWorker"


class Loopback:
    """A cluster of two nodes that have an address each, and everything else in common."""

    def __init__(self):
        from ray.cluster_utils import Cluster

        head = {"num_cpus": 4, "resources": {"near": 4}, "node_ip_address": NEAR, "include_dashboard": False}
        self._cluster = Cluster(initialize_head=True, head_node_args={**head, "object_store_memory": OBJECT_STORE})
        self.address = self._cluster.address

    def start_far(self):
        """Start the other node."""
        self._cluster.add_node(
            num_cpus=2, resources={"far": 4}, node_ip_address=FAR, object_store_memory=OBJECT_STORE
        )  # fmt: skip

    def close(self):
        """End all nodes."""
        self._cluster.shutdown()


class Apart:
    """A cluster whose nodes are somewhere else each; the first one is there."""

    def __init__(self, address, command):
        self.address, self._command = address, json.loads(command)
        self._started = []

    def start_far(self):
        """Start the other node."""
        self._started.append(subprocess.Popen(self._command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL))

    def close(self):
        """End the other node, and what is left of those before."""
        for process in self._started:
            process.terminate()
        for process in self._started:
            process.wait(PATIENCE)


def wait_for_both():
    """Until two nodes are there."""
    give_up = time.monotonic() + PATIENCE
    while len(nodes()) < 2:
        assert time.monotonic() < give_up, ray.nodes()
        time.sleep(0.05)


def nodes():
    """Those that are alive, by the resource that only they have."""
    alive = [node for node in ray.nodes() if node["Alive"]]
    return {name: node for node in alive for name in ("near", "far") if name in node["Resources"]}


def far_first(ranks):
    """A placement group whose first bundles are on the other node."""
    half = ranks // 2
    bundles = [{"CPU": 1, "far": 1}] * half + [{"CPU": 1, "near": 1}] * (ranks - half)
    group = ray.util.placement_group(bundles)
    ray.get(group.ready(), timeout=PATIENCE)
    return group


@contextlib.contextmanager
def placed(ranks):
    group = far_first(ranks)
    try:
        yield group
    finally:
        ray.util.remove_placement_group(group)


@contextlib.contextmanager
def driver_has(**variables):
    """In the environment of this process, and not of a node that it starts later."""
    os.environ.update(variables)
    try:
        yield
    finally:
        for name in variables:
            del os.environ[name]


def the_group():
    """The worker group of the executor that is open."""
    gc.collect()  # those before
    (group,) = (each for each in gc.get_objects() if isinstance(each, RayGroup))
    return group


def lines_by_rank():
    """The family of each rank's two lines."""
    names = {socket.AF_UNIX: "unix", socket.AF_INET: "tcp", socket.AF_INET6: "tcp"}
    return [
        [names[line._link.sock.family] for line in (worker.work_line, worker.control_line)]
        for worker in the_group()._workers
    ]


def place(worker):
    """What a rank says of itself."""
    context, here = worker.context, os.environ
    return {
        "ip": context.node_ip,
        "node": context.node_id,
        "rank": context.rank,
        "local_rank": context.local_rank,
        "meet": context.distributed_init_method,
        "has_secret": len(context.group_secret) > 0,
        "env": {name: here.get(name) for name in ("NCCL_TEST_OF_OURS", "NOT_TO_BE_COPIED", "GLOO_SOCKET_IFNAME")},
    }


async def answers(llm):
    found = await asyncio.gather(*(llm.complete(prompt, GREEDY) for prompt in PROMPTS))
    return [list(each.token_ids) for each in found]


async def alone(model, name=""):
    """What one rank in this process says."""
    async with AsyncLLM(name or model, num_blocks=64) as llm:
        return await answers(llm)


async def together(model, plane, tensor, pipeline, indices=None, name=""):
    """What ranks on both nodes say, and where they are."""
    with placed(tensor * pipeline) as group, driver_has(NCCL_TEST_OF_OURS="from the driver", NOT_TO_BE_COPIED="secret"):
        config = ExecutorConfig(
            backend="ray",
            parallel=ParallelConfig(tensor, pipeline),
            placement_group=group,
            bundle_indices=indices,
            ray_step_plane=plane,
            start_timeout=60.0,
        )
        async with AsyncLLM(name or model, executor=config, num_blocks=64) as llm:
            said = await answers(llm)
            figures = await llm.executor.collective_rpc("pipeline_statistics")
            return {
                "answers": said,
                "places": await llm.executor.collective_rpc(place),
                "lines": lines_by_rank(),
                "bundles": list(the_group().settings()["bundle_indices"]),
                "handed_on": [each.sent for each in figures],
            }


async def forge(_model):
    """What is said if both nodes claim one address."""
    genuine = cluster_module._nodes
    near = nodes()["near"]["NodeManagerAddress"]

    def forged():
        return tuple(dataclasses.replace(node, ip=near) for node in genuine())

    cluster_module._nodes = forged
    try:
        with placed(2) as group:
            config = ExecutorConfig(backend="ray", parallel=ParallelConfig(2), placement_group=group)
            async with open_executor(config):
                return "it started"
    except AexecError as error:
        return f"{type(error).__name__}: {error}"
    finally:
        cluster_module._nodes = genuine


def kill_far():
    """End the other node as if its power had gone: its raylet, which its workers do not outlive."""
    address = nodes()["far"]["NodeManagerAddress"]
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            words = entry.read_bytes().split(b"\0")
            if words[0].endswith(b"/raylet") and f"--node_ip_address={address}".encode() in words:
                os.kill(int(entry.parent.name), signal.SIGKILL)
                return
    raise LookupError(f"no raylet of {address}")


async def lose_the_far_node(_model, plane):
    """A step that takes long on both nodes, and one of them goes; it comes back afterwards."""
    config = ExecutorConfig(
        backend="ray",
        parallel=ParallelConfig(2, 1),
        worker_cls=FAULTY,
        placement_strategy="SPREAD",
        placement_group="new",
        ray_step_plane=plane,
        on_failure=Restart(max_restarts=1, backoff=0.01),
        close_grace=1.0,
        start_timeout=60.0,
    )
    async with open_executor(config) as executor:
        events = executor.events()
        before = [each["ip"] for each in await executor.collective_rpc(place)]
        await executor.execute_model(ExecuteModel(StepId(1), {"seconds": 20.0}))
        step = asyncio.ensure_future(executor.sample_tokens(StepId(1)))
        await asyncio.sleep(0.2)
        kill_far()
        killed = time.monotonic()
        (error,) = await asyncio.gather(step, return_exceptions=True)
        seconds = time.monotonic() - killed
        assert isinstance(error, WorkerDied), repr(error)
        generation = await asyncio.wait_for(restarted(events), 2 * PATIENCE)
        took = time.monotonic() - killed
        await executor.execute_model(ExecuteModel(StepId(2)))
        again = tuple((await executor.sample_tokens(StepId(2))).output)[:2]
        after = [each["ip"] for each in await executor.collective_rpc(place)]
    CLUSTER.start_far()
    wait_for_both()
    return {
        "before": before, "error": str(error), "rank": error.rank, "node": error.node, "seconds": seconds,
        "generation": generation, "restarted_after": took, "again": again, "after": after,
    }  # fmt: skip


async def restarted(events):
    async for event in events:
        if isinstance(event, GroupRestarted):
            return event.generation
    return None


def say(answer):
    """A line of output."""
    ANSWERS.write(json.dumps(answer) + "\n")
    ANSWERS.flush()


def serve(model):
    """Do what the lines say: the name of a function, and its arguments."""
    for line in sys.stdin:
        name, *arguments = json.loads(line)
        began = time.monotonic()
        faulthandler.dump_traceback_later(2 * PATIENCE)
        try:
            answer = {"value": asyncio.run(globals()[name](model, *arguments))}
        except BaseException:
            answer = {"error": traceback.format_exc()}
        say({**answer, "seconds": round(time.monotonic() - began, 1)})


def main(model):
    """Be on the cluster until there are no more lines."""
    logging.getLogger("ray").setLevel(logging.ERROR)
    ray.init(address=CLUSTER.address, log_to_driver=False, configure_logging=False, **WHERE)
    CLUSTER.start_far()
    wait_for_both()
    say({"value": {name: node["NodeManagerAddress"] for name, node in nodes().items()}})
    serve(model)
    ray.shutdown()


if __name__ == "__main__":
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)  # what it has started goes with it
    ANSWERS = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # Ray prints
    MODEL, ADDRESS, *COMMAND = sys.argv[1:]
    WHERE = {"_node_ip_address": NEAR} if ADDRESS == "loopback" else {}
    CLUSTER = Loopback() if ADDRESS == "loopback" else Apart(ADDRESS, *COMMAND)
    with contextlib.closing(CLUSTER):
        main(MODEL)
