"""Why a placement group does not come: what it wants against what the nodes have. Pure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

__all__ = ("NodeState", "explain", "impossible", "resources_text", "table")

_OF_RAY = ("memory", "object_store_memory", "node:", "accelerator_type:")
_SLACK = 1e-6  # Ray counts in ten-thousandths


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeState:
    """A node of the cluster, as Ray sees it now.

    Attributes:
        node_id: Ray's id.
        ip: Its address in Ray's table.
        alive: False once Ray has found it dead.
        total: Resources by name.
        free: What nobody has taken of them.
    """

    node_id: str
    ip: str
    alive: bool = True
    total: Mapping[str, float] = field(default_factory=dict[str, float])
    free: Mapping[str, float] = field(default_factory=dict[str, float])


def impossible(bundles: Sequence[Mapping[str, float]], strategy: str, nodes: Collection[NodeState]) -> str:
    """Why the bundles could not be placed if the cluster were empty; empty if they could, as far as can be told.

    Args:
        bundles: What each reserves.
        strategy: As ``PACK``.
        nodes: Of the cluster.
    """
    totals = [node.total for node in nodes if node.alive]
    for bundle in bundles:
        if not any(_times(total, bundle) for total in totals):
            return f"no node has {_lacking(bundle, totals)}"
    if strategy == "STRICT_PACK" and not any(_times(total, _sum(bundles)) for total in totals):
        return f"no node has {_lacking(_sum(bundles), totals)}, and STRICT_PACK wants all bundles on one"
    suitable = [total for total in totals if any(_times(total, bundle) for bundle in bundles)]
    if strategy == "STRICT_SPREAD" and len(suitable) < len(bundles):
        return f"{_count(len(suitable), 'node')} could take one, and STRICT_SPREAD wants one on each of {len(bundles)}"
    for name, wanted in _sum(bundles).items():
        have = sum(total.get(name, 0.0) for total in totals)
        if have < wanted - _SLACK:
            return f"all nodes together have {name}: {have:g}, and the bundles want {wanted:g}"
    if all(bundle == bundles[0] for bundle in bundles):
        room = sum(_times(total, bundles[0]) for total in totals)
        if room < len(bundles):
            return f"there is room for {room} of {len(bundles)} bundles on all nodes, if they were empty"
    return ""


def explain(bundles: Sequence[Mapping[str, float]], strategy: str, nodes: Collection[NodeState]) -> str:
    """What is wanted, whether it can ever come, and each node's total and free; several lines.

    Args:
        bundles: What each reserves.
        strategy: As ``PACK``.
        nodes: Of the cluster.
    """
    wanted = Counter(resources_text(bundle) for bundle in bundles)
    lines = [f"wanted, by {strategy}:", *(f"  {count} x {{{text}}}" for text, count in wanted.items())]
    reason = impossible(bundles, strategy, nodes)
    if reason:
        lines.append(f"it can never come as the cluster is: {reason}")
    else:
        lines.append("it would come if others gave back what they have taken")
    names = list(dict.fromkeys(name for bundle in bundles for name in bundle))
    return "\n".join([*lines, "nodes:", table(names, nodes)])


def table(names: Sequence[str], nodes: Iterable[NodeState]) -> str:
    """Each node's total and free: of ``names`` first, then of whatever else it has.

    Args:
        names: Resources that are shown even where a node has none.
        nodes: Of the cluster.
    """
    rows = [("node", "address", "total", "free")]
    for node in nodes:
        if node.alive:
            total, free = ({**dict.fromkeys(names, 0.0), **_ours(each)} for each in (node.total, node.free))
            rows.append((node.node_id[:12], node.ip, resources_text(total), resources_text(free)))
        else:
            rows.append((node.node_id[:12], node.ip, "dead", ""))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  " + "  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def resources_text(resources: Mapping[str, float]) -> str:
    """As in ``GPU: 1, CPU: 4``."""
    return ", ".join(f"{name}: {amount:g}" for name, amount in resources.items()) or "nothing"


def _ours(resources: Mapping[str, float]) -> dict[str, float]:
    """What people ask for: neither memory, nor names that Ray gives nodes and the parts of groups."""
    return {
        name: amount for name, amount in resources.items() if not name.startswith(_OF_RAY) and "_group_" not in name
    }


def _times(total: Mapping[str, float], bundle: Mapping[str, float]) -> int:
    """How often the bundle fits into the whole of a node."""
    fits = (total.get(name, 0.0) / amount for name, amount in bundle.items() if amount > 0)
    return math.floor(min(fits, default=1.0) + _SLACK)


def _sum(bundles: Iterable[Mapping[str, float]]) -> dict[str, float]:
    total: dict[str, float] = {}
    for bundle in bundles:
        for name, amount in bundle.items():
            total[name] = total.get(name, 0.0) + amount
    return total


def _lacking(bundle: Mapping[str, float], totals: Sequence[Mapping[str, float]]) -> str:
    """What of the bundle no node has enough of, else all of it."""
    most = {name: max((total.get(name, 0.0) for total in totals), default=0.0) for name in bundle}
    short = {name: amount for name, amount in bundle.items() if most[name] < amount - _SLACK}
    if not short:
        return f"{resources_text(bundle)} at once"
    return " and ".join(f"{name}: {amount:g} (the most is {most[name]:g})" for name, amount in short.items())


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"
