"""How whole frames get onto a socket and off it, and connected pairs of sockets.

A datagram is a frame, and the kernel keeps them apart. On a byte stream each has its length
in front; bulk goes through the stream as well, as there is nothing better there.
"""

from __future__ import annotations

import array
import os
import select
import socket
import struct
from asyncio import AbstractEventLoop, SelectorEventLoop
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from aexec.transport.frames import MAX_FRAME, BadFrame, Data

__all__ = ("Link", "PacketLink", "Parts", "Receiver", "SocketLink", "StreamLink", "seqpacket_pair", "stream_pair")

MAX_FDS = 16  # descriptors with one frame
MAX_STREAMED = 1 << 40  # bytes of a frame on a stream: more is garbage
SEND_BUFFER = 1 << 20  # bytes
OWN = 4 << 20  # bytes of a frame that are copied, if they have to wait

_LENGTH = struct.Struct("<Q")
_ANCILLARY = socket.CMSG_SPACE(MAX_FDS * array.array("i").itemsize)
_CLOEXEC = int(getattr(socket, "MSG_CMSG_CLOEXEC", 0))  # plain numbers: flags of the enum kind take longer than recvmsg
_NOW = int(socket.MSG_DONTWAIT)  # whatever the mode of the socket, which is that of patient_receiver()
_NOW_CLOEXEC = _NOW | _CLOEXEC
_TRUNCATED = int(socket.MSG_TRUNC | socket.MSG_CTRUNC)

Parts = Sequence[bytes | memoryview]
"""One frame, in pieces."""


class Receiver(Protocol):
    """Where frames come from."""

    def receive(self) -> tuple[Data, tuple[int, ...]]:
        """A frame and its descriptors; an empty one: the peer is gone.

        Raises:
            BlockingIOError: None is there.
            BadFrame: What is there is none.
            OSError: The peer is gone.
        """
        ...


class Link(Receiver, Protocol):
    """One end of a line, without a notion of what frames mean. It never blocks.

    Attributes:
        shares_memory: Bulk goes through an arena; False: in the frame.
    """

    shares_memory: bool

    def send(self, parts: Parts, fds: Sequence[int]) -> bool:
        """Send a frame. False: not all of it was taken, and ``flush`` has to be called later.

        Raises:
            OSError: The peer is gone.
        """
        ...

    def flush(self) -> bool:
        """Go on with a frame that was not taken; True: it is now."""
        ...

    def watch(self, loop: AbstractEventLoop, readable: Callable[[], object]) -> None:
        """Call ``readable`` on ``loop`` while there is something to receive."""
        ...

    def watch_writable(self, loop: AbstractEventLoop, writable: Callable[[], object] | None) -> None:
        """Call ``writable`` on ``loop`` while there is room; None: no longer."""
        ...

    def close(self, loop: AbstractEventLoop | None) -> None:
        """End it."""
        ...


