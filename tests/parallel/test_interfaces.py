"""Which interface has an address, by the kernel's table."""

from __future__ import annotations

import ipaddress
import socket
import struct
import sys

import pytest

from aexec.parallel import interfaces
from aexec.parallel.interfaces import AddressEntry, Interface, entries_in, find, interface_of

NAMES = {1: "lo", 2: "eth0", 3: "eth1"}


def entry(number, address, label=""):
    return AddressEntry(number, ipaddress.ip_address(address), label)


TABLE = [
    entry(1, "127.0.0.1", "lo"),
    entry(2, "192.0.2.2", "eth0"),
    entry(3, "10.0.0.5", "eth1"),
    entry(3, "10.0.0.6", "eth1:0"),
    entry(1, "::1"),
    entry(2, "fe80::1"),
    entry(3, "fe80::1"),
    entry(3, "fd00::2"),
    entry(9, "10.9.9.9", "gone"),
]


def look_up(address):
    return find(ipaddress.ip_address(address), TABLE, NAMES)


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("192.0.2.2", Interface("eth0", "eth0", is_loopback=False)),
        ("10.0.0.5", Interface("eth1", "eth1", is_loopback=False)),
        ("10.0.0.6", Interface("eth1", "eth1:0", is_loopback=False)),
        ("fd00::2", Interface("eth1", "eth1", is_loopback=False)),
        ("fe80::1%eth1", Interface("eth1", "eth1", is_loopback=False)),
        ("fe80::1%3", Interface("eth1", "eth1", is_loopback=False)),
        ("127.0.0.3", Interface("lo", "lo", is_loopback=True)),
        ("::1", Interface("lo", "lo", is_loopback=True)),
    ],
)
def test_the_interface_that_has_an_address_is_found(address, expected):
    """G38: of two networks, by a second address, by IPv6, in a zone, and in loopback's 16 million."""
    assert look_up(address) == expected


@pytest.mark.parametrize("address", ["10.0.0.7", "fd00::3", "fe80::1%lo", "10.9.9.9"])
def test_an_address_that_nothing_here_has_is_none(address):
    """Also one whose interface went away while we looked."""
    assert look_up(address) is None


def test_this_machine_has_loopback():
    """By its real table, in both families' terms."""
    assert interface_of("127.0.0.3") == Interface("lo", "lo", is_loopback=True)
    assert interface_of("a-host") is None
    assert interface_of("203.0.113.9") is None


def test_every_address_of_this_machine_has_a_name():
    """What the kernel lists is found again."""
    table = interfaces.read_entries()
    assert table
    names = dict(socket.if_nameindex())
    for each in table:
        found = find(each.address, [each], names)
        assert found is not None
        assert found.name == names[each.interface]


def test_another_system_says_nothing(monkeypatch):
    """Only Linux has this table."""
    monkeypatch.setattr(sys, "platform", "darwin")
    assert interfaces.read_entries() == []


def packet(number, family, *attributes):
    body = struct.pack("=BBBBI", family, 24, 0, 0, number)
    for kind, value in attributes:
        body += struct.pack("=HH", 4 + len(value), kind) + value + bytes(-len(value) % 4)
    return struct.pack("=IHHII", 16 + len(body), 20, 2, 1, 0) + body


def test_an_answer_of_the_kernel_is_read():
    """The local end of a tunnel rather than its peer, a label, and IPv6, which has neither."""
    local, peer, six = (ipaddress.ip_address(text).packed for text in ("10.0.0.5", "10.0.0.1", "fd00::2"))
    answer = packet(3, 2, (1, peer), (2, local), (3, b"eth1:0\0")) + packet(2, 10, (1, six)) + packet(4, 2, (9, b"x"))
    assert list(entries_in(answer)) == [entry(3, "10.0.0.5", "eth1:0"), entry(2, "fd00::2")]


@pytest.mark.parametrize("length", [0, 3, 15, 20, 23, 27])
def test_an_answer_that_breaks_off_ends_there(length):
    """Nothing is made up, and nothing loops."""
    whole = packet(2, 2, (2, bytes(4)))
    assert list(entries_in(whole[:length])) == []
    assert list(entries_in(bytes(length))) == []
