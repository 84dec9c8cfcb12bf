"""Which layers belong to which pipeline stage. Pure.

A pipeline is as fast as its slowest stage, so layers are dealt out such that the dearest
stage is as cheap as can be. Costs are counted in layers: the output head costs memory and
time, the embedding only memory, which is why it counts half.

Source: vLLM 0.25.1, ``distributed/utils.py``, ``get_pp_indices``, for where spare layers go:
to the last stage but one and backwards, and to the last stage only when nothing else is left.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from aexec.errors import ConfigError

__all__ = ("EndCosts", "balanced_partition", "checked_partition", "layers_of_stage")


class EndCosts(NamedTuple):
    """What the ends of a model cost, in layers.

    Attributes:
        first: What the first stage does beside its layers.
        last: What the last stage does beside its layers.
    """

    first: float = 0.0
    last: float = 0.0

    @classmethod
    def of(cls, embedding: float, head: float, layer: float) -> EndCosts:
        """From sizes in any one unit, as in parameters; an embedding is only looked up, and counts half."""
        return cls(embedding / layer / 2, head / layer) if layer > 0 else cls()


NO_ENDS = EndCosts()


def balanced_partition(num_layers: int, num_stages: int, ends: EndCosts = NO_ENDS) -> tuple[int, ...]:
    """Layers of each stage, such that the dearest stage is as cheap as can be.

    >>> balanced_partition(30, 4)
    (7, 8, 8, 7)
    >>> balanced_partition(30, 2, EndCosts(first=4, last=8))  # a small model with a large vocabulary
    (17, 13)

    Raises:
        ConfigError: There are fewer layers than stages.
    """
    if num_layers < num_stages:
        raise ConfigError(
            f"pipeline_parallel_size is {num_stages}: expected at most {num_layers}, the layers of the model"
        )
    costs = [1.0] * num_stages
    costs[0] += ends.first
    costs[-1] += ends.last
    counts = [1] * num_stages
    takers = [*range(num_stages - 2, -1, -1), num_stages - 1]  # of equally cheap stages the first one of these
    for _ in range(num_layers - num_stages):
        taker = min(takers, key=lambda stage: costs[stage])
        counts[taker] += 1
        costs[taker] += 1.0
    return tuple(counts)


def checked_partition(partition: Sequence[int], num_layers: int) -> tuple[int, ...]:
    """A partition that somebody has asked for.

    Raises:
        ConfigError: It is not one of this model.
    """
    if sum(partition) != num_layers:
        raise ConfigError(
            f"pipeline_partition is {tuple(partition)} and adds up to {sum(partition)}: "
            f"expected {num_layers}, the layers of the model"
        )
    return tuple(partition)


def layers_of_stage(partition: Sequence[int], stage: int) -> range:
    """Indices of a stage's layers in the whole model."""
    start = sum(partition[:stage])
    return range(start, start + partition[stage])