class SocketLink:
    """What the two kinds of sockets have in common."""

    shares_memory = False

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self.sock = sock
        self._polls: dict[str, select.epoll] = {}
        self._rest: Parts = ()
        self._rest_fds: list[int] = []

    def __repr__(self) -> str:
        return f"<{type(self).__name__} fd {self.sock.fileno()}>"

    def fileno(self) -> int:
        """The socket's descriptor."""
        return self.sock.fileno()

    def watch(self, loop: AbstractEventLoop, readable: Callable[[], object]) -> None:
        """As it says in :class:`Link`."""
        if _reports_errors(loop):
            loop.add_reader(self.sock.fileno(), readable)
        else:
            loop.add_reader(self._nested("EPOLLIN"), readable)

    def watch_writable(self, loop: AbstractEventLoop, writable: Callable[[], object] | None) -> None:
        """As it says in :class:`Link`."""
        if _reports_errors(loop):
            if writable is None:
                loop.remove_writer(self.sock.fileno())
            else:
                loop.add_writer(self.sock.fileno(), writable)
        elif writable is None:
            loop.remove_reader(self._nested("EPOLLOUT"))
        else:
            loop.add_reader(self._nested("EPOLLOUT"), writable)

    def close(self, loop: AbstractEventLoop | None) -> None:
        """As it says in :class:`Link`."""
        if loop is not None:
            for fd in (self.sock.fileno(), *(poll.fileno() for poll in self._polls.values())):
                loop.remove_reader(fd)
            loop.remove_writer(self.sock.fileno())
        for poll in self._polls.values():
            poll.close()
        self._polls.clear()
        self.sock.close()
        self._drop_rest()

    def _nested(self, event: str) -> int:
        """A descriptor that is readable when the socket has this event, or an error.

        libuv stops to watch a socket that has an error, without a word to whoever reads
        from it: and a peer that died before it had read all is an error.
        """
        if event not in self._polls:
            poll = self._polls[event] = select.epoll()
            poll.register(self.sock.fileno(), getattr(select, event))
        return self._polls[event].fileno()

    def _keep(self, parts: Parts, fds: Sequence[int]) -> bool:
        """Remember what was not taken; descriptors are the caller's, who may close them meanwhile."""
        self._rest, self._rest_fds = parts, [os.dup(fd) for fd in fds]
        return False

    def _drop_rest(self) -> None:
        for fd in self._rest_fds:
            os.close(fd)
        self._rest, self._rest_fds = (), []

    def _receive(self, num_bytes: int) -> tuple[bytes, tuple[int, ...]]:
        try:
            data, ancillary, flags, _ = self.sock.recvmsg(num_bytes, _ANCILLARY, _NOW_CLOEXEC)
        except ConnectionResetError:  # the peer ended and left something unread: said once, before its last frames
            data, ancillary, flags, _ = self.sock.recvmsg(num_bytes, _ANCILLARY, _NOW_CLOEXEC)
        return data, _whole(ancillary, flags)


class _Packets:
    """Receives datagrams.

    Args:
        sock: Their socket.
        how: Flags of ``recvmsg``.
    """

    def __init__(self, sock: socket.socket, how: int) -> None:
        self._recvmsg, self._how = sock.recvmsg, how

    def receive(self) -> tuple[bytes, tuple[int, ...]]:
        """As it says in :class:`Receiver`."""
        try:
            data, ancillary, flags, _ = self._recvmsg(MAX_FRAME, _ANCILLARY, self._how)
        except ConnectionResetError:  # as in _receive
            data, ancillary, flags, _ = self._recvmsg(MAX_FRAME, _ANCILLARY, _NOW_CLOEXEC)
        if ancillary or flags & _TRUNCATED:
            return data, _whole(ancillary, flags)
        return data, ()


class PacketLink(_Packets, SocketLink):
    """Over ``SOCK_SEQPACKET``."""

    shares_memory = True

    def __init__(self, sock: socket.socket) -> None:
        SocketLink.__init__(self, sock)
        _Packets.__init__(self, sock, _NOW_CLOEXEC)
        self._send = sock.send  # looked up once

    def send(self, parts: Parts, fds: Sequence[int]) -> bool:
        """As it says in :class:`Link`."""
        try:
            if fds:
                rights = array.array("i", fds)
                self.sock.sendmsg(parts, [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)], _NOW)
            elif len(parts) == 1:
                self._send(parts[0], _NOW)
            else:
                self.sock.sendmsg(parts, (), _NOW)
        except BlockingIOError:
            return self._keep(parts, fds)
        return True

    def flush(self) -> bool:
        """As it says in :class:`Link`."""
        parts, fds = self._rest, self._rest_fds
        self._rest, self._rest_fds = (), []
        try:
            return self.send(parts, fds)
        finally:
            for fd in fds:
                os.close(fd)

    def patient_receiver(self, seconds: float) -> Receiver:
        """What receives as this does, and sleeps so long for a frame: one system call where a poll makes it two."""
        whole = int(seconds)
        limit = struct.pack("@ll", whole, int((seconds - whole) * 1e6))
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
        os.set_blocking(self.sock.fileno(), True)  # the socket object goes on to take it for one that never blocks
        return _Packets(self.sock, _CLOEXEC)


