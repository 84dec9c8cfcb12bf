"""Which ranks are on which node. Pure."""

from __future__ import annotations

from itertools import accumulate, pairwise

from aexec.config import ExecutorConfig
from aexec.errors import ConfigError

__all__ = ("names_of", "spread")


def spread(config: ExecutorConfig) -> tuple[range, ...]:
    """The ranks of each node: they follow each other, the leader's first, so that neighbours are near each other.

    Raises:
        ConfigError: They do not divide among the nodes as the settings say.
    """
    world, nnodes, counts = config.parallel.world_size, config.nnodes, config.ranks_per_node
    layout = (
        f"tensor_parallel_size={config.parallel.tensor_parallel_size} x "
        f"pipeline_parallel_size={config.parallel.pipeline_parallel_size} asks for {world}"
    )
    if counts is None:
        if world % nnodes:
            raise ConfigError(
                f"{world} ranks do not divide among {nnodes} nodes ({layout}): take another nnodes, or say how many "
                "each node has by ranks_per_node"
            )
        counts = [world // nnodes] * nnodes
    if sum(counts) != world:
        raise ConfigError(f"ranks_per_node is {list(counts)}, which is {sum(counts)} ranks, and {layout}")
    return tuple(range(first, end) for first, end in pairwise(accumulate(counts, initial=0)))


def names_of(ranks: range) -> str:
    """Ranks, for people.

    >>> names_of(range(2, 3)), names_of(range(2, 6))
    ('rank 2', 'ranks 2 to 5')
    """
    return f"rank {ranks.start}" if len(ranks) == 1 else f"ranks {ranks.start} to {ranks[-1]}"
