"""The socket that a leader listens on, and what the kernel keeps away from it.

Anybody may connect. A connection that ZMQ has accepted costs a descriptor until its handshake is
over or too late. So the kernel is asked to keep those that say nothing to itself (followers speak
first), for an hour; and while too many are in the middle of their handshake, it is told to answer
nobody: a follower that comes then is let in a second later, when its system asks again.

Source: Linux, ``tcp(7)``, TCP_DEFER_ACCEPT; ``socket(7)``, SO_ATTACH_FILTER.
"""

from __future__ import annotations

import contextlib
import ctypes
import ipaddress
import socket
import struct
import sys
from typing import Final

__all__ = ("Door", "address_text")

_SILENT: Final = 3600  # seconds for which the kernel keeps a connection that says nothing
_BACKLOG: Final = 1024
_WILDCARDS: Final = frozenset(("0.0.0.0", "::"))  # noqa: S104 - these are refused
_ATTACH_FILTER, _DETACH_FILTER = 26, 27  # linux/asm-generic/socket.h
_DROP_ALL: Final = struct.pack("HBBI", 0x06, 0, 0, 0)  # return 0: nothing of the packet is kept


class Door:
    """A listening socket of one address, which can be shut for a while.

    Args:
        host: The address: one of this node's, no wildcard and no name.
        port: The port; 0: the kernel chooses.
        silent: Seconds for which a connection that says nothing is nobody's business.

    Raises:
        ValueError: The address is none, or a wildcard.
        OSError: It is none of this node's, or the port is taken.
    """

    def __init__(self, host: str, port: int, *, silent: int = _SILENT) -> None:
        found = _one_address(host)
        family = socket.AF_INET6 if found.version == 6 else socket.AF_INET
        self._sock = socket.socket(family, socket.SOCK_STREAM)
        self.is_shut = False
        try:
            self._sock.setblocking(False)
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if sys.platform == "linux":
                self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_DEFER_ACCEPT, silent)
            (*_, place), *_ = socket.getaddrinfo(host, port, family, socket.SOCK_STREAM, 0, socket.AI_NUMERICHOST)
            self._sock.bind(place)
            self._sock.listen(_BACKLOG)
        except BaseException:
            self._sock.close()
            raise
        self.address: tuple[str, int] = (host, int(self._sock.getsockname()[1]))

    def __repr__(self) -> str:
        return f"<Door at {address_text(*self.address)}{', shut' if self.is_shut else ''}>"

    def hand_out(self) -> int:
        """A descriptor of the socket, for whoever accepts; it is his."""
        return self._sock.dup().detach()

    def shut(self) -> None:
        """Let nobody in for now; connections that there are go on."""
        if not self.is_shut and sys.platform == "linux":
            program = ctypes.create_string_buffer(_DROP_ALL)
            pointer = struct.pack("HL", 1, ctypes.addressof(program))
            with contextlib.suppress(OSError):
                self._sock.setsockopt(socket.SOL_SOCKET, _ATTACH_FILTER, pointer)
                self.is_shut = True

    def open(self) -> None:
        """Let people in again."""
        if self.is_shut:
            self.is_shut = False
            with contextlib.suppress(OSError):
                self._sock.setsockopt(socket.SOL_SOCKET, _DETACH_FILTER, 0)

    def close(self) -> None:
        """Listen no longer, once whoever accepts has closed his too."""
        self._sock.close()


def address_text(host: str, port: int) -> str:
    """As it stands in a URL."""
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def _one_address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    try:
        found = ipaddress.ip_address(host)
    except ValueError as error:
        raise ValueError(f"{host!r} cannot be listened on: expected an address of this node, as 10.0.0.5") from error
    if str(found) in _WILDCARDS:
        raise ValueError(
            f"{host!r} is every address of this node, and others must not be listened on: expected one, as 10.0.0.5"
        )
    return found
