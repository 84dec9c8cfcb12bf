"""Frames between two processes of a node: ordered, lossless, and quiet when idle.

A :class:`LoopChannel` or :class:`BlockingChannel` is one end of a line
(``seqpacket_pair()``; ``stream_pair()`` where there is nothing better, ``memory_pair()``
within one loop). What is small travels in the frame; what is large is written once, into
shared memory of the sender's :class:`Writer`, for any number of readers.

**Security**: values are unpickled. Within a node a line has no name that anybody could connect
to; both of its ends are in the hands of one driver and of processes that it started. Workers
that somebody else has started come to a :mod:`~aexec.transport.meeting`, where both ends prove
that they know the secret of their group before anything else is read; what they say from then
on is neither encrypted nor signed.
"""

from __future__ import annotations

from aexec.transport.blocking import BlockingChannel as BlockingChannel
from aexec.transport.codec import Encoded as Encoded
from aexec.transport.frames import Frame as Frame
from aexec.transport.frames import Kind as Kind
from aexec.transport.hot import HotWindow as HotWindow
from aexec.transport.links import seqpacket_pair as seqpacket_pair
from aexec.transport.links import stream_pair as stream_pair
from aexec.transport.loop import LoopChannel as LoopChannel
from aexec.transport.memory import MemoryEnd as MemoryEnd
from aexec.transport.memory import memory_pair as memory_pair
from aexec.transport.spin import affordable_spin as affordable_spin
from aexec.transport.statistics import ChannelStatistics as ChannelStatistics
from aexec.transport.writer import Writer as Writer

__all__ = (
    "BlockingChannel",
    "ChannelStatistics",
    "Encoded",
    "Frame",
    "HotWindow",
    "Kind",
    "LoopChannel",
    "MemoryEnd",
    "Writer",
    "affordable_spin",
    "memory_pair",
    "seqpacket_pair",
    "stream_pair",
)
