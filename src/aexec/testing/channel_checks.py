"""What a line has to do, whatever it is made of.

::

    await check_channel(seqpacket_pair)

A new kind of line is done when this passes. Each check opens a pair of its own, with a
:class:`LoopChannel` at either end, on the running loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import inspect
import os
import socket
import threading
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any

import numpy as np

from aexec.errors import ArenaFull, ChannelClosed, ChannelFull, MessageNotPortable
from aexec.testing.expect import PATIENCE, equal, eventually, holds, raising
from aexec.transport import Frame, Kind, LoopChannel, Writer
from aexec.transport.links import Link

__all__ = ("CHANNEL_CHECKS", "MakePair", "check_channel")

Ends = tuple[socket.socket | Link, socket.socket | Link]
MakePair = Callable[[], Ends | Awaitable[Ends]]

MIB = 1 << 20


class Side:
    """One end, with what came to it."""

    def __init__(self, end: socket.socket | Link, name: str, *, limit: int, queue: int) -> None:
        self.frames: list[Frame] = []
        self.gone: list[ChannelClosed] = []
        self.writer = Writer(limit, setting="the check's limit")
        self.channel = LoopChannel(end, self.writer, self.frames.append, self.gone.append, name=name, queue=queue)
        self.channel.open()

    async def next(self) -> Frame:
        """The next frame."""
        await eventually(self._has_some, "a frame arrives")
        return self.frames.pop(0)

    async def _has_some(self) -> bool:
        return bool(self.frames)

    def close(self) -> None:
        """End it."""
        self.channel.close()
        self.writer.close()


@contextlib.asynccontextmanager
async def _sides(make: MakePair, *, limit: int = 64 * MIB, queue: int = 4096) -> AsyncGenerator[tuple[Side, Side]]:
    ends = make()
    left, right = await ends if inspect.isawaitable(ends) else ends
    sides = Side(left, "left", limit=limit, queue=queue), Side(right, "right", limit=limit, queue=queue)
    try:
        yield sides
    finally:
        for side in sides:
            side.frames.clear()
            side.close()


async def values_arrive_as_they_were_sent(make: MakePair) -> None:
    """Equal, of the same type, in both directions, small and large."""
    values: list[Any] = [
        None,
        0,
        "text",
        b"",
        (1, [2.5, {"three": {4}}]),
        b"x" * 20_000,
        "y" * 300_000,
        [b"z" * 70_000] * 3,
    ]
    async with _sides(make) as (left, right):
        for value in values:
            left.channel.send(Kind.MESSAGE, 7, value)
            frame = await right.next()
            equal((frame.kind, frame.call), (Kind.MESSAGE, 7), "what it is, and whose")
            holds(type(frame.value) is type(value), "of the same type")
            equal(frame.value, value, "an equal value")
            right.channel.send(Kind.REPLY, 7, frame.value)
            equal((await left.next()).value, value, "and back")


async def arrays_arrive_bit_by_bit(make: MakePair) -> None:
    """Of any size, shape and order."""
    whole = np.random.default_rng(1).standard_normal((300, 700))
    arrays: list[Any] = [whole, whole.T, whole[::3, ::2], whole[:0], np.float32(3), whole.astype(np.int8), np.zeros(())]
    async with _sides(make) as (left, right):
        left.channel.send(Kind.MESSAGE, 1, arrays)
        for sent, got in zip(arrays, (await right.next()).value, strict=True):
            equal((got.dtype, got.shape, got.tobytes()), (sent.dtype, sent.shape, sent.tobytes()), "the same array")


async def what_is_received_is_the_receivers(make: MakePair) -> None:
    """It may be written to, kept as long as one likes, and nothing that follows changes it."""
    async with _sides(make) as (left, right):
        array = np.zeros(100_000, np.uint8)
        left.channel.send(Kind.MESSAGE, 1, array)
        kept = (await right.next()).value[5:50]
        kept[0] = 9
        equal(array[5], 0, "the sender's is its own")
        for value in range(1, 5):
            left.channel.send(Kind.MESSAGE, 2, np.full(100_000, value, np.uint8))
            frame = await right.next()
            equal(set(frame.value.tolist()), {value}, "a later message is seen as it was sent")
        equal(kept.tolist(), [9] + [0] * 44, "a view of an earlier message is what it was")


async def what_was_sent_may_be_changed(make: MakePair) -> None:
    """By whoever has sent it, at once, also while it waits for a peer that does not read; up to 4 MB of it."""
    async with _sides(make) as (left, right):
        array = np.zeros(MIB, np.uint8)
        for call in range(40):
            array[:] = call
            left.channel.send(Kind.MESSAGE, call, array)
        array[:] = 99
        for call in range(40):
            holds(((await right.next()).value == call).all(), "it arrives as it was when it was sent")


async def memory_comes_back(make: MakePair) -> None:
    """As soon as nothing of a message is in use, and not before."""
    async with _sides(make) as (left, right):
        for _ in range(20):  # far more than there is, all in all
            left.channel.send(Kind.MESSAGE, 1, np.ones(10 * MIB, np.uint8))
            holds((await right.next()).value.all(), "it is whole")
            gc.collect()

        async def all_is_back() -> bool:
            return left.writer.statistics().leases == 0

        await eventually(all_is_back, "leases end with the last view")


async def order_is_kept(make: MakePair) -> None:
    """Also between small messages, large ones, and such as are copied on a thread."""
    async with _sides(make) as (left, right):
        sizes = [10, 6 * MIB, 0, 40_000, 10, 5 * MIB, 3]
        for call, size in enumerate(sizes):
            left.channel.send(Kind.MESSAGE, call, np.full(size, call, np.uint8))
        for call, size in enumerate(sizes):
            frame = await right.next()
            equal((frame.call, len(frame.value)), (call, size), "in the order in which it was sent")
            holds((frame.value == call).all(), "with its own bytes")


async def a_slow_reader_loses_nothing(make: MakePair) -> None:
    """What the line does not take waits, and goes when there is room."""
    async with _sides(make, queue=10_000) as (left, right):
        for call in range(3000):
            left.channel.send(Kind.MESSAGE, call, b"x" * 2000)
        holds(left.channel.num_queued, "the line itself takes only so much")
        for call in range(3000):
            equal((await right.next()).call, call, "none is lost, doubled or out of order")
        await left.channel.flushed(PATIENCE)
        equal(left.channel.num_queued, 0, "nothing waits any longer")


async def the_queue_is_bounded(make: MakePair) -> None:
    """A peer that does not read makes sending fail, and no memory grow; it is no end of the channel."""
    async with _sides(make, queue=10) as (left, right):
        with raising(ChannelFull, "a bounded number waits"):
            for call in range(10_000):
                left.channel.send(Kind.MESSAGE, call, b"x" * 10_000)
        sent = left.channel.statistics().sent
        for call in range(sent):
            equal((await right.next()).call, call, "what was taken arrives")
        left.channel.send(Kind.MESSAGE, 0, "again")
        equal((await right.next()).value, "again", "and then there is room")


async def what_cannot_travel_fails_alone(make: MakePair) -> None:
    """The error names the part, and the channel lives on (G51)."""
    async with _sides(make) as (left, right):
        with raising(MessageNotPortable, "a lock cannot travel") as caught:
            left.channel.send(Kind.REPLY, 1, {"ok": 1, "bad": [threading.Lock()]})
        equal(caught.error.where, "['bad'][0]", "the part that cannot")
        left.channel.send(Kind.REPLY, 2, "fine")
        equal((await right.next()).call, 2, "only the other one arrives")


async def what_is_too_large_fails_alone(make: MakePair) -> None:
    """The error names need, room and the setting, and the channel lives on (G15, G16)."""
    async with _sides(make, limit=4 * MIB) as (left, right):
        with raising(ArenaFull, "more than the limit does not go") as caught:
            left.channel.send(Kind.MESSAGE, 1, np.zeros(5 * MIB, np.uint8))
        holds("the check's limit" in str(caught.error), "it names the setting")
        holds(caught.error.need > caught.error.limit == 4 * MIB, "it names need and limit")
        left.channel.send(Kind.MESSAGE, 2, np.ones(2 * MIB, np.uint8))
        equal((await right.next()).call, 2, "only the other one arrives")


async def what_cannot_be_decoded_is_told(make: MakePair) -> None:
    """As a frame with an error, so that the call can be answered; the channel lives on."""
    async with _sides(make) as (left, right):
        left.channel.send(Kind.MESSAGE, 1, _Bomb())
        left.channel.send(Kind.MESSAGE, 2, "fine")
        frame = await right.next()
        equal((frame.call, frame.value), (1, None), "the call is known, its value is not")
        holds(frame.error is not None and "it went off" in str(frame.error), "and it is known why")
        equal((await right.next()).value, "fine", "the next one arrives")


async def descriptors_travel(make: MakePair) -> None:
    """They are duplicates, and the receiver's own; a line to another node says at once that it cannot take them."""
    async with _sides(make) as (left, right):
        ear, bell = os.pipe()
        try:
            left.channel.send(Kind.LAUNCH, 0, "a pipe", fds=(bell,))
        except ValueError:
            os.write(bell, b"ding")
            left.channel.send(Kind.LAUNCH, 0, "no pipe")
            equal((await right.next()).value, "no pipe", "the channel lives on")
        else:
            frame = await right.next()
            os.write(frame.fds[0], b"ding")
            os.close(frame.fds[0])
        os.close(bell)
        equal(os.read(ear, 10), b"ding", "it is the same pipe")
        os.close(ear)


