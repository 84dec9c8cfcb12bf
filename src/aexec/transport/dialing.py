"""The worker's way to its driver: dial, prove, and have the line."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from aexec.errors import MeetingFailed
from aexec.transport.handshake import CHALLENGE_SIZE, Line, Stranger, Verdict, answer_challenge, hello
from aexec.transport.links import SEND_BUFFER
from aexec.transport.tcp import tune

__all__ = ("MeetingPlace", "dial")

_PAUSE: Final = 0.05  # seconds before it is tried again, twice as long each time
_LONGEST_PAUSE: Final = 1.0
_TELLING: Final = {
    Verdict.TAKEN: "another process of this rank has this line already",
    Verdict.UNKNOWN_RANK: "the group has no such rank",
}


@dataclass(frozen=True, slots=True)
class MeetingPlace:
    """Where a worker finds its driver. It travels to the worker on a way that nobody else reads.

    Attributes:
        secret: Of the group.
        local: Name of an abstract Unix socket of the driver's node; empty: the worker is on another.
        remote: Address and port of the driver's node; None: nobody else comes.
    """

    secret: bytes = field(repr=False)
    local: str = ""
    remote: tuple[str, int] | None = None

    def __str__(self) -> str:
        ways = [f"unix socket @{self.local}"] if self.local else []
        return " or ".join([*ways, *([_tcp(self.remote)] if self.remote else [])])


class _Dropped(Exception):
    """The connection broke before there was a verdict: it may go better next time."""


def dial(place: MeetingPlace, rank: int, line: Line, timeout: float) -> socket.socket:
    """Get a line to the driver; blocks.

    Args:
        place: Where the driver waits.
        rank: Whose line it is.
        line: Which of its two.
        timeout: Seconds for all of it.

    Returns:
        The connected socket, ready for a channel; nothing was received on it but the handshake.

    Raises:
        MeetingFailed: Nobody is there, it is not our driver, or it does not want this rank.
    """
    deadline = time.monotonic() + timeout
    ways: list[tuple[str, Callable[[], socket.socket]]] = []
    if place.local:
        ways.append((f"@{place.local}", lambda: _connect_local(place.local, _left(deadline))))
    if (remote := place.remote) is not None:
        ways.append((_tcp(remote), lambda: socket.create_connection(remote, _left(deadline))))
    failures: list[str] = []
    for where, connect in ways:
        try:
            return _dial_until(connect, place.secret, rank, line, deadline)
        except Stranger as error:
            failures.append(f"{where}: {error}")
        except OSError as error:
            failures.append(f"{where}: {_because(error, timeout)}")
    raise MeetingFailed(rank, line, str(place) or "no address at all", "; ".join(failures) or "none was given")


def _dial_until(
    connect: Callable[[], socket.socket], secret: bytes, rank: int, line: Line, deadline: float
) -> socket.socket:
    """Try it, again and again if the driver drops us, as it may while strangers crowd it."""
    pause = _PAUSE
    while True:
        try:
            return _introduced(connect(), secret, rank, line, deadline)
        except (_Dropped, BlockingIOError):  # the latter: too many wait to be let in
            threading.Event().wait(min(pause, _left(deadline)))
            pause = min(2 * pause, _LONGEST_PAUSE)


def _introduced(sock: socket.socket, secret: bytes, rank: int, line: Line, deadline: float) -> socket.socket:
    try:
        _introduce(sock, secret, rank, line, deadline)
    except BaseException:
        sock.close()
        raise
    sock.settimeout(None)
    tune(sock, always_read=line == "control")
    return sock


def _introduce(sock: socket.socket, secret: bytes, rank: int, line: Line, deadline: float) -> None:
    said = hello(rank, line)
    try:
        sock.settimeout(_left(deadline))
        sock.sendall(said)
        proof = answer_challenge(secret, said, _receive(sock, CHALLENGE_SIZE, deadline))
        sock.sendall(proof)
        verdict = _receive(sock, 1, deadline)[0]
    except ConnectionError as error:
        raise _Dropped from error
    if verdict != Verdict.WELCOME:
        raise Stranger(_TELLING.get(Verdict(verdict), "") if verdict in set(Verdict) else f"it answers {verdict}")


def _receive(sock: socket.socket, size: int, deadline: float) -> bytes:
    data = b""
    while len(data) < size:
        sock.settimeout(_left(deadline))
        more = sock.recv(size - len(data))
        if not more:
            raise ConnectionResetError
        data += more
    return data


def _connect_local(name: str, timeout: float) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        sock.settimeout(timeout)
        sock.connect(f"\0{name}")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER)
    except BaseException:
        sock.close()
        raise
    return sock


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError
    return left


def _because(error: OSError, timeout: float) -> str:
    if isinstance(error, TimeoutError):
        return f"no answer within {timeout:g} s: is there a firewall between the nodes?"
    if isinstance(error, ConnectionRefusedError):
        return "nobody listens there: the driver has gone, has given up, or does not share this network"
    return error.strerror or str(error)


def _tcp(address: tuple[str, int]) -> str:
    host, port = address
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"
