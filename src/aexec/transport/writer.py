"""A process's side of all it sends: its codec, and the memory that bulk travels through."""

from __future__ import annotations

import threading
from collections.abc import Hashable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from time import perf_counter
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from aexec.config.executor import DEFAULT_ARENA_BYTES
from aexec.observe import get_logger
from aexec.transport.arena import Arena, ArenaStatistics, HeldLease, Lease
from aexec.transport.codec import Encoded, encode
from aexec.transport.frames import Bulk, Kind, pack, pack_table
from aexec.transport.segments import Allocate, memory_file

__all__ = ("Holder", "Placed", "Sender", "Writer")

SETTING = "ExecutorConfig.arena_bytes"
OFF_LOOP = 4 << 20  # bytes; a longer copy is made on a thread, when it is for channels on a loop
HELD_LONG = 60.0  # seconds after which views are reported
TAKEN_OVER = 15e-6  # seconds; a send takes a third of it at most, and a peer's turn twice as much at least


class Placed(NamedTuple):
    """Bulk in the arena.

    Attributes:
        lease: Of its block.
        bulk: Where it lies.
        copied: Done when it lies there; None: it does.
    """

    lease: Lease
    bulk: Bulk
    copied: Future[None] | None


class Sender(Hashable, Protocol):
    """A channel, as :meth:`Writer.send` needs it."""

    @property
    def is_open(self) -> bool:
        """Something can be sent."""
        ...

    @property
    def shares_memory(self) -> bool:
        """Bulk goes through the arena."""
        ...

    @property
    def copies_off_loop(self) -> bool:
        """Nothing may hold up the thread that sends."""
        ...

    def check_room(self) -> None:
        """Raise ``ChannelFull`` if another frame may not wait."""
        ...

    @property
    def is_free(self) -> bool:
        """Open, and a frame would be with the kernel at once; nothing has to go along with it."""
        ...

    def put(self, kind: Kind, frame: bytes) -> None:
        """Send a whole frame, of a channel that is free."""
        ...

    def post(self, kind: Kind, call: int, encoded: Encoded, placed: Placed | None, fds: Sequence[int]) -> None:
        """Send a frame whose bulk is in its place, or comes there."""
        ...


class Holder(Sender, Protocol):
    """A channel, as :meth:`Writer.hold` needs it."""

    def hold(self, frame: bytes) -> None:
        """Send a whole frame, of a channel that is free, together with the next one."""
        ...

    def drop_held(self) -> None:
        """Something else is sent in its place."""
        ...


SenderT = TypeVar("SenderT", bound=Sender)
HolderT = TypeVar("HolderT", bound=Holder)


