"""Settings of backend ``mp`` on several nodes: how many there are, and how the others come to this one."""

from __future__ import annotations

import dataclasses
import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from aexec.config.checks import seconds, sequence_of_text, whole
from aexec.errors import ConfigError

__all__ = ("DEFAULT_ADDRESS", "DEFAULT_PORT", "NodeOptions")

DEFAULT_ADDRESS = "127.0.0.1"
DEFAULT_PORT = 29501
_PORTS = 1 << 16


@dataclass(frozen=True, kw_only=True)  # without slots: it stands beside RayOptions, which has them
class NodeOptions:
    """Several nodes, each with a part of the ranks.

    The executor is on node 0, the leader; on each other node ``aexec worker`` has that node's ranks.

    Attributes:
        nnodes: Nodes, this one counted.
        node_rank: Which of them this is; an executor is on node 0.
        master_addr: The leader's address, by which the other nodes reach it; it listens there and
            nowhere else.
        master_port: Its port; 0: one that is free, which the start's progress tells.
        node_key_file: File with the key that all nodes have, and that only its owner can read;
            None: that of ``AEXEC_NODE_KEY`` or ``AEXEC_NODE_KEY_FILE``.
        node_allow: Addresses or networks, as in ``10.0.0.0/24``, that nodes may come from;
            empty: any, for without the key nobody is heard.
        node_timeout: Seconds without a sign of life from a node after which it counts as lost,
            and this one for it.
        node_interface: Network interface whose address this node has for the others, as in
            ``eth1``; ``AEXEC_HOST_IP`` names the address itself, and is stronger. None: that of ``master_addr``.
        ranks_per_node: Ranks of each node, in order; None: equally many.
    """

    nnodes: int = 1
    node_rank: int = 0
    master_addr: str = DEFAULT_ADDRESS
    master_port: int = DEFAULT_PORT
    node_key_file: str | None = None
    node_allow: Sequence[str] = ()
    node_timeout: float = 3.0
    node_interface: str | None = None
    ranks_per_node: Sequence[int] | None = None

    def __post_init__(self) -> None:
        """Refuse what no set of nodes could be."""
        whole(self, 1, "nnodes")
        whole(self, 0, "node_rank", "master_port")
        seconds(self, "node_timeout")
        sequence_of_text(self, "node_allow")
        if self.node_rank >= self.nnodes:
            raise ConfigError(
                f"ExecutorConfig.node_rank is {self.node_rank} and nnodes is {self.nnodes}: nodes are counted from 0"
            )
        if self.master_port >= _PORTS:
            raise ConfigError(f"ExecutorConfig.master_port is {self.master_port!r}: expected 0 to {_PORTS - 1}")
        _check_address(self.master_addr)
        for network in self.node_allow:
            _check_network(network)
        _check_counts(self)

    def node_settings(self) -> tuple[str, ...]:
        """Names of these settings that differ from their defaults."""
        return tuple(each.name for each in dataclasses.fields(NodeOptions) if getattr(self, each.name) != each.default)


def _check_address(address: Any) -> None:
    if not isinstance(address, str) or not address.strip():
        raise ConfigError(f"ExecutorConfig.master_addr is {address!r}: expected the leader's address or name")
    try:
        found = ipaddress.ip_address(address)
    except ValueError:
        return  # a name
    if found.is_unspecified:
        raise ConfigError(
            f"ExecutorConfig.master_addr is {address!r}, which means every network of this machine: expected the one "
            "address by which the other nodes reach it"
        )


def _check_network(network: str) -> None:
    try:
        ipaddress.ip_network(network)
    except ValueError as error:
        raise ConfigError(
            f"ExecutorConfig.node_allow has {network!r}: expected an address, or a network such as 10.0.0.0/24 ({error})"
        ) from error


def _check_counts(options: NodeOptions) -> None:
    counts = options.ranks_per_node
    if counts is None:
        return
    if isinstance(counts, str) or not all(type(count) is int and count > 0 for count in counts):
        raise ConfigError(f"ExecutorConfig.ranks_per_node is {counts!r}: expected a positive number for each node")
    if len(counts) != options.nnodes:
        raise ConfigError(
            f"ExecutorConfig.ranks_per_node is {counts!r} and nnodes is {options.nnodes}: expected {options.nnodes} "
            "numbers, one for each node"
        )
