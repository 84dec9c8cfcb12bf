"""Two ranks meet over TCP, and believe each other when both have proved that they know the secret.

Anybody can connect to a port. The handshake is that of the lines between driver and workers
(:mod:`aexec.transport.handshake`), with a key of its own made of the same secret, so that
nothing said here is of any use there. Both ends block, with a deadline; who listens hears all
who have come at the same time, so that one who says nothing keeps nobody waiting.
"""

from __future__ import annotations

import contextlib
import hmac
import selectors
import socket
import time
from collections.abc import Collection, Generator
from typing import Final

from aexec.errors import ConfigError
from aexec.transport.handshake import (
    CHALLENGE_SIZE,
    HELLO_SIZE,
    PROOF_SIZE,
    Stranger,
    Verdict,
    answer_challenge,
    challenge,
    check_proof,
    hello,
    read_hello,
)
from aexec.transport.tcp import tune

__all__ = ("admit", "call", "key_of", "left", "listen", "receive")

PATIENCE: Final = 5.0  # seconds in which a connection has to prove itself
MOST_AT_THE_DOOR: Final = 64  # connections that have proved nothing; the one that waits longest makes room
_BACKLOG = 128
_WELCOME, _UNKNOWN = bytes([Verdict.WELCOME]), bytes([Verdict.UNKNOWN_RANK])


def key_of(secret: bytes) -> bytes:
    """The key of the stages.

    Raises:
        ConfigError: There is no secret to make it of.
    """
    if not secret:
        raise ConfigError(
            "ranks on several nodes prove to each other that they belong together, and the backend has set no "
            "WorkerContext.group_secret: expected bytes that only the group knows"
        )
    return hmac.digest(secret, b"aexec stages", "sha256")


def listen(host: str, port: int) -> socket.socket:
    """Listen at an address of this machine; the port may be one that a ``PortReservation`` keeps.

    Raises:
        OSError: It is none of this machine's, or taken.
    """
    made = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind((host, port))
        made.listen(_BACKLOG)
    except BaseException:
        made.close()
        raise
    return made


def call(address: tuple[str, int], key: bytes, rank: int, deadline: float) -> socket.socket:
    """Connect to a rank that listens, as another one.

    Args:
        address: Where it listens.
        key: See :func:`key_of`.
        rank: The caller's.
        deadline: For all of it, on the monotonic clock.

    Raises:
        OSError: Nobody is there, or it took too long.
        Stranger: Whoever is there does not know the secret.
    """
    connection = socket.create_connection(address, left(deadline))
    try:
        _introduce(connection, key, rank, deadline)
    except BaseException:
        connection.close()
        raise
    tune(connection, always_read=False)
    return connection


def admit(
    listener: socket.socket, key: bytes, ranks: Collection[int], deadline: float
) -> Generator[tuple[int, socket.socket]]:
    """Let ranks in, each once, in the order in which they come; it ends when all are in.

    Close it, and whoever has proved nothing yet is turned away.

    Raises:
        TimeoutError: Some did not come in time.
    """
    wanted, door = set(ranks), _Door(listener, key)
    with contextlib.closing(door):
        while wanted:
            for rank, connection in door.hear(wanted, left(deadline)):
                wanted.discard(rank)
                tune(connection, always_read=False)
                yield rank, connection


def receive(connection: socket.socket, size: int, deadline: float) -> bytes:
    """So many bytes.

    Raises:
        OSError: They do not come in time, or the other end is gone.
    """
    data = b""
    while len(data) < size:
        connection.settimeout(left(deadline))
        more = connection.recv(size - len(data))
        if not more:
            raise ConnectionResetError("it closed the connection")
        data += more
    return data


def _introduce(connection: socket.socket, key: bytes, rank: int, deadline: float) -> None:
    said = hello(rank, "work")
    connection.sendall(said)
    connection.sendall(answer_challenge(key, said, receive(connection, CHALLENGE_SIZE, deadline)))
    if receive(connection, 1, deadline) != _WELCOME:
        raise Stranger("this rank is not expected there, or is there already")


def left(deadline: float) -> float:
    """Seconds until then.

    Raises:
        TimeoutError: It has passed.
    """
    seconds = deadline - time.monotonic()
    if seconds <= 0:
        raise TimeoutError("timed out")
    return seconds


class _Guest:
    """A connection that has yet to prove whose it is: two messages of fixed size."""

    def __init__(self, connection: socket.socket, key: bytes) -> None:
        self.connection, self.until = connection, time.monotonic() + PATIENCE
        self._key = key
        self._hello = self._challenge = self._heard = b""

    def __repr__(self) -> str:
        return f"<_Guest: {'challenged' if self._hello else 'said nothing'}>"

    def hear(self) -> int | None:
        """What it says next; its rank once it has proved it.

        Raises:
            Stranger: It does not know the secret.
            OSError: It has gone again.
        """
        wanted = PROOF_SIZE if self._hello else HELLO_SIZE
        data = self.connection.recv(wanted - len(self._heard))
        if not data:
            raise ConnectionResetError("it closed the connection")
        self._heard += data
        if len(self._heard) < wanted:
            return None
        heard, self._heard = self._heard, b""
        if self._hello:
            check_proof(self._key, self._hello, self._challenge, heard)
            return read_hello(self._hello).rank
        read_hello(heard)
        self._hello, self._challenge = heard, challenge(self._key, heard)
        self.connection.send(self._challenge)
        return None


class _Door:
    """Those who have come and proved nothing yet, the one that waits longest first."""

    def __init__(self, listener: socket.socket, key: bytes) -> None:
        self._listener, self._key = listener, key
        self._guests: dict[_Guest, None] = {}
        self._selector = selectors.DefaultSelector()
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ)

    def __repr__(self) -> str:
        return f"<_Door: {len(self._guests)} have proved nothing yet>"

    def hear(self, wanted: Collection[int], seconds: float) -> Generator[tuple[int, socket.socket]]:
        """Wait until somebody says something, and give those who have proved that they are wanted."""
        for ready, _ in self._selector.select(min(seconds, PATIENCE)):
            guest: _Guest | None = ready.data
            if guest is None:
                self._let_in()
            elif guest in self._guests and (rank := self._heard(guest, wanted)) is not None:
                yield rank, guest.connection
        now = time.monotonic()
        for guest in [guest for guest in self._guests if guest.until < now]:
            self._turn_away(guest)

    def close(self) -> None:
        """Turn away whoever is still there."""
        for guest in list(self._guests):
            self._turn_away(guest)
        self._selector.close()

    def _let_in(self) -> None:
        with contextlib.suppress(OSError):
            connection, _ = self._listener.accept()
            connection.setblocking(False)
            if len(self._guests) >= MOST_AT_THE_DOOR:
                self._turn_away(next(iter(self._guests)))
            guest = _Guest(connection, self._key)
            self._guests[guest] = None
            self._selector.register(connection, selectors.EVENT_READ, guest)

    def _heard(self, guest: _Guest, wanted: Collection[int]) -> int | None:
        """The rank of one who has proved it, and is no guest any longer."""
        try:
            rank = guest.hear()
            if rank is None:
                return None
            guest.connection.send(_WELCOME if rank in wanted else _UNKNOWN)
        except BlockingIOError:
            return None
        except (Stranger, OSError):
            self._turn_away(guest)
            return None
        if rank not in wanted:
            self._turn_away(guest)
            return None
        self._forget(guest)
        return rank

    def _forget(self, guest: _Guest) -> None:
        self._selector.unregister(guest.connection)
        del self._guests[guest]

    def _turn_away(self, guest: _Guest) -> None:
        self._forget(guest)
        guest.connection.close()
