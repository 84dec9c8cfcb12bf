"""The nodes that have joined, and the door by which they come: kept from generation to generation.

A line that breaks is the end of its node; whoever runs its agent starts it again, and then it
joins again.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import platform
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from aexec.config import ExecutorConfig
from aexec.errors import AexecError, ChannelClosed, ConfigError, ProtocolError
from aexec.executor.multiproc.nodes.address import LeaderPlace, leader_place
from aexec.executor.multiproc.nodes.join import objection, worker_command
from aexec.executor.multiproc.nodes.ports import owner_of_port
from aexec.messages.nodes import Dismissed, Join, Leaving, Refused, Welcome, packed, unpacked
from aexec.observe import get_logger
from aexec.transport import Frame, Kind, Writer
from aexec.transport.curve import CurveListener, NodeKey, NodeLink

__all__ = ("JoinedNode", "NodeEvents", "Roster")

_FAREWELL = 1.0  # seconds for the last words to be on their way


class NodeEvents(Protocol):
    """Told of what a node says, on the loop."""

    def heard(self, frame: Frame) -> None:
        """It says something about its ranks."""
        ...

    def lost(self, why: str) -> None:
        """It will not say anything any longer."""
        ...


class JoinedNode:
    """A node that takes part.

    Attributes:
        join: What it says of itself.
        link: The line to it.
        events: Whoever has its ranks now.
    """

    def __init__(self, join: Join, link: NodeLink, on_end: Callable[[JoinedNode, str], None]) -> None:
        self.join, self.link = join, link
        self.events: NodeEvents | None = None
        self._on_end = on_end
        self._last_words = ""
        self._is_over = False

    def __repr__(self) -> str:
        return f"<JoinedNode {self}: {'lost' if self._is_over else 'here'}>"

    def __str__(self) -> str:
        return f"node {self.name}"

    @property
    def name(self) -> str:
        """What tells it from the others, whose hosts may have the same name; for people, behind the word "node"."""
        return f"{self.join.node_rank} ({self.join.host}, {self.join.address})"

    def open(self) -> None:
        """Listen to it."""
        self.link.open(self._heard, self._gone)

    def lose(self, why: str) -> None:
        """Give it up: nothing is said to it any longer, and so it ends its workers."""
        self.link.close()
        self._end(why)

    def _heard(self, frame: Frame) -> None:
        if isinstance(frame.value, Leaving):
            self._last_words = f"its agent was told to end there ({frame.value.why})"
            self.lose(self._last_words)
        elif self.events is not None:
            self.events.heard(frame)

    def _gone(self, closed: ChannelClosed) -> None:
        self._end(self._last_words or closed.reason)

    def _end(self, why: str) -> None:
        if self._is_over:
            return
        self._is_over = True
        self._on_end(self, why)
        events, self.events = self.events, None
        if events is not None:
            events.lost(why)


class Roster:
    """The other nodes of an executor.

    Args:
        config: Its settings.
        key: The key that all nodes have.

    Attributes:
        place: Where the leader is.
        nodes: Those that are here, by node rank.
        failure: What has gone wrong in this generation for good; empty: nothing.
    """

    def __init__(self, config: ExecutorConfig, key: NodeKey) -> None:
        self._config, self._key = config, key
        self.place = LeaderPlace("", "")
        self.nodes: dict[int, JoinedNode] = {}
        self.failure = ""
        self._listener: CurveListener | None = None
        self._news = asyncio.Event()

    def __repr__(self) -> str:
        return f"<Roster: {len(self.nodes)} of {self._config.nnodes - 1} other nodes, {self._listener!r}>"

    @property
    def port(self) -> int:
        """Where it listens."""
        return int(self._listener.address[1]) if self._listener else self._config.master_port

    @property
    def missing(self) -> list[int]:
        """The nodes that are not here."""
        return [node for node in range(1, self._config.nnodes) if node not in self.nodes]

    def command(self, node_rank: int | str) -> str:
        """What is to be run on a node for it to join."""
        return worker_command(
            nnodes=self._config.nnodes,
            node_rank=node_rank,
            address=self.place.listen or self._config.master_addr,
            port=self.port,
            key_file=self._config.node_key_file,
        )

    async def open(self) -> None:
        """Listen for nodes, from now on and until :meth:`close`.

        Raises:
            ConfigError: The address is none of this machine's, or its port is taken.
        """
        if self._listener is not None:
            return
        config, place = self._config, await asyncio.to_thread(leader_place, self._config)
        listener = CurveListener(
            place.listen,
            config.master_port,
            self._key,
            self._hello,
            self._joined,
            allow=tuple(config.node_allow),
            node_timeout=config.node_timeout,
            writer=Writer(int(config.arena_bytes)),
        )
        try:
            listener.open()
        except OSError as error:
            raise await asyncio.to_thread(_no_place, place.listen, config.master_port, error) from error
        self.place, self._listener = place, listener

    async def changed(self) -> None:
        """Wait for a node to come, or to go."""
        self._news.clear()
        await self._news.wait()

    def statistics(self) -> Mapping[str, Any]:
        """What has happened at the door."""
        return {} if self._listener is None else {"listener": self._listener.statistics()}

    async def close(self) -> None:
        """Dismiss all nodes, and listen no longer; twice is once."""
        listener, self._listener = self._listener, None
        nodes, self.nodes = list(self.nodes.values()), {}
        last = Dismissed(self.failure or "the executor is closed", orderly=not self.failure)
        for node in nodes:
            node.events = None
            with contextlib.suppress(AexecError):
                node.link.send(Kind.EVENT, 0, last)
        await asyncio.gather(*(_say_farewell(node.link) for node in nodes))
        if listener is not None:
            await listener.aclose()

    def _hello(self, address: str, hello: bytes) -> tuple[bool, bytes]:
        """Whether a node takes part, and what it is told."""
        try:
            join = unpacked(hello)
        except ProtocolError as error:
            return False, packed(Refused(why=str(error)))
        if not isinstance(join, Join):
            return False, packed(Refused(why="a leader has dialled a leader: start `aexec worker` on the other nodes"))
        why = objection(join, nnodes=self._config.nnodes, taken=self.nodes.keys())
        if why:
            get_logger("aexec.executor").warning("a node was refused", address=address, why=why)
            return False, packed(Refused(why=why))
        return True, packed(
            Welcome(
                host=platform.node(),
                pid=os.getpid(),
                world_size=self._config.parallel.world_size,
                node_timeout=self._config.node_timeout,
            )
        )

    def _joined(self, link: NodeLink, hello: bytes) -> None:
        join = unpacked(hello)
        assert isinstance(join, Join), "it was accepted"
        node = self.nodes[join.node_rank] = JoinedNode(join, link, self._left)
        link.name = f"node {join.node_rank}"
        node.open()
        get_logger("aexec.executor").info("a node has joined", node=str(node), pid=join.pid)
        self._news.set()

    def _left(self, node: JoinedNode, why: str) -> None:
        if self.nodes.get(node.join.node_rank) is node:
            del self.nodes[node.join.node_rank]
            get_logger("aexec.executor").warning("a node is lost", node=str(node), why=why)
        self._news.set()


async def _say_farewell(link: NodeLink) -> None:
    with contextlib.suppress(TimeoutError, ChannelClosed):
        await link.flushed(_FAREWELL)
    link.close()


def _no_place(host: str, port: int, error: OSError) -> ConfigError:
    if error.errno != errno.EADDRINUSE:
        return ConfigError(f"the executor cannot listen for nodes at {host}, port {port}: {error.strerror or error}")
    owner = owner_of_port(port)
    by = f" by {owner}" if owner else ""
    return ConfigError(
        f"master_port {port} of {host} is taken{by}: take another one on all nodes, or 0 for one that is free"
    )
