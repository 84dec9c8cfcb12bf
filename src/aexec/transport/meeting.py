"""Where workers that somebody else has started come to get their lines.

A worker of ours is given its lines at birth. One that a cluster has started, on whatever
node, has to come and fetch them: to a socket in the abstract namespace on the driver's node,
which has no file, or to a port of the driver's address from other nodes. Anybody may come
there, so nothing that is said is believed, let alone unpickled, before either end has proved
that it knows the group's secret (see :mod:`aexec.transport.handshake`). Whoever has not is
turned away: after a time limit, with a bound on how many may wait, and without any effect.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import secrets
import socket
import struct
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Final

from aexec.errors import ChannelClosed, ProtocolError
from aexec.observe import get_logger
from aexec.transport.dialing import MeetingPlace as MeetingPlace
from aexec.transport.dialing import dial as dial
from aexec.transport.handshake import (
    HELLO_SIZE,
    PROOF_SIZE,
    Caller,
    Line,
    Stranger,
    Verdict,
    challenge,
    check_proof,
    read_hello,
)
from aexec.transport.links import SEND_BUFFER
from aexec.transport.tcp import tune

__all__ = ("Meeting", "MeetingPlace", "MeetingStatistics", "dial", "new_secret", "peer_pid")

MOST_AT_THE_DOOR: Final = 64  # connections that have proved nothing; the one that waits longest makes room
PATIENCE: Final = 5.0  # seconds in which a connection has to prove itself
_BACKLOG = 1024  # connections that the system keeps until they are let in: one too many waits a second
_AT_ONCE = 16  # are let in before other work of the loop gets its turn
_BREATHER = 0.2  # seconds without letting anybody in, when this process may have no more descriptors
_EXHAUSTED = frozenset((errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM))
_WILDCARDS = frozenset(("", "0.0.0.0", "::", "*"))  # noqa: S104 - these are refused
_SHORTEST_SECRET = 16  # bytes


def new_secret() -> bytes:
    """A secret for one group."""
    return secrets.token_bytes(32)


@dataclass(frozen=True, slots=True)
class MeetingStatistics:
    """What has happened at a meeting.

    Attributes:
        seated: Lines that have their worker.
        expected: Lines that there are.
        at_the_door: Connections that have proved nothing yet.
        turned_away: Those that were turned away so far.
    """

    seated: int
    expected: int
    at_the_door: int
    turned_away: int


class Meeting:
    """Hands out the driver's ends of the workers' lines, each to nobody but its rank.

    Args:
        secret: Of the group.
        host: This node's address, for workers on other nodes; None: there are none.
        expect: How many workers are to come, each for two lines; or which ranks, where it is not the first ones.

    Raises:
        ValueError: The address is a wildcard, or the secret is too short to be one.
    """

    def __init__(self, secret: bytes, *, host: str | None, expect: int | Collection[int]) -> None:
        if host is not None and host in _WILDCARDS:
            raise ValueError(f"host is {host!r}: expected one address of this node, for others must not be listened on")
        if len(secret) < _SHORTEST_SECRET:
            raise ValueError(f"a secret of {len(secret)} bytes: expected what new_secret() gives")
        self._secret, self._host = secret, host
        self.local_address = f"aexec-{secrets.token_hex(16)}"
        self.remote_address: tuple[str, int] | None = None
        ranks = range(expect) if isinstance(expect, int) else expect
        self._seats = {rank: _Seat(rank) for rank in ranks}
        self._listening: list[socket.socket] = []
        self._door: dict[_Guest, None] = {}  # the one that waits longest comes first
        self._turned_away = 0
        self._closed = False
        self._loop: asyncio.AbstractEventLoop

    def __repr__(self) -> str:
        facts = self.statistics()
        where = "closed" if self._closed else MeetingPlace(b"", self.local_address, self.remote_address)
        return f"<Meeting at {where}: {facts.seated}/{facts.expected} lines, {facts.turned_away} turned away>"

    def statistics(self) -> MeetingStatistics:
        """What has happened so far."""
        seated = sum(len(seat.lines) for seat in self._seats.values())
        return MeetingStatistics(seated, 2 * len(self._seats), len(self._door), self._turned_away)

    def place(self, *, here: bool) -> MeetingPlace:
        """Where a worker finds this.

        Args:
            here: It is on this node.
        """
        return MeetingPlace(self._secret, self.local_address if here else "", self.remote_address)

    def open(self) -> None:
        """Begin to listen, on the running loop.

        Raises:
            OSError: The address is none of this node's, or nothing can be listened on.
        """
        self._loop = asyncio.get_running_loop()
        try:
            local = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            self._listening.append(local)
            local.bind(f"\0{self.local_address}")
            if self._host is not None:
                remote = socket.socket(socket.AF_INET6 if ":" in self._host else socket.AF_INET)
                self._listening.append(remote)
                remote.bind((self._host, 0))
                self.remote_address = remote.getsockname()[:2]
            for sock in self._listening:
                sock.setblocking(False)
                sock.listen(_BACKLOG)
                self._loop.add_reader(sock.fileno(), self._let_in, sock)
        except BaseException:
            self._stop_listening()
            raise

    async def lines(self, rank: int) -> tuple[socket.socket, socket.socket]:
        """Wait until a rank is there; its work line and its control line, the caller's from here on.

        Raises:
            ChannelClosed: The meeting is over.
            ProtocolError: They were taken already.
        """
        seat = self._seats[rank]
        await seat.complete.wait()
        if self._closed:
            raise ChannelClosed(f"meeting for rank {rank}", "this end closed it", orderly=True)
        if seat.is_taken:
            raise ProtocolError(f"the lines of rank {rank} were taken already")
        seat.is_taken = True
        if all(seat.is_taken for seat in self._seats.values()):
            self._stop_listening()
        return seat.lines["work"], seat.lines["control"]

    def close(self) -> None:
        """Nobody can come any longer; lines that nobody took are closed. Twice is once."""
        if self._closed:
            return
        self._closed = True
        self._stop_listening()
        for guest in list(self._door):
            self._door.pop(guest)
            guest.leave().close()
        for seat in self._seats.values():
            seat.close()

    def _stop_listening(self) -> None:
        for sock in self._listening:
            if sock.fileno() >= 0:
                self._loop.remove_reader(sock.fileno())
            sock.close()
        self._listening.clear()

    # At the door.

    def _let_in(self, listening: socket.socket) -> None:
        for _ in range(_AT_ONCE):
            try:
                sock, _ = listening.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in _EXHAUSTED:
                    self._catch_breath(listening)
                    return
                continue  # that one has gone again
            sock.setblocking(False)
            while len(self._door) >= MOST_AT_THE_DOOR:
                self._turn_away(next(iter(self._door)), "too many came at once, and it had said nothing yet")
            self._door[_Guest(sock, self._secret, self._loop, self._proved, self._turn_away)] = None

    def _catch_breath(self, listening: socket.socket) -> None:
        """Without a descriptor nobody can be let in; whoever waits is asked again soon."""
        if self._door:
            self._turn_away(next(iter(self._door)), "this process has no descriptors left")
        self._loop.remove_reader(listening.fileno())
        self._loop.call_later(_BREATHER, self._resume, listening)

    def _resume(self, listening: socket.socket) -> None:
        if listening in self._listening:
            self._loop.add_reader(listening.fileno(), self._let_in, listening)

    def _turn_away(self, guest: _Guest, why: str) -> None:
        self._door.pop(guest, None)
        who = guest.name
        guest.leave().close()
        self._turned_away += 1
        if self._turned_away == 1:
            get_logger("aexec.transport").warning(
                "a connection that is none of the workers' was turned away; more of them are only counted",
                who=who,
                why=why,
            )

    def _proved(self, guest: _Guest, caller: Caller) -> None:
        verdict = self._verdict(caller)
        if verdict is not Verdict.WELCOME:
            guest.tell(bytes([verdict]))
            self._turn_away(guest, f"it is one of ours, as rank {caller.rank}, {caller.line} line: {verdict.name}")
            return
        self._door.pop(guest)
        sock = guest.leave()
        if sock.family == socket.AF_UNIX:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER)
        tune(sock, always_read=caller.line == "control")
        with contextlib.suppress(OSError):  # it has gone again: who reads its line learns of it
            sock.send(bytes([verdict]))
        self._seats[caller.rank].sit(caller.line, sock)

    def _verdict(self, caller: Caller) -> Verdict:
        if caller.rank not in self._seats:
            return Verdict.UNKNOWN_RANK
        return Verdict.WELCOME if self._seats[caller.rank].is_free(caller.line) else Verdict.TAKEN


class _Seat:
    """The lines of one rank."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.lines: dict[Line, socket.socket] = {}
        self.complete = asyncio.Event()
        self.is_taken = False

    def __repr__(self) -> str:
        return f"<_Seat of rank {self.rank}: {sorted(self.lines)}, {'taken' if self.is_taken else 'waiting'}>"

    def is_free(self, line: Line) -> bool:
        """Nobody has it, or whoever had it has hung up before it was used: then it has come again."""
        sock = self.lines.get(line)
        return sock is None or (not self.is_taken and _has_hung_up(sock))

    def sit(self, line: Line, sock: socket.socket) -> None:
        """It has come."""
        before = self.lines.get(line)
        if before is not None:
            before.close()
        self.lines[line] = sock
        if len(self.lines) == 2:
            self.complete.set()

    def close(self) -> None:
        """Nobody wants it any longer."""
        if not self.is_taken:
            for sock in self.lines.values():
                sock.close()
            self.lines.clear()
        self.complete.set()


