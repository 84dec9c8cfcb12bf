"""Which actor becomes which rank, and which devices it sees: decided from what the actors say. Pure.

Ray makes actors in whatever order bundles come. Ranks are laid out so that neighbours are
near each other, the driver's node first, then nodes with few of our actors, then by address;
on a node by the device that Ray gave. A node is known by Ray's node id, never by its address;
that each node has an address of its own is checked, for ranks meet by it.
"""

from __future__ import annotations

import ipaddress
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from aexec.errors import ConfigError

__all__ = ("NodeFacts", "Ranking", "rerank")


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeFacts:
    """What an actor says of the place where Ray put it.

    Attributes:
        node_id: Ray's id of the node.
        node_ip: The node's address in Ray's node table.
        devices: Devices that Ray gave this actor, as Ray names them: numbers, UUIDs or MIG instances.
        visible: The node's own list of devices, in its order, if it has one.
        cpus: CPUs that a process of this node may use.
        pid: The actor's process.
    """

    node_id: str
    node_ip: str
    devices: tuple[str, ...] = ()
    visible: tuple[str, ...] = ()
    cpus: int = 1
    pid: int = 0


@dataclass(frozen=True, slots=True)
class Ranking:
    """The ranks of a group. ``str()`` of it is a table.

    Attributes:
        order: By rank: the index of its actor, as the facts were given.
        facts: By rank.
        local_ranks: By rank: its number among the ranks of its node.
        devices: By node id: the devices of all of its ranks, in the node's order; each once.
    """

    order: tuple[int, ...]
    facts: tuple[NodeFacts, ...]
    local_ranks: tuple[int, ...]
    devices: Mapping[str, tuple[str, ...]]

    @property
    def num_nodes(self) -> int:
        """Nodes that have a rank."""
        return len(self.devices)

    @property
    def address(self) -> str:
        """Where the ranks meet: rank 0's node; loopback where all are on one node."""
        ip = self.facts[0].node_ip
        if self.num_nodes > 1:
            return ip
        return "::1" if _address(ip)[0] == 6 else "127.0.0.1"

    def local_world_size(self, rank: int) -> int:
        """Ranks of the group on the node of ``rank``."""
        return sum(each.node_id == self.facts[rank].node_id for each in self.facts)

    def visible_devices(self, rank: int) -> tuple[str, ...]:
        """The devices of the group on the node of ``rank``: what its process is to see."""
        return self.devices[self.facts[rank].node_id]

    def device_index(self, rank: int) -> int | None:
        """Which of :meth:`visible_devices` is the rank's own; None: it was given none."""
        own = self.facts[rank].devices
        return self.visible_devices(rank).index(own[0]) if own else None

    def cpus(self, rank: int) -> int:
        """The rank's share of the CPUs of its node, one at least."""
        return max(1, self.facts[rank].cpus // self.local_world_size(rank))

    def __str__(self) -> str:
        rows = [("rank", "node", "address", "local rank", "device", "pid")]
        for rank, (each, local_rank) in enumerate(zip(self.facts, self.local_ranks, strict=True)):
            device = ", ".join(each.devices) or "-"
            rows.append((str(rank), each.node_id[:12], each.node_ip, str(local_rank), device, str(each.pid)))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def rerank(facts: Sequence[NodeFacts], driver_node: str, driver_ip: str = "", *, keep_order: bool = False) -> Ranking:
    """Lay out the ranks.

    Args:
        facts: Of each actor, in the order of its bundles.
        driver_node: Ray's id of the driver's node.
        driver_ip: Its address, if that is to be checked along with those of the actors' nodes.
        keep_order: The order of bundles is the order of ranks, for somebody asked for it.

    Raises:
        ConfigError: Two nodes share an address, or a node has two; the text has the table.
    """
    _check_addresses(facts, driver_node, driver_ip)
    actors = Counter(each.node_id for each in facts)

    def place(index: int) -> tuple[object, ...]:
        each = facts[index]
        node = (each.node_id != driver_node, actors[each.node_id], _address(each.node_ip), each.node_id)
        return (*node, _device_order(each), index)

    order = tuple(range(len(facts))) if keep_order else tuple(sorted(range(len(facts)), key=place))
    ranked = tuple(facts[index] for index in order)
    return Ranking(order, ranked, _local_ranks(ranked), _devices_by_node(ranked))


def _local_ranks(facts: Iterable[NodeFacts]) -> tuple[int, ...]:
    seen: Counter[str] = Counter()
    ranks: list[int] = []
    for each in facts:
        ranks.append(seen[each.node_id])
        seen[each.node_id] += 1
    return tuple(ranks)


def _devices_by_node(facts: Sequence[NodeFacts]) -> dict[str, tuple[str, ...]]:
    found: dict[str, dict[str, tuple[int, int, str]]] = {}
    for each in facts:
        of_node = found.setdefault(each.node_id, {})
        of_node.update({device: _device_key(device, each.visible) for device in each.devices})
    return {node: tuple(sorted(keys, key=keys.__getitem__)) for node, keys in found.items()}


def _device_order(facts: NodeFacts) -> tuple[tuple[int, int, str], ...]:
    return tuple(_device_key(device, facts.visible) for device in facts.devices)


def _device_key(device: str, visible: Sequence[str]) -> tuple[int, int, str]:
    """The node's own order counts; else numbers as numbers, and names after them."""
    if device in visible:
        return (0, visible.index(device), "")
    return (1, int(device), "") if device.isdecimal() else (2, 0, device)


def _address(ip: str) -> tuple[int, int, str]:
    """Orders addresses as numbers, those of IPv4 first, and what is none of them as text."""
    try:
        address = ipaddress.ip_address(ip)
    except ValueError:
        return (99, 0, ip)
    return (address.version, int(address), "")


def _check_addresses(facts: Iterable[NodeFacts], driver_node: str, driver_ip: str) -> None:
    pairs = {(each.node_id, each.node_ip) for each in facts}
    if driver_ip:
        pairs.add((driver_node, driver_ip))
    by_ip = Counter(ip for _, ip in pairs)
    by_node = Counter(node for node, _ in pairs)
    shared = sorted(ip for ip, count in by_ip.items() if count > 1)
    several = sorted(node for node, count in by_node.items() if count > 1)
    if not shared and not several:
        return
    table = "\n".join(f"  {node}  {ip}{'  (driver)' * (node == driver_node)}" for node, ip in sorted(pairs))
    wrong = f"{', '.join(shared)} is the address of several nodes" if shared else f"node {several[0]} has several"
    raise ConfigError(
        f"each node of the cluster needs one address of its own, by which ranks meet, and {wrong}. Start each node with "
        f"its own: 'ray start --node-ip-address=...'. The nodes and their addresses:\n{table}"
    )
