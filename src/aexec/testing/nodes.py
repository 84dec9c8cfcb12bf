"""Several nodes on one machine: each other node's agent lives in this process, at a loopback address of its own."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import os
import secrets
import tempfile
from collections.abc import AsyncGenerator, Callable
from pathlib import Path

from aexec.actor import ActorSystem, Ref
from aexec.config import ExecutorConfig
from aexec.errors import AexecError
from aexec.executor.base import Executor
from aexec.executor.handle import start_executor
from aexec.executor.multiproc.nodes.agent import EndNode, NodeAgent, WaitForEnd
from aexec.executor.multiproc.nodes.group import NodesGroup
from aexec.executor.multiproc.nodes.join import JoinOptions, join_leader
from aexec.transport.curve import NodeKey

__all__ = ("LoopbackNode", "loopback_address", "open_on_nodes")

_JOIN = 30.0  # seconds for a leader to be there
_END = 10.0
_numbers = itertools.count(1)


def loopback_address() -> str:
    """One that nobody else uses, as far as chance goes: all of 127/8 is this machine."""
    random = secrets.token_bytes(2)
    return f"127.{1 + random[0] % 200}.{random[1]}.{2 + next(_numbers) % 250}"


class LoopbackNode:
    """An agent of this process, with a system of its own.

    Args:
        options: Which node it is, and where its leader is.
        key: Of all nodes.

    Attributes:
        said: What it has told whoever watches it.
        end: How it ended: in words, or with an error.
    """

    def __init__(self, options: JoinOptions, key: NodeKey) -> None:
        self.options, self._key = options, key
        self.said: list[str] = []
        self.end: str | AexecError | None = None
        self._task: asyncio.Task[None] | None = None
        self._agent: Ref[NodeAgent] | None = None

    def __repr__(self) -> str:
        return f"<LoopbackNode {self.options.node_rank} at {self.options.address}: {self.end or 'alive'}>"

    def again(self) -> LoopbackNode:
        """The same node, as when its agent is started once more."""
        return LoopbackNode(self.options, self._key)

    def start(self) -> None:
        """Begin to look for the leader."""
        self._task = asyncio.ensure_future(self._serve())

    async def leave(self, why: str = "SIGTERM") -> None:
        """As when it is told on its own node to end."""
        if self._agent is not None:
            await self._agent.ask(EndNode(why, 1.0), timeout=_END)

    async def ended_by_itself(self) -> None:
        """Wait for its end, which comes without help."""
        if self._task is not None:
            await asyncio.wait_for(self._task, _END)

    async def ended(self) -> None:
        """Wait for its end; a dismissed one needs no help. One that finds no leader is cancelled."""
        if self._task is None:
            return
        if self._agent is None:
            self._task.cancel()
        await asyncio.wait([self._task], timeout=_END)
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task

    async def _serve(self) -> None:
        name = f"node-{self.options.node_rank}"
        try:
            joined = await join_leader(self.options, self._key, self.said.append)
            async with ActorSystem(name=name) as system:
                self._agent = await system.spawn(
                    NodeAgent, joined.link, joined.place, self.options.where, self.said.append
                )
                self.end = await self._agent.ask(WaitForEnd(), timeout=None)
        except AexecError as error:
            self.end = error


@contextlib.asynccontextmanager
async def open_on_nodes(
    config: ExecutorConfig, *, told: Callable[[list[LoopbackNode]], None] | None = None
) -> AsyncGenerator[Executor]:
    """An executor over ``config.nnodes`` nodes, which are all here.

    Args:
        config: Its settings; addresses and key are filled in.
        told: Given the agents of nodes 1, 2, ... before anything starts.
    """
    with tempfile.TemporaryDirectory(prefix="loopback-nodes-") as folder:
        key = await asyncio.to_thread(NodeKey.make, Path(folder) / "key")
        leader = loopback_address()
        config = dataclasses.replace(config, master_addr=leader, node_key_file=os.fspath(Path(folder) / "key"))
        nodes = [
            LoopbackNode(
                JoinOptions(
                    nnodes=config.nnodes,
                    node_rank=number,
                    leader=leader,
                    port=config.master_port,
                    address=loopback_address(),
                    timeout=_JOIN,
                    node_timeout=config.node_timeout,
                ),
                key,
            )
            for number in range(1, config.nnodes)
        ]
        if told is not None:
            told(nodes)
        for node in nodes:
            node.start()
        try:
            executor = await start_executor(config, NodesGroup, None)
            try:
                yield executor
            finally:
                await executor.close()
        finally:
            await asyncio.gather(*(node.ended() for node in nodes))