class StreamLink(SocketLink):
    """Over ``SOCK_STREAM``: eight bytes of length before each frame."""

    def __init__(self, sock: socket.socket) -> None:
        super().__init__(sock)
        self._length = bytearray()
        self._frame = memoryview(b"")
        self._filled = 0
        self._fds: list[int] = []

    def send(self, parts: Parts, fds: Sequence[int]) -> bool:
        """As it says in :class:`Link`."""
        if fds and self.sock.family != socket.AF_UNIX:  # the system would leave them out without a word
            raise ValueError("descriptors cannot go to another node: this line is a TCP connection")
        whole = [memoryview(part).cast("B") for part in parts if len(part)]
        size = sum(map(len, whole))
        if self._send([memoryview(_LENGTH.pack(size)), *whole], fds):
            return True
        if size <= OWN:  # whoever sends may change them from now on
            self._rest = (b"".join(self._rest),)
        return False

    def flush(self) -> bool:
        """As it says in :class:`Link`."""
        parts, fds = self._rest, self._rest_fds
        self._rest, self._rest_fds = (), []
        try:
            return self._send(parts, fds)
        finally:
            for fd in fds:
                os.close(fd)

    def receive(self) -> tuple[memoryview, tuple[int, ...]]:
        """As it says in :class:`Link`."""
        while not self._frame:
            if not self._read_length():
                return memoryview(b""), ()
        while self._filled < len(self._frame):
            rest = self._frame[self._filled :]
            try:
                count = self.sock.recv_into(rest)
            except ConnectionResetError:  # as in _receive
                count = self.sock.recv_into(rest)
            if not count:
                return memoryview(b""), ()
            self._filled += count
        frame, fds = self._frame, tuple(self._fds)
        self._length, self._frame, self._filled, self._fds = bytearray(), memoryview(b""), 0, []
        return frame, fds

    def close(self, loop: AbstractEventLoop | None) -> None:
        """As it says in :class:`Link`."""
        super().close(loop)
        for fd in self._fds:
            os.close(fd)
        self._fds = []

    def _read_length(self) -> bool:
        data, fds = self._receive(_LENGTH.size - len(self._length))
        self._fds += fds
        self._length += data
        if len(self._length) == _LENGTH.size:
            (length,) = _LENGTH.unpack(self._length)
            if not 0 < length < MAX_STREAMED:
                raise BadFrame(f"it claims to have {length} bytes")
            long = length > MAX_FRAME  # a bytearray is filled with zeros, which takes its time
            self._frame = np.empty(length, np.uint8).data if long else memoryview(bytearray(length))
        return bool(data)

    def _send(self, parts: Parts, fds: Sequence[int]) -> bool:
        while parts:
            try:
                sent = socket.send_fds(self.sock, list(parts[:64]), list(fds)) if fds else self.sock.sendmsg(parts[:64])
            except BlockingIOError:
                return self._keep(parts, fds)
            fds = ()
            parts = _after(parts, sent)
        return True


def _reports_errors(loop: AbstractEventLoop) -> bool:
    """True for a loop that calls a reader when its socket has an error, as asyncio's own does."""
    return isinstance(loop, SelectorEventLoop) or not hasattr(select, "epoll")


def _after(parts: Parts, sent: int) -> Parts:
    """What is left of them."""
    for index, part in enumerate(parts):
        if sent < len(part):
            return [memoryview(part)[sent:], *parts[index + 1 :]]
        sent -= len(part)
    return ()


def _whole(ancillary: Sequence[tuple[int, int, Any]], flags: int) -> tuple[int, ...]:
    """The descriptors of a frame, which is to be whole."""
    fds = _descriptors(ancillary) if ancillary else ()
    if flags & _TRUNCATED:
        for fd in fds:
            os.close(fd)
        raise BadFrame(f"it has more than {MAX_FRAME} bytes or more than {MAX_FDS} descriptors")
    return fds


def _descriptors(ancillary: Sequence[tuple[int, int, Any]]) -> tuple[int, ...]:
    fds = array.array("i")
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
    return tuple(fds)


def seqpacket_pair() -> tuple[socket.socket, socket.socket]:
    """Two ends of a line of datagrams between processes of one node; bulk goes through shared memory."""
    pair = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for end in pair:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER)
    return pair


def stream_pair() -> tuple[socket.socket, socket.socket]:
    """Two ends of a byte stream between processes of one node: bulk is slower, and it is everywhere."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