class Writer:
    """Encodes what a process sends, and owns the shared memory that bulk travels through.

    One per process: all of its channels share it, from any thread.

    Args:
        limit: Bytes of shared memory at most; none are taken before they are needed. As many
            bytes may wait on each channel.
        setting: Name of the setting that ``limit`` comes from, for errors; empty: nobody can change it.
        allocate: Where memory comes from.
    """

    def __init__(
        self, limit: int = DEFAULT_ARENA_BYTES, *, setting: str = SETTING, allocate: Allocate = memory_file
    ) -> None:
        self.arena = Arena(limit, setting, allocate=allocate)
        self._copier: ThreadPoolExecutor | None = None
        self._lock = threading.Lock()
        self._reported: set[int] = set()
        self._epoch = 0

    def __repr__(self) -> str:
        facts = self.statistics()
        return f"<Writer: {facts.leases} messages in use, {facts.used} of {facts.limit} bytes>"

    def limit_to(self, limit: int) -> None:
        """Use so many bytes at most from now on, as the driver says; what is in use stays."""
        self.arena.limit = limit

    def encode(self, value: Any) -> Encoded:
        """Encode a value, once for any number of channels.

        Raises:
            MessageNotPortable: It cannot travel; names the part that cannot.
        """
        return encode(value)

    def send(self, channels: Sequence[SenderT], kind: Kind, call: int, value: Any = None) -> SenderT | None:
        """Send one value to several channels: encoded once, and its arrays copied once.

        Channels that are closed are left out: their owners have been told. Arrays of more
        than 4 MB are copied on a thread: they have to stay as they are until there was an
        answer, or until the channels are ``flushed()``.

        Returns:
            One that is better sent to after the others, see :func:`_put_all`; None: as it was.

        Raises:
            MessageNotPortable: It cannot travel.
            ArenaFull: It does not fit into shared memory.
            ChannelFull: One of the channels takes no more. In all three cases nothing was
                sent to anybody.
        """
        encoded = encode(value)
        if not encoded.lengths:
            for channel in channels:
                if not channel.is_free:
                    break
            else:
                return _put_all(channels, kind, pack(kind, call, encoded.codec, encoded.body))
        self.send_encoded(channels, kind, call, encoded)
        return None

    def hold(self, channels: Sequence[Holder], kind: Kind, call: int, value: Any) -> Encoded | None:
        """Send one value to several channels, together with the next frame of each: see ``LoopChannel.hold``.

        Returns:
            What is held; None: nothing was done, since something has to go along with it or before it.

        Raises:
            MessageNotPortable: It cannot travel.
        """
        encoded = encode(value)
        if encoded.lengths:
            return None
        for channel in channels:
            if not channel.is_free:
                return None
        frame = pack(kind, call, encoded.codec, encoded.body)
        for channel in channels:
            channel.hold(frame)
        return encoded

    def send_instead(
        self, channels: Sequence[HolderT], kind: Kind, call: int, codec: int, body: bytes
    ) -> HolderT | None:
        """Send a body in place of what these channels hold, which all of them do; see :meth:`send`."""
        for channel in channels:
            channel.drop_held()
        return _put_all(channels, kind, pack(kind, call, codec, body))

    def send_encoded(
        self, channels: Sequence[Sender], kind: Kind, call: int, encoded: Encoded, fds: Sequence[int] = ()
    ) -> None:
        """Send what :meth:`encode` gave; see :meth:`send`."""
        takers = [channel for channel in channels if channel.is_open]
        for channel in takers:
            channel.check_room()
        placed = self._place(encoded, takers) if encoded.num_bytes else None
        for channel in takers:
            channel.post(kind, call, encoded, placed if channel.shares_memory else None, fds)

    def release(self, leases: Sequence[int], holder: Hashable) -> None:
        """The other end of ``holder`` does not use these any longer."""
        self.arena.release(leases, holder)

    def forget(self, holder: Hashable) -> None:
        """The other end of ``holder`` is gone."""
        self.arena.forget(holder)

    def held(self, longer_than: float = 0.0) -> list[HeldLease]:
        """Messages that are in use for longer than so many seconds, by name, oldest first."""
        return self.arena.held(longer_than)

    def statistics(self) -> ArenaStatistics:
        """How much shared memory there is, and how much is in use."""
        return self.arena.statistics()

    def close(self) -> None:
        """Give the shared memory back; what peers still hold of it stays valid."""
        with self._lock:
            copier, self._copier = self._copier, None
        if copier is not None:
            copier.shutdown(wait=False)  # a copy that is being made holds what it needs
        self.arena.close()

    def _place(self, encoded: Encoded, takers: Sequence[Sender]) -> Placed | None:
        limit = self.arena.limit
        if encoded.num_bytes > limit:  # on any kind of line, so that none takes what another refuses
            raise self.arena.too_large(encoded.num_bytes)
        readers = [channel for channel in takers if channel.shares_memory]
        if not readers:
            return None
        off_loop = encoded.num_bytes > OFF_LOOP and any(channel.copies_off_loop for channel in readers)
        holders: list[Hashable] = [*readers, self] if off_loop else [*readers]
        lease = self.arena.lease(encoded.num_bytes, holders, encoded.what)
        if self.arena.epoch != self._epoch:
            self._epoch = self.arena.epoch
            self._report_held()
        bulk = Bulk(lease.block.segment, lease.block.offset, encoded.num_bytes)
        memory = self.arena.bytes_of(lease.block, encoded.num_bytes)
        if not off_loop:
            _fill(memory, encoded)
            return Placed(lease, bulk, None)
        return Placed(lease, bulk, self._copy_later(memory, encoded, lease))

    def _copy_later(self, memory: npt.NDArray[Any], encoded: Encoded, lease: Lease) -> Future[None]:
        def copy() -> None:
            try:
                _fill(memory, encoded)
            finally:
                self.arena.release([lease.number], self)

        with self._lock:
            if self._copier is None:
                self._copier = ThreadPoolExecutor(1, thread_name_prefix="aexec-copy")
            return self._copier.submit(copy)

    def _report_held(self) -> None:
        """The arena has grown: perhaps because somebody keeps what he was sent."""
        for lease in self.arena.held(longer_than=HELD_LONG):
            get_logger().warning(
                "views of a message are kept",
                message=lease.what,
                by=lease.holders,
                bytes=lease.nbytes,
                seconds=round(lease.age, 1),
            )


def _put_all(channels: Sequence[SenderT], kind: Kind, frame: bytes) -> SenderT | None:
    """Send a whole frame to channels that are free; returns one that is better sent to after the others.

    A peer that sleeps may be woken on this very CPU, and take it over before this end has told
    the others, which then begin when it has ended: some peer's turn is no part of a send.
    """
    eager: SenderT | None = None
    before = perf_counter()
    for channel in channels:
        channel.put(kind, frame)
        now = perf_counter()
        if now - before > TAKEN_OVER:
            eager = channel
        before = now
    return eager if eager is not None and eager is not channels[-1] else None


def _fill(memory: npt.NDArray[Any], encoded: Encoded) -> None:
    table = pack_table(encoded.lengths)
    memory[: len(table)] = np.frombuffer(table, np.uint8)
    for offset, buffer in encoded.buffers:
        np.copyto(memory[offset : offset + len(buffer)], np.frombuffer(buffer, np.uint8))  # lets other threads run