class _Guest:
    """A connection that has yet to prove whose it is: two messages of fixed size, within a time limit."""

    def __init__(
        self,
        sock: socket.socket,
        secret: bytes,
        loop: asyncio.AbstractEventLoop,
        proved: Callable[[_Guest, Caller], None],
        refused: Callable[[_Guest, str], None],
    ) -> None:
        self._sock, self._secret, self._loop = sock, secret, loop
        self._on_proof, self._on_refusal = proved, refused
        self._hello = self._challenge = self._heard = b""
        self._caller: Caller | None = None
        self._wanted = HELLO_SIZE
        self._limit = loop.call_later(PATIENCE, self._too_late)
        loop.add_reader(sock.fileno(), self._read)

    def __repr__(self) -> str:
        return f"<_Guest {self.name}: {self._caller or 'said nothing'}>"

    @property
    def name(self) -> str:
        """Where it comes from."""
        with contextlib.suppress(OSError):
            if self._sock.family == socket.AF_UNIX:
                return f"pid {peer_pid(self._sock)} of this node"
            host, port = self._sock.getpeername()[:2]
            return f"{host} port {port}"
        return "one that has gone again"

    def leave(self) -> socket.socket:
        """It is no guest any longer; its socket is the caller's."""
        self._limit.cancel()
        self._loop.remove_reader(self._sock.fileno())
        return self._sock

    def tell(self, data: bytes) -> None:
        """Send it a few bytes: there is room for them in a socket that was just made, or they get lost."""
        with contextlib.suppress(OSError):
            self._sock.send(data)

    def _too_late(self) -> None:
        self._on_refusal(self, f"it did not prove within {PATIENCE:g} s that it knows the secret of this group")

    def _read(self) -> None:
        try:
            data = self._sock.recv(self._wanted - len(self._heard))
        except BlockingIOError:
            return
        except OSError as error:
            self._on_refusal(self, f"it has gone again ({error.strerror or error})")
            return
        if not data:
            self._on_refusal(self, "it has gone again")
            return
        self._heard += data
        if len(self._heard) == self._wanted:
            heard, self._heard = self._heard, b""
            try:
                self._hear(heard)
            except Stranger as stranger:
                self._on_refusal(self, str(stranger))

    def _hear(self, message: bytes) -> None:
        if self._caller is None:
            self._caller, self._hello = read_hello(message), message
            self._challenge = challenge(self._secret, message)
            self._wanted = PROOF_SIZE
            self.tell(self._challenge)
        else:
            check_proof(self._secret, self._hello, self._challenge, message)
            self._on_proof(self, self._caller)


def _has_hung_up(sock: socket.socket) -> bool:
    try:
        return not sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False
    except OSError:
        return True


def peer_pid(sock: socket.socket) -> int:
    """Who made the other end of a Unix socket, or listens there; 0: a process that cannot be seen from here."""
    pid, _, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
    return int(pid)
