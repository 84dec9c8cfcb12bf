"""How large the buffers of a graph are, and how many there are of each. Pure.

Each channel of the graph (the driver's to all ranks, each rank's to the stage after or to the
driver) has as many buffers as executions may be in flight, each as large as the largest message.
All of them lie in the object store of their writer's node for as long as the graph exists.
"""

from __future__ import annotations

from typing import NamedTuple

from aexec.errors import ConfigError
from aexec.parallel.layout import RankLayout

__all__ = ("DEFAULT_BYTES", "Buffers", "plan_buffers")

DEFAULT_BYTES = 16 << 20
LEAST_BYTES = 1 << 18
STORE_SHARE = 0.4  # of an object store, at most
_MOST = 16


class Buffers(NamedTuple):
    """The buffers of a graph.

    Attributes:
        number: Of each channel; as many executions may be in flight.
        size: Of each, bytes.
    """

    number: int
    size: int


def plan_buffers(layout: RankLayout, asked: int | None, store: int | None) -> Buffers:
    """Decide.

    A step is two executions, and each stage works at another step.

    Args:
        layout: Of the executor.
        asked: ``ExecutorConfig.graph_buffer_bytes``.
        store: Bytes of the smallest object store that has to hold the graph; None: not known.

    Raises:
        ConfigError: What was asked for does not fit there.
    """
    count = min(2 * (layout.pipeline + 1), _MOST)
    channels = 1 + layout.size
    room = DEFAULT_BYTES if store is None else int(store * STORE_SHARE) // (channels * count)
    if asked is None:
        return Buffers(count, max(min(DEFAULT_BYTES, room), LEAST_BYTES))
    if store is not None and asked * channels * count > store:
        raise ConfigError(
            f"ExecutorConfig.graph_buffer_bytes is {asked:,}: {channels} channels with {count} such buffers each take "
            f"{asked * channels * count / 2**20:,.0f} MiB, and Ray's object store has {store / 2**20:,.0f} MiB; make "
            "them smaller, or start Ray with a larger object_store_memory"
        )
    return Buffers(count, asked)
