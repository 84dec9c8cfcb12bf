"""What ranks ask each other's loops, outside of the calls: sent through the hub, and answered at any time."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

import anyio

from aexec.errors import AexecError
from aexec.executor.external.hub import HUB
from aexec.executor.external.once import Once
from aexec.executor.external.sink import PeerSink, Reply
from aexec.executor.external.standing import Standing
from aexec.messages.base import Message
from aexec.messages.peers import Answered, Asked, Whereabouts

__all__ = ("Questions",)


class Questions:
    """Those of one rank, and those to it.

    Args:
        rank: Of the replica.
        standing: Its way to the others.
        sink: Where to report.

    Attributes:
        num_open: Questions of this rank's that have no answer.
    """

    def __init__(self, rank: int, standing: Standing, sink: PeerSink) -> None:
        self._rank, self._standing, self._sink = rank, standing, sink
        self.num_open = 0
        self._is_over = False
        self._to_hub: dict[int, Once[Any]] = {}
        self._numbers = itertools.count(-1, -1)  # callers' own are not negative

    def __repr__(self) -> str:
        return f"<Questions of rank {self._rank}: {self.num_open} open>"

    def ask(self, rank: int, call: int, message: Message[Any]) -> None:
        """See ``Peers.ask``."""
        self.num_open += 1
        asked = Asked(self._rank, rank, call, message)
        if rank == self._rank:
            asyncio.get_running_loop().call_soon(self.heard, asked)
        else:
            self._standing.beside(asked)

    async def whereabouts(self, timeout: float) -> dict[int, str]:
        """See ``Peers.whereabouts``."""
        number = next(self._numbers)
        answer = self._to_hub[number] = Once[Any]()
        found: dict[int, str] = {}
        try:
            self._standing.say(Asked(self._rank, HUB, number, Whereabouts()))  # behind this rank's own calls
            with anyio.move_on_after(timeout):
                found = await answer.get()
        finally:
            del self._to_hub[number]
        return found

    def heard(self, message: Asked) -> None:
        """A rank asks this one."""
        if not self._is_over:
            self._sink.asked(message.source, message.message, Reply(message, self._answer))

    def answered(self, message: Answered) -> None:
        """An answer has come."""
        if message.call < 0:
            if message.call in self._to_hub:
                self._to_hub[message.call].set(message.value)
            return
        self.num_open -= 1
        if self._is_over:
            return
        if message.error is None:
            self._sink.answered(message.call, message.source, message.value)
        else:
            self._sink.refused(message.call, message.source, message.error)

    def end(self) -> None:
        """Nobody is told anything any more; who waits for the hub gets nothing."""
        self._is_over = True
        for answer in self._to_hub.values():
            answer.set({})

    def _answer(self, answered: Answered) -> None:
        if answered.target == self._rank:
            asyncio.get_running_loop().call_soon(self.answered, answered)
            return
        try:
            self._standing.beside(answered)
        except AexecError as error:  # it cannot travel
            self._standing.beside(Answered(answered.source, answered.target, answered.call, error=error))
