"""Where ranks on several nodes meet: a port that is theirs, and the network it is on.

``torch.distributed`` meets at ``tcp://host:port``, and rank 0 begins to listen there only when
it joins, which may be minutes after the address was given out. A :class:`PortReservation`
keeps the port until then: bound, so that the kernel gives it to nobody who asks for any port,
but not listening, so that the one who knows it can still listen there beside it (both sides
with ``SO_REUSEADDR``, which torch sets).

It is bound on all addresses of the machine, for two reasons: torch listens on all of them,
whatever its URL says, and the kernel does give one number twice for different addresses. As it
does not listen, nobody can connect to it.

Source: torch 2.13, ``c10d/TCPStore.cpp`` and ``c10d/socket.cpp`` (``[::]``, then ``0.0.0.0``);
Linux, ``inet_csk_get_port``.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Mapping

from aexec.errors import ConfigError
from aexec.parallel.interfaces import Interface, interface_of

__all__ = ("PortReservation", "network_environment", "tcp_address", "tcp_url")


class PortReservation:
    """A port of this machine that is kept for one rendezvous.

    Made by a process on rank 0's node before the address is announced, and closed once rank 0
    listens or the start has failed.

    Args:
        host: The address by which other nodes reach this one; a loopback address when there are none.

    Attributes:
        host: As given.
        port: What the kernel chose.

    Raises:
        ConfigError: The kernel has no port left.
    """

    def __init__(self, host: str) -> None:
        self.host = host
        self._socket: socket.socket | None = _bound()
        self.port: int = self._socket.getsockname()[1]

    def __repr__(self) -> str:
        return f"<PortReservation {self.init_method}{'' if self._socket else ', let go'}>"

    @property
    def init_method(self) -> str:
        """For ``torch.distributed.init_process_group``, as in ``tcp://10.0.0.5:40123``."""
        return tcp_url(self.host, self.port)

    def close(self) -> None:
        """Let go of the port; whoever listens there by now stays."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None


def network_environment(address: str, there: Mapping[str, str]) -> dict[str, str]:
    """Which network a rank's libraries take, if nobody has said: the one that its node's address is on.

    Args:
        address: Of this node; a loopback address when all ranks are on it.
        there: The rank's environment so far; what it says already is kept.

    Returns:
        What to add to it; empty also where no interface of this machine has the address (it is
        translated on the way).
    """
    found = interface_of(address)
    if found is None:
        return {}
    return {name: value for name, value in _names_for(found).items() if not there.get(name)}


def tcp_url(host: str, port: int) -> str:
    """``tcp://host:port``, with brackets around an IPv6 address.

    >>> tcp_url("fd00::2", 40123)
    'tcp://[fd00::2]:40123'
    """
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def tcp_address(init_method: str) -> tuple[str, int] | None:
    """Host and port of ``tcp://host:port``; None for anything else.

    >>> tcp_address("tcp://[fd00::2]:40123"), tcp_address("file:///tmp/meeting")
    (('fd00::2', 40123), None)
    """
    scheme, _, rest = init_method.partition("://")
    host, _, port = rest.rpartition(":")
    if scheme != "tcp" or not host or not (port.isascii() and port.isdecimal()):
        return None
    return host.removeprefix("[").removesuffix("]"), int(port)


def _names_for(found: Interface) -> dict[str, str]:
    names = {"GLOO_SOCKET_IFNAME": found.label}
    if not found.is_loopback:  # on one node nccl does not need a network
        names["NCCL_SOCKET_IFNAME"] = f"={found.name}" if found.label == found.name else found.name
    return names


def _bound() -> socket.socket:
    """Bound as torch will bind: on ``[::]`` for IPv4 as well, or on ``0.0.0.0`` where there is no IPv6."""
    with contextlib.suppress(OSError):
        return _try_to_bind(socket.AF_INET6, "::")
    try:
        return _try_to_bind(socket.AF_INET, "0.0.0.0")  # noqa: S104 - it does not listen
    except OSError as error:
        raise ConfigError(
            f"no port is free for the ranks to meet at ({error}): expected one in net.ipv4.ip_local_port_range"
        ) from error


def _try_to_bind(family: socket.AddressFamily, everywhere: str) -> socket.socket:
    made = socket.socket(family, socket.SOCK_STREAM)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        made.bind((everywhere, 0))
    except OSError:
        made.close()
        raise
    return made
