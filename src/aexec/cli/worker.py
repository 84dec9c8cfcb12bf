"""``aexec worker``: this machine's part of an executor that lives on another one."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from aexec import environ
from aexec.actor import ActorSystem
from aexec.cli.interrupts import Interrupts
from aexec.config import ExecutorConfig
from aexec.errors import ConfigError
from aexec.executor.multiproc.nodes.agent import EndNode, NodeAgent, WaitForEnd
from aexec.executor.multiproc.nodes.join import Joined, JoinOptions, join_leader
from aexec.parallel.interfaces import address_of, interface_of
from aexec.transport.curve import NodeKey

__all__ = ("WorkerOptions", "run")

_WILDCARDS = ("0.0.0.0", "::", "*")  # noqa: S104 - these are refused
_SLACK = 10.0  # seconds beside what the executor's own limits allow for the end of the workers


@Parameter(name="*", group="Node")
@dataclass(frozen=True, kw_only=True)
class WorkerOptions:
    """Which node this is, and where the leader is.

    Attributes:
        nnodes: How many nodes there are, the leader's among them.
        node_rank: Which one this is, from 1; node 0 is where the executor lives.
        master_addr: Address of node 0, as this node reaches it.
        master_port: Port on which node 0 waits for the others.
        key_file: The file with the key of the nodes, the same on all of them; by default what AEXEC_NODE_KEY or
            AEXEC_NODE_KEY_FILE says.
        host_ip: Address of this node by which the others reach it; by default what AEXEC_HOST_IP says, else that of
            --interface, else the one from which this node reaches node 0.
        interface: Network interface that has that address, as in eth1.
        join_timeout: Seconds to wait for node 0.
        node_timeout: Seconds without a sign of life after which node 0 counts as lost.
        make_key: Write a new key to this file, readable by you alone, and do nothing else.
    """

    nnodes: int | None = None
    node_rank: int | None = None
    master_addr: str | None = None
    master_port: int = 29501
    key_file: Annotated[Path | None, Parameter(show_default=False)] = None
    host_ip: str | None = None
    interface: str | None = None
    join_timeout: float = 600.0
    node_timeout: float = 3.0
    make_key: Annotated[Path | None, Parameter(show_default=False)] = None

    def checked(self) -> JoinOptions:
        """Return them as joining takes them.

        Raises:
            ConfigError: One is missing, or means nothing.
        """
        given = {"--nnodes": self.nnodes, "--node-rank": self.node_rank, "--master-addr": self.master_addr}
        missing = [name for name, value in given.items() if value is None]
        if missing or self.nnodes is None or self.node_rank is None or self.master_addr is None:
            raise ConfigError(
                f"{', '.join(missing)} missing: as in `aexec worker --nnodes 2 --node-rank 1 --master-addr 10.0.0.5 "
                "--key-file nodes.key`; node 0 is where the executor is opened"
            )
        if not 0 < self.node_rank < self.nnodes:
            raise ConfigError(
                f"--node-rank is {self.node_rank} and --nnodes is {self.nnodes}: expected 1 to nnodes - 1; node 0 runs "
                "the program that opens the executor, with nnodes in its ExecutorConfig"
            )
        if not 0 < self.master_port < 1 << 16:
            raise ConfigError(f"--master-port is {self.master_port}: expected the port that node 0 says it listens on")
        if self.master_addr in _WILDCARDS:
            raise ConfigError(
                f"--master-addr is {self.master_addr!r}, which is every address of a machine: expected the one of node 0 "
                "that this node reaches"
            )
        for name, value in (("--join-timeout", self.join_timeout), ("--node-timeout", self.node_timeout)):
            if not 0 < value < float("inf"):
                raise ConfigError(f"{name} is {value:g}: expected a positive number of seconds")
        return JoinOptions(
            nnodes=self.nnodes,
            node_rank=self.node_rank,
            leader=self.master_addr,
            port=self.master_port,
            address=_own("--host-ip", self.host_ip)
            or _own(environ.HOST_IP.name, environ.HOST_IP.read())
            or self._address_of_interface(),
            timeout=self.join_timeout,
            node_timeout=self.node_timeout,
        )

    def _address_of_interface(self) -> str | None:
        if self.interface is None:
            return None
        found = address_of(self.interface)
        if found is None:
            have = ", ".join(name for _, name in socket.if_nameindex())
            raise ConfigError(f"--interface is {self.interface!r}, which has no address here: expected one of {have}")
        return found


def _own(name: str, address: str | None) -> str | None:
    if address and interface_of(address) is None:
        raise ConfigError(
            f"{name} is {address!r}, which is no address of this machine: expected one by which the other nodes reach it"
        )
    return address


def make_key(path: Path) -> int:
    """Write a new key, and say what to do with it."""
    NodeKey.make(path)
    say(f"wrote a new key to {path}: copy it to each node, readable by its owner alone (chmod 600)")
    return 0


async def serve(wanted: JoinOptions, key: NodeKey) -> int:
    """Take part until the executor is closed; the exit code."""
    with Interrupts() as interrupts:
        joined = await interrupts.unless(join_leader(wanted, key, say))
        if joined is None:
            say(f"{interrupts.name}: ended before the leader was there")
            return interrupts.exit_code
        welcome = joined.welcome
        say(
            f"joined the leader at {wanted.where} ({welcome.host}, pid {welcome.pid}): {welcome.world_size} ranks on "
            f"{wanted.nnodes} nodes"
        )
        return await work(joined, wanted.where, interrupts)


async def work(joined: Joined, leader: str, interrupts: Interrupts) -> int:
    """Be the agent of a node that has joined; the exit code.

    Raises:
        LeaderLost: It is gone.
    """
    limits = ExecutorConfig()
    async with ActorSystem(name=f"node-{joined.place.node_rank}") as system:
        agent = await system.spawn(NodeAgent, joined.link, joined.place, leader, say)
        why = await interrupts.unless(agent.ask(WaitForEnd(), timeout=None))
        if why is not None:
            say(f"{why}: this node is done")
            return 0
        say(f"{interrupts.name}: ending the workers of this node (once more: at once)")
        limit = limits.close_grace + limits.term_grace + limits.kill_grace + _SLACK
        await agent.ask(EndNode(interrupts.name, limits.close_grace), timeout=limit)
    return interrupts.exit_code


def say(text: str) -> None:
    """Print a line of progress, to standard error as all that is not the result; where nobody reads it, work goes on."""
    with contextlib.suppress(OSError, ValueError):  # its reader has ended, its disk is full, or it is closed
        print(f"aexec worker: {text}", file=sys.stderr, flush=True)


def run(options: WorkerOptions) -> int:
    """Make a key, or take part; the exit code."""
    if options.make_key is not None:
        return make_key(options.make_key)
    wanted = options.checked()
    return asyncio.run(serve(wanted, NodeKey.find(options.key_file)))
