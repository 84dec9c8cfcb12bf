"""What a TCP connection needs to be a line: no waiting for company, and an end when the other machine is gone."""

from __future__ import annotations

import contextlib
import select
import socket
from typing import Final

__all__ = ("GONE_AFTER", "notice_within", "tcp_pair", "tune")

GONE_AFTER: Final = 20.0  #: Seconds without a sign of the other machine after which it counts as gone.
_IDLE = 8  # seconds of silence before it is asked
_INTERVAL = 4  # seconds between questions
_QUESTIONS = 3
_PATIENCE = 5.0  # seconds for a connection within this node


def tune(sock: socket.socket, *, always_read: bool) -> None:
    """Make a connected TCP socket ready for frames; other sockets are left as they are.

    Args:
        sock: The socket.
        always_read: The peer reads at any time, whatever it does, as from a control line:
            what it does not acknowledge within ``GONE_AFTER`` it never will. On a line that
            waits for a thread that computes, a full window would look the same.
    """
    if sock.family not in (socket.AF_INET, socket.AF_INET6):
        return
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", _IDLE), ("TCP_KEEPINTVL", _INTERVAL), ("TCP_KEEPCNT", _QUESTIONS)):
        _set(sock, name, value)
    if always_read:
        _set(sock, "TCP_USER_TIMEOUT", int(GONE_AFTER * 1e3))


def notice_within(sock: socket.socket, seconds: float) -> None:
    """Let the kernel end a TCP connection whose link is cut within about so many seconds; others are left as they are.

    The two kernels ask each other, so that a process that is busy, or stopped, is no cut link.
    It is for a line that carries little: one whose window is full would look the same.

    Args:
        sock: A connected socket that was tuned.
        seconds: Seconds of silence; whole ones, and two at least.
    """
    if sock.family not in (socket.AF_INET, socket.AF_INET6):
        return
    whole = max(int(seconds), 2)
    for name, value in (("TCP_KEEPIDLE", 1), ("TCP_KEEPINTVL", 1), ("TCP_KEEPCNT", whole - 1)):
        _set(sock, name, value)
    _set(sock, "TCP_USER_TIMEOUT", whole * 1000)


def tcp_pair(host: str = "127.0.0.1") -> tuple[socket.socket, socket.socket]:
    """Two ends of a line over TCP, as between nodes; for tests, and to measure.

    Args:
        host: An address of this machine.
    """
    dialled = socket.socket()
    dialled.setblocking(False)
    with socket.create_server((host, 0)) as listening:
        listening.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            dialled.connect(listening.getsockname())
        poll = select.poll()
        poll.register(listening, select.POLLIN)
        poll.poll(_PATIENCE * 1e3)
        accepted, _ = listening.accept()
    for end in (accepted, dialled):
        tune(end, always_read=False)
    return accepted, dialled


def _set(sock: socket.socket, name: str, value: int) -> None:
    option = getattr(socket, name, None)  # not every system has them all
    if option is not None:
        sock.setsockopt(socket.IPPROTO_TCP, option, value)
