"""How a node comes to take part: what it says of itself, and what the leader thinks of that.

Both ends are here, for they have to agree. Nothing of it is pickled: see ``messages.nodes``.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import os
import platform
import socket
import sys
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import NamedTuple

from aexec import environ
from aexec.errors import AexecError, ConfigError, NodeRefused, ProtocolError
from aexec.executor.lines.environment import visible_devices
from aexec.executor.multiproc.nodes.agent import NodeLink
from aexec.executor.multiproc.nodes.hosted import NodePlace
from aexec.executor.multiproc.recipe import installed_devices
from aexec.messages.nodes import WIRE_VERSION, Join, Refused, Welcome, packed, unpacked
from aexec.transport.curve import NodeKey, dial_leader

__all__ = (
    "JoinOptions",
    "Joined",
    "address_towards",
    "join_leader",
    "join_of",
    "objection",
    "read_answer",
    "this_host",
    "worker_command",
)


class Joined(NamedTuple):
    """This node takes part.

    Attributes:
        link: The line to the leader.
        welcome: What it has said.
        place: Which node this is.
    """

    link: NodeLink
    welcome: Welcome
    place: NodePlace


_PAUSE = 0.5  # seconds before it is looked again for a way to the leader
_VERSION = importlib.metadata.version("aexec")  # reads a file, and so not on a loop


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinOptions:
    """What a node is told on its command line.

    Attributes:
        nnodes: How many nodes there are, the leader's among them.
        node_rank: Which one this is, from 1.
        leader: Address of node 0.
        port: Where it listens.
        address: Of this node; None: the one from which the leader is reached.
        timeout: Seconds to wait for the leader.
        node_timeout: Seconds without a sign of life after which the leader is lost.
    """

    nnodes: int
    node_rank: int
    leader: str
    port: int
    address: str | None = None
    timeout: float = 600.0
    node_timeout: float = 3.0

    @property
    def where(self) -> str:
        """The leader's place, for people."""
        return f"[{self.leader}]:{self.port}" if ":" in self.leader else f"{self.leader}:{self.port}"


async def join_leader(options: JoinOptions, key: NodeKey, told: Callable[[str], None]) -> Joined:
    """Come to the leader, wait for it where it is not there yet, and be let in.

    Args:
        options: Which node this is, and where the leader is.
        key: Of all nodes.
        told: Told in words what happens.

    Raises:
        LeaderNotFound: Nobody answers.
        NodeRefused: The leader does not let this node take part.
        LinkRefused: It does not let this address in, or has another key.
        ConfigError: There is no way to it.
    """
    loop = asyncio.get_running_loop()
    until = loop.time() + options.timeout
    address = options.address or await _address_in_time(options, until, told)
    place = NodePlace(options.node_rank, options.nnodes, this_host(), address)
    where = options.where
    told(f"{place} is waiting for the leader at {where}, {options.timeout:g} s at most")
    answer, link = await dial_leader(
        options.leader,
        options.port,
        key,
        packed(join_of(place)),
        timeout=max(until - loop.time(), 0.0),
        node_timeout=options.node_timeout,
        told=told,
        source=options.address,
        name=f"to the leader at {where}",
    )
    try:
        return Joined(link, read_answer(answer, place, where), place)
    except AexecError:
        link.close()
        await link.closed()
        raise


def join_of(place: NodePlace) -> Join:
    """What this node says of itself."""
    return Join(
        wire=WIRE_VERSION,
        aexec=_version(),
        python=_python(),
        node_rank=place.node_rank,
        nnodes=place.nnodes,
        host=place.host,
        address=place.address,
        pid=os.getpid(),
        devices=visible_devices(environ.inherited(), installed_devices()),
        cpus=len(os.sched_getaffinity(0)),
    )


def objection(join: Join, *, nnodes: int, taken: Collection[int]) -> str:
    """Why the leader does not let a node take part, with the remedy; empty: it does. Pure but for what the leader is.

    Args:
        join: What the node says.
        nnodes: How many the leader expects, itself among them.
        taken: Numbers of nodes that are there.
    """
    who = f"node {join.node_rank} on {join.host} ({join.address}, pid {join.pid})"
    if join.wire != WIRE_VERSION or join.aexec != _version():
        return (
            f"{who} has aexec {join.aexec} (wire {join.wire}), the leader has {_version()} (wire {WIRE_VERSION}): "
            "install the same version on all nodes"
        )
    if join.python != _python():
        return f"{who} runs Python {join.python} and the leader {_python()}: take the same on all nodes"
    if join.nnodes != nnodes:
        return f"{who} was told --nnodes {join.nnodes}, and the leader has nnodes={nnodes}: say the same on all nodes"
    if not 1 <= join.node_rank < nnodes:
        return f"{who} has --node-rank {join.node_rank}: expected 1 to {nnodes - 1}, for node 0 is the leader"
    if join.node_rank in taken:
        return f"{who} comes second: there is a node {join.node_rank} already; give each node a --node-rank of its own"
    return ""


def read_answer(answer: bytes, place: NodePlace, leader: str) -> Welcome:
    """What the leader has said to a join.

    Raises:
        NodeRefused: It says no.
        ProtocolError: It says something else.
    """
    said = unpacked(answer)
    if isinstance(said, Refused):
        raise NodeRefused(place.node_rank, leader, said.why)
    if isinstance(said, Join):
        raise ProtocolError(f"whoever answers at {leader} is no leader: it wants to join, too")
    return said


async def _address_in_time(options: JoinOptions, until: float, told: Callable[[str], None]) -> str:
    """As ``address_towards``, once there is a way: a name may be known, and a network be up, only when the leader is."""
    loop, said = asyncio.get_running_loop(), ""
    while True:
        try:
            return await address_towards(options.leader, options.port)
        except ConfigError as error:
            if loop.time() + _PAUSE > until:
                raise
            if said != str(error):
                said = str(error)
                told(f"{said}. It is tried again, {options.timeout:g} s at most")
        await asyncio.sleep(_PAUSE)


async def address_towards(host: str, port: int) -> str:
    """The address of this node from which it reaches another one; nothing is sent for it.

    Raises:
        ConfigError: There is no such name, or no way to it.
    """
    loop = asyncio.get_running_loop()
    try:
        found = await loop.getaddrinfo(host, port or 1, type=socket.SOCK_DGRAM)
        family, kind, protocol, _, address = found[0]
        with socket.socket(family, kind, protocol) as sock:
            sock.setblocking(False)
            sock.connect(address)
            return str(sock.getsockname()[0])
    except OSError as error:
        raise ConfigError(
            f"--master-addr is {host!r}, and this node has no way there: {error}. Give the address of node 0 that "
            "this node reaches"
        ) from error


def worker_command(*, nnodes: int, node_rank: int | str, address: str, port: int, key_file: str | None) -> str:
    """What is to be started on another node, for people."""
    key = f" --key-file {key_file}" if key_file else ""
    return f"aexec worker --nnodes {nnodes} --node-rank {node_rank} --master-addr {address} --master-port {port}{key}"


def this_host() -> str:
    """The name of this node, for people."""
    return platform.node() or "?"


def _version() -> str:
    return _VERSION


def _python() -> str:
    return f"{sys.version_info.major}.{sys.version_info.minor}"
