"""How a hub reaches ranks: its own, and one that reads nothing."""

from __future__ import annotations

import asyncio

import pytest

from aexec.executor.external.seats import LineSeat, LocalSeat
from aexec.executor.external.wire import PeerLine
from aexec.messages.peers import Farewell
from aexec.transport import Kind, Writer, seqpacket_pair

pytestmark = pytest.mark.anyio


async def test_the_own_rank_hears_on_a_later_turn_in_order():
    """Nobody is called back from within a call."""
    heard, done = [], asyncio.Event()
    seat = LocalSeat(0, 1, lambda *what: (heard.append(what), done.set() if len(heard) == 3 else None))
    seat.send(Kind.REPLY, 7, "a")
    seat.tell("b")
    seat.beside("c")
    assert heard == []
    await done.wait()
    assert heard == [(Kind.REPLY, 7, "a"), (Kind.EVENT, 0, "b"), (Kind.EVENT, 0, "c")]


async def test_who_fails_on_one_message_hears_the_next():
    """What comes after it is about other calls."""
    heard, done = [], asyncio.Event()

    def hear(_kind, _call, value):
        heard.append(value)
        if value == "bad":
            raise ValueError(value)
        done.set()

    failures = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: failures.append(context["exception"]))
    seat = LocalSeat(0, 1, hear)
    seat.tell("bad")
    seat.tell("good")
    await done.wait()
    assert heard == ["bad", "good"]
    assert [str(error) for error in failures] == ["bad"]


async def test_a_rank_that_reads_nothing_loses_its_line():
    """What it would miss says that it must not go on; its questions are merely not answered."""
    work, control = seqpacket_pair(), seqpacket_pair()
    writer = Writer()
    line = PeerLine(1, work[0], control[0], writer, lambda *_: None, lambda *_: None, 3.0)
    line.open()
    seat = LineSeat(1, line, 0)
    try:
        for _ in range(20_000):
            seat.beside(Farewell())
        assert line.is_open
        for _ in range(20_000):
            seat.tell(Farewell())
        assert not line.is_open
        seat.tell(Farewell())
    finally:
        line.close()
        writer.close()
        for other in (work[1], control[1]):
            other.close()
