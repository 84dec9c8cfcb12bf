"""Who may have a line at all: ZMQ asks for each connection (ZAP), before a byte of it is passed on.

Source: RFC 27/ZAP; libzmq 4.3, ``src/zap_client.cpp``.
"""

from __future__ import annotations

import hmac
import ipaddress
from collections.abc import Callable, Sequence
from typing import Final

from aexec.transport.curve.sockets import Room, Served

__all__ = ("DOMAIN", "Gate", "Network", "networks_of", "verdict")

DOMAIN: Final = b"aexec"
_PLACE: Final = "inproc://zeromq.zap.01"  # ZMQ's own name for whom to ask
_AT_ONCE: Final = 32  # questions in one turn of the loop

Network = ipaddress.IPv4Network | ipaddress.IPv6Network


def networks_of(allow: Sequence[str]) -> tuple[Network, ...]:
    """Read an allow-list of addresses and networks.

    Raises:
        ValueError: One of them is neither; names it.
    """
    found: list[Network] = []
    for text in allow:
        try:
            found.append(ipaddress.ip_network(text, strict=False))
        except ValueError as error:
            raise ValueError(
                f"{text!r} in the allow-list of nodes: expected an address or a network, as 10.0.0.7 or 10.0.0.0/24"
            ) from error
    return tuple(found)


def is_allowed(address: str, networks: Sequence[Network]) -> bool:
    """An address is in one of the networks; without any, each is."""
    if not networks:
        return True
    try:
        found = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return False
    if isinstance(found, ipaddress.IPv6Address) and found.ipv4_mapped is not None:
        found = found.ipv4_mapped
    return any(found in network for network in networks)


def verdict(question: Sequence[bytes], public_key: bytes, networks: Sequence[Network]) -> str:
    """Why a connection is refused; empty: it is let in. Pure.

    Args:
        question: As ZAP asks it, from the domain on: domain, address, identity, mechanism, credentials.
        public_key: Of followers, raw.
        networks: Where they may be.
    """
    if len(question) < 4:
        return "the question is none of ZAP's"
    domain, address, _, mechanism, *credentials = question
    if domain != DOMAIN or mechanism != b"CURVE" or len(credentials) != 1:
        return "it has no key"
    if not hmac.compare_digest(credentials[0], public_key):
        return "it has another key"
    if not is_allowed(address.decode("ascii", "replace"), networks):
        return "its address is not allowed"
    return ""


class Gate:
    """Answers ZMQ's questions, on the loop.

    Args:
        room: Of the socket that it is asked about.
        public_key: Of followers, as ZMQ writes keys.
        networks: Where they may be.
        refused: Told of each that is refused: its address, and why.
    """

    def __init__(
        self, room: Room, public_key: bytes, networks: Sequence[Network], refused: Callable[[str, str], None]
    ) -> None:
        import zmq
        from zmq.utils import z85

        self._public_key, self._networks, self._refused = z85.decode(public_key), networks, refused
        self._again, self._now = zmq.Again, zmq.NOBLOCK
        desk = room.context.socket(zmq.REP)
        desk.set(zmq.LINGER, 0)
        desk.bind(_PLACE)
        self._served: Served = room.serve(desk, self._answer)

    def _answer(self) -> bool:
        for _ in range(_AT_ONCE):
            try:
                version, number, *question = self._served.sock.recv_multipart(self._now)
            except self._again:
                return False
            why = verdict(question, self._public_key, self._networks)
            if why:
                address = question[1].decode("ascii", "replace") if len(question) > 1 else "?"
                self._refused(address, why)
            status, text = (b"400", why.encode()) if why else (b"200", b"")
            self._served.sock.send_multipart([version, number, status, text, b"", b""])
        return True