async def an_end_is_told_once(make: MakePair) -> None:
    """After the last frame; whoever closed it himself is not told, and closing twice is closing once."""
    async with _sides(make) as (left, right):
        left.channel.send(Kind.MESSAGE, 1, "last")
        left.channel.close()
        left.channel.close()
        equal((await right.next()).value, "last", "what was sent before is received")

        async def told() -> bool:
            return bool(right.gone)

        await eventually(told, "the other end is told")
        holds(right.gone[0].orderly and not right.channel.is_open, "and can tell an end on purpose from a death")
        equal((len(right.gone), len(left.gone)), (1, 0), "once, and only it")
        for side in (left, right):
            with raising(ChannelClosed, "nothing goes through it any longer"):
                side.channel.send(Kind.MESSAGE, 2)
            with raising(ChannelClosed, "nor is anything flushed"):
                await side.channel.flushed(PATIENCE)


class _Bomb:
    """It can be taken apart and not put together."""

    def __reduce__(self) -> Any:
        return _explode, ()


def _explode() -> None:
    raise RuntimeError("it went off")


#: Every promise that can be checked from outside; a test may run them one by one.
CHANNEL_CHECKS: tuple[Callable[[MakePair], Awaitable[None]], ...] = (
    values_arrive_as_they_were_sent,
    arrays_arrive_bit_by_bit,
    what_is_received_is_the_receivers,
    what_was_sent_may_be_changed,
    memory_comes_back,
    order_is_kept,
    a_slow_reader_loses_nothing,
    the_queue_is_bounded,
    what_cannot_travel_fails_alone,
    what_is_too_large_fails_alone,
    what_cannot_be_decoded_is_told,
    descriptors_travel,
    an_end_is_told_once,
)


async def check_channel(make_pair: MakePair) -> None:
    """Run all of :data:`CHANNEL_CHECKS` on the running loop.

    Args:
        make_pair: Returns two ends of a line that :class:`LoopChannel` takes, at once or when it is awaited.

    Raises:
        AssertionError: A promise is broken; the text says which.
    """
    for check in CHANNEL_CHECKS:
        try:
            await asyncio.wait_for(check(make_pair), 2 * PATIENCE)
        except Exception as error:
            rule = (check.__doc__ or "").strip()
            raise AssertionError(f"{getattr(check, '__name__', check)}: {rule} {error}") from error
