"""What one node has of a world of ranks. Pure."""

from __future__ import annotations

import platform
from dataclasses import dataclass, field

from aexec.config import ExecutorConfig

__all__ = ("NodeShare", "whole_world")


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeShare:
    """The ranks of a group that are on one node.

    Attributes:
        ranks: Those ranks.
        node_id: Names the node; no two nodes of a group have the same.
        node_ip: Its address, by which the others reach it.
        init_method: Where all ranks meet, as ``tcp://host:port``.
        secret: What they prove to each other there; see ``WorkerContext.group_secret``.
        is_whole: These are all ranks there are: they meet in this node, wherever its group chooses.
    """

    ranks: range
    node_id: str
    node_ip: str
    init_method: str = ""
    secret: bytes = field(default=b"", repr=False)
    is_whole: bool = False


def whole_world(config: ExecutorConfig) -> NodeShare:
    """All ranks of an executor are on this node."""
    ranks = range(config.parallel.world_size)
    return NodeShare(ranks=ranks, node_id=platform.node(), node_ip="127.0.0.1", is_whole=True)
