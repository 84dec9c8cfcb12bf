"""Where the leader listens for the other nodes, and by which address its ranks are reached."""

from __future__ import annotations

import ipaddress
import socket
from typing import NamedTuple

from aexec import environ
from aexec.config import ExecutorConfig
from aexec.config.nodes import DEFAULT_ADDRESS
from aexec.errors import ConfigError
from aexec.parallel.interfaces import address_of, interface_of

__all__ = ("LeaderPlace", "leader_place")


class LeaderPlace(NamedTuple):
    """The addresses of the leader's node.

    Attributes:
        listen: Where it listens, and nowhere else.
        node_ip: By which ranks of other nodes reach its own.
    """

    listen: str
    node_ip: str


def leader_place(config: ExecutorConfig) -> LeaderPlace:
    """Choose them; asks the system for names and interfaces, which blocks.

    ``AEXEC_HOST_IP``, then ``node_interface``, say which address the node has for others; where
    neither does, it is ``master_addr``. One that was chosen and a ``master_addr`` that was not
    given mean: listen there.

    Raises:
        ConfigError: There is no such interface, or this machine has no such address.
    """
    own = environ.HOST_IP.read() or _of_interface(config.node_interface)
    if own and config.master_addr == DEFAULT_ADDRESS:
        return LeaderPlace(_checked(own, environ.HOST_IP.name), own)
    listen = _resolved(config.master_addr)
    return LeaderPlace(listen, own or listen)


def _of_interface(name: str | None) -> str:
    if name is None:
        return ""
    found = address_of(name)
    if found is None:
        have = ", ".join(interface for _, interface in socket.if_nameindex())
        raise ConfigError(f"node_interface is {name!r}, which has no address here: expected one of {have}")
    return found


def _resolved(host: str) -> str:
    """An address of this machine that the host name, or address, means."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError as error:
        raise ConfigError(
            f"master_addr is {host!r}, which nobody knows ({error}): expected node 0's address"
        ) from error
    addresses = [str(each[4][0]) for each in found]
    return next((each for each in addresses if interface_of(each)), "") or _checked(addresses[0], "master_addr")


def _checked(address: str, setting: str) -> str:
    try:
        is_wildcard = ipaddress.ip_address(address).is_unspecified
    except ValueError:
        raise ConfigError(f"{setting} is {address!r}: expected an address of this machine") from None
    if is_wildcard or interface_of(address) is None:
        raise ConfigError(
            f"{setting} is {address!r}, which is no address of this machine, and the executor is node 0: expected one "
            "by which the other nodes reach it"
        )
    return address
