"""Ranks of a launcher in one process, each with real lines to the others, and what they were told."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from aexec.errors import RanksDiverged, WorkerDied
from aexec.executor.external.peers import Answer, Peers
from aexec.messages.base import Message
from aexec.messages.control import CallMethod, Hello
from aexec.parallel.layout import RankLayout

PATIENCE = 20.0  # seconds: a bound, never a wait


class MemoryStore:
    """A store for ranks of one process.

    Args:
        remote_only: Ranks do not hear of the socket that they could reach on one node.
    """

    problem = ""

    def __init__(self, *, remote_only: bool = False) -> None:
        self._remote_only = remote_only
        self.values: dict[str, bytes] = {}
        self._changed = asyncio.Event()

    async def tell(self, key: str, value: bytes, timeout: float) -> None:
        secret, _, remote = msgspec.msgpack.decode(value)
        if self._remote_only:
            value = msgspec.msgpack.encode((secret, "", remote))
        self.values[key] = value
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def learn(self, key: str, timeout: float) -> bytes:
        async with asyncio.timeout(timeout):
            while key not in self.values:
                await self._changed.wait()
        return self.values[key]

    def close(self) -> None:
        """Nothing is held."""


@dataclass(frozen=True)
class Place:
    rank: int
    world_size: int


@dataclass
class Sink:
    """Keeps what it was told; ``told`` wakes whoever waits for that."""

    replies: dict[int, dict[int, Any]] = field(default_factory=dict)
    failures: dict[int, dict[int, BaseException]] = field(default_factory=dict)
    deaths: list[tuple[WorkerDied, bool]] = field(default_factory=list)
    divergence: list[RanksDiverged] = field(default_factory=list)
    answers: dict[int, tuple[int, Any]] = field(default_factory=dict)
    refusals: dict[int, tuple[int, BaseException]] = field(default_factory=dict)
    answer: Callable[[int, Any, Answer], None] = lambda source, message, answer: answer.resolve((source, message))
    told: asyncio.Event = field(default_factory=asyncio.Event)

    def replied(self, seq: int, rank: int, value: Any) -> None:
        assert rank not in self.replies.setdefault(seq, {}), "told twice"
        self.replies[seq][rank] = value
        self._tell()

    def failed(self, seq: int, rank: int, error: BaseException) -> None:
        self.failures.setdefault(seq, {})[rank] = error
        self._tell()

    def died(self, error: WorkerDied, *, here: bool) -> None:
        self.deaths.append((error, here))
        self._tell()

    def diverged(self, error: RanksDiverged) -> None:
        self.divergence.append(error)
        self._tell()

    def asked(self, source: int, message: Message[Any], answer: Answer) -> None:
        self.answer(source, message, answer)

    def answered(self, call: int, rank: int, value: Any) -> None:
        self.answers[call] = (rank, value)
        self._tell()

    def refused(self, call: int, rank: int, error: BaseException) -> None:
        self.refusals[call] = (rank, error)
        self._tell()

    async def until(self, condition: Callable[[Sink], Any]) -> Any:
        async with asyncio.timeout(PATIENCE):
            while not (found := condition(self)):
                self.told.clear()
                await self.told.wait()
        return found

    async def all_of(self, seq: int, ranks: int) -> dict[int, Any]:
        return await self.until(lambda sink: len(sink.replies.get(seq, {})) == ranks and sink.replies[seq])

    def _tell(self) -> None:
        self.told.set()


def hello_of(rank: int) -> Hello:
    return Hello(rank=rank, pid=1000 + rank, node="here", worker="W", methods={"add": False})


def call(method: str = "add", *args: Any, number: int = 0, **kwargs: Any) -> CallMethod:
    return CallMethod(call=number, method=method, args=args, kwargs=kwargs)


class RankWorld:
    """Some ranks, met."""

    def __init__(self, layout: RankLayout, *, remote_only: bool = False, **options: Any) -> None:
        self.layout = layout
        self.store = MemoryStore(remote_only=remote_only)
        if remote_only:
            options = {"host": "127.0.0.1", **options}
        self.sinks = [Sink() for _ in range(layout.size)]
        options = {"timeout": PATIENCE, **options}
        self.peers = [
            Peers(Place(rank, layout.size), layout, sink, store=self.store, **options)
            for rank, sink in enumerate(self.sinks)
        ]

    async def connect(self) -> list[list[Any]]:
        return await asyncio.gather(*(one.connect(f"card {rank}") for rank, one in enumerate(self.peers)))

    async def open(self) -> None:
        await self.connect()
        size = self.layout.replica_size
        await asyncio.gather(*(one.open(hello_of(rank % size)) for rank, one in enumerate(self.peers)))

    async def close(self, grace: float = PATIENCE) -> None:
        await asyncio.gather(*(one.close(grace) for one in self.peers))

    def cut(self, rank: int) -> None:
        """End this rank's lines as the kernel does for a process that is killed."""
        one = self.peers[rank]
        for line in one._standing._lines():
            for channel in (line.work, line.control):
                channel._link.sock.shutdown(2)


@contextlib.asynccontextmanager
async def ranks(tensor: int = 2, pipeline: int = 1, data: int = 1, **options: Any) -> AsyncIterator[RankWorld]:
    """Ranks that have met and whose workers are there; closed at the end."""
    world = RankWorld(RankLayout(tensor, pipeline, data), **options)
    try:
        await world.open()
        yield world
    finally:
        await world.close()


def everybody(world: RankWorld, message: CallMethod, answering: Sequence[int] | None = None) -> int:
    """Each rank makes the same call; its number."""
    answering = range(world.layout.replica_size) if answering is None else answering
    (seq,) = {one.called(message, answering) for one in world.peers}
    return seq
