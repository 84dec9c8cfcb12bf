"""Which network interface an address belongs to, asked of the kernel.

Libraries that open connections of their own want the *name* of a network. The address of a
node is what is known, and the kernel's table of addresses (rtnetlink, which needs no rights
and no package) says which interface has it: also for a second address of an interface, for
IPv6, and for the many loopback addresses that are in no table.

Source: Linux, ``rtnetlink(7)``, ``linux/rtnetlink.h``, ``linux/if_addr.h``.
"""

from __future__ import annotations

import contextlib
import ipaddress
import socket
import struct
import sys
from collections.abc import Iterable, Iterator
from typing import NamedTuple

__all__ = ("AddressEntry", "Interface", "address_of", "entries_in", "interface_of", "read_entries")

_REQUEST = struct.Struct("=IHHIIBxxx")  # nlmsghdr, then rtgenmsg: any family
_HEADER = struct.Struct("=IHHII")  # length, type, flags, sequence, port
_IFADDRMSG = struct.Struct("=BBBBI")  # family, prefix length, flags, scope, interface
_ATTRIBUTE = struct.Struct("=HH")  # length, type
_NLMSG_ERROR, _NLMSG_DONE, _RTM_NEWADDR, _RTM_GETADDR = 2, 3, 20, 22
_REQUEST_DUMP = 0x301  # NLM_F_REQUEST | NLM_F_DUMP
_IFA_ADDRESS, _IFA_LOCAL, _IFA_LABEL = 1, 2, 3
_MOST_BYTES = 1 << 16
_LIMIT = 5.0  # seconds for the kernel's answer

Address = ipaddress.IPv4Address | ipaddress.IPv6Address


class Interface(NamedTuple):
    """A network interface, as an address of it is listed.

    Attributes:
        name: As in ``eth0``.
        label: What ``getifaddrs`` calls it for this address: the name, or an alias such as ``eth0:1``.
        is_loopback: It leads nowhere but here.
    """

    name: str
    label: str
    is_loopback: bool


class AddressEntry(NamedTuple):
    """A line of the kernel's table of addresses.

    Attributes:
        interface: Its number.
        address: Of this machine, without a zone.
        label: Of the address; empty: the interface's name.
    """

    interface: int
    address: Address
    label: str


def interface_of(address: str) -> Interface | None:
    """The interface that has this address; None: this machine has no such address."""
    try:
        wanted = ipaddress.ip_address(address)
    except ValueError:
        return None
    names = dict(socket.if_nameindex())
    return find(wanted, read_entries(), names)


def address_of(interface: str) -> str | None:
    """The first address of an interface, those of IPv4 before others, and none that only its link knows; None: it has none."""
    names = dict(socket.if_nameindex())
    found = [each.address for each in read_entries() if names.get(each.interface) == interface]
    found = sorted((each for each in found if not each.is_link_local), key=lambda each: each.version)
    return str(found[0]) if found else None


def find(wanted: Address, entries: Iterable[AddressEntry], names: dict[int, str]) -> Interface | None:
    """The first interface of the table that has an address. Pure.

    Args:
        wanted: May have a zone, as in ``fe80::1%eth0``, and then only that interface counts.
        entries: The table.
        names: Of the interfaces, by number.
    """
    zone = getattr(wanted, "scope_id", None)
    plain = ipaddress.ip_address(int(wanted).to_bytes(wanted.max_prefixlen // 8, "big"))
    for entry in entries:
        name = names.get(entry.interface)
        if name is None or (zone and zone not in (name, str(entry.interface))):
            continue
        if entry.address == plain or (plain.is_loopback and entry.address.is_loopback):
            return Interface(name, entry.label or name, entry.address.is_loopback)
    return None


def read_entries() -> list[AddressEntry]:
    """All addresses of this machine; none where the system is not Linux, or does not say."""
    found: list[AddressEntry] = []
    if sys.platform == "linux":
        with (
            contextlib.suppress(OSError),
            socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE) as kernel,
        ):
            kernel.settimeout(_LIMIT)
            kernel.send(_REQUEST.pack(_REQUEST.size, _RTM_GETADDR, _REQUEST_DUMP, 1, 0, socket.AF_UNSPEC))
            is_whole = False
            while not is_whole:
                answer = kernel.recv(_MOST_BYTES)
                found.extend(entries_in(answer))
                is_whole = any(kind in (_NLMSG_DONE, _NLMSG_ERROR) for kind, _ in _messages(answer))
    return found


def entries_in(answer: bytes) -> Iterator[AddressEntry]:
    """The addresses in one packet of the kernel's answer. Pure."""
    for kind, body in _messages(answer):
        if kind == _RTM_NEWADDR and len(body) >= _IFADDRMSG.size:
            attributes = dict(_attributes(body[_IFADDRMSG.size :]))
            local = attributes.get(_IFA_LOCAL) or attributes.get(_IFA_ADDRESS, b"")  # IPv6 has the latter only
            if len(local) in (4, 16):
                label = attributes.get(_IFA_LABEL, b"").rstrip(b"\0").decode(errors="replace")
                yield AddressEntry(_IFADDRMSG.unpack_from(body)[4], ipaddress.ip_address(local), label)


def _messages(answer: bytes) -> Iterator[tuple[int, bytes]]:
    while len(answer) >= _HEADER.size:
        length, kind, *_ = _HEADER.unpack_from(answer)
        if length < _HEADER.size:
            return
        yield kind, answer[_HEADER.size : length]
        answer = answer[_aligned(length) :]


def _attributes(body: bytes) -> Iterator[tuple[int, bytes]]:
    while len(body) >= _ATTRIBUTE.size:
        length, kind = _ATTRIBUTE.unpack_from(body)
        if length < _ATTRIBUTE.size:
            return
        yield kind, body[_ATTRIBUTE.size : length]
        body = body[_aligned(length) :]


def _aligned(length: int) -> int:
    return (length + 3) & ~3
